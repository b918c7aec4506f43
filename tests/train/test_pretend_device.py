"""Training on a device that is not the CPU, as far as a machine without a GPU can tell: nothing is mixed, nothing comes out differently."""

import json
import os
from pathlib import Path

import numpy as np
import pretend_device
import pytest
import several
import torch
import torch.utils.backend_registration
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs of this test are forked"),
    pytest.mark.skipif(
        not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot be given a device written in Python",
    ),
]


LOOKING = (
    "training.optimization.lr_scheduler=constant",
    "training.optimization.eps=1e-3",  # AdamW makes a step of full length of the noise of a gradient that is none
    "monitoring.gradient_norms=layers",
    "monitoring.gradient_noise_scale=true",
)


def test_a_run_is_the_one_of_the_cpu(tiny_yaml: Path, tmp_path: Path) -> None:
    for name, prepare in {"cpu": None, "device": pretend_device.train_on_it}.items():
        line = ["run", str(tiny_yaml), f"checkpointing.run_name={name}", *LOOKING]
        for max_steps in (3, 6):  # ends, and goes on
            started = several.run([*line, f"training.max_steps={max_steps}"], tmp_path / name, n=1, prepare=prepare)
            assert started.codes == [0], started.printed(0)
    cpu, device = tmp_path / "runs" / "cpu", tmp_path / "runs" / "device"
    assert rows(device) == [pytest.approx(row, rel=1e-4) for row in rows(cpu)]
    assert rows(device) != rows(cpu), "it took the formulas that a CPU takes"
    files = sorted(path.relative_to(cpu) for path in cpu.glob("checkpoints/**/*.safetensors"))
    assert len(files) > 20
    for file in files:
        one, other = load_file(cpu / file), load_file(device / file)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            scale = float(tensor.abs().max())
            np.testing.assert_allclose(other[name], tensor, rtol=0, atol=2e-5 * scale, err_msg=f"{file} {name}")


def rows(run: Path) -> list[dict[str, float]]:
    """What the log holds of numbers that the device has computed."""
    kept = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        values = {key: row[key] for key in ("step", "loss", "grad_norm", "val_loss", "noise_scale")} | row["grad_norms"]
        kept.append({key: value for key, value in values.items() if value is not None})
    return kept
