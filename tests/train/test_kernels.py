"""What computes a pass: named rightly for the run's own shapes, stored in every manifest, and told when it changes between checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pico_train import kernels
from pico_train.checkpoint.format import read_manifest, seal
from pico_train.cli import main
from pico_train.config import ModelConfig
from pico_train.kernels import attention_kernel
from pico_train.model.decoder import PicoDecoder

CPU = torch.device("cpu")


def shape(n_heads: int, n_kv_heads: int, d_model: int = 64, max_seq_len: int = 32) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        n_layers=1,
        vocab_size=50,
        max_seq_len=max_seq_len,
        attention_n_heads=n_heads,
        attention_n_kv_heads=n_kv_heads,
        activation_hidden_dim=16,
    )


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (8, 2)])
def test_it_is_the_one_that_the_model_runs(backend: SDPBackend, n_heads: int, n_kv_heads: int) -> None:
    """A second way to see it: the operations that a training forward of the whole model sends to the device."""
    config = shape(n_heads, n_kv_heads)
    model, ids = PicoDecoder(config), torch.zeros(3, 32, dtype=torch.long)
    with sdpa_kernel([backend]):
        with _Operations() as seen:
            model(ids, labels=ids)
        named = attention_kernel(config, "32-true", CPU)
    fused = {name for name in seen.names if "_scaled_dot_product_flash_attention" in name}
    assert (named, bool(fused)) == (("flash", True) if backend == SDPBackend.FLASH_ATTENTION else ("math", False))


def test_torch_is_asked_with_what_this_run_hands_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, their sharing and width, the window, and the dtype under autocast; the gradient, which some kernels refuse."""
    asked: list[tuple[Any, ...]] = []

    def choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, **options: Any) -> int:
        asked.append((q.shape, k.shape, v.shape, q.dtype, q.requires_grad, mask, options))
        return SDPBackend.CUDNN_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    config = shape(6, 2, d_model=48, max_seq_len=20)
    assert attention_kernel(config, "bf16-mixed", CPU) == "cudnn"
    [(q, k, v, dtype, with_gradient, mask, options)] = asked
    assert (q, k, v) == ((1, 6, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8))
    assert (dtype, with_gradient, mask) == (torch.bfloat16, True, None)
    assert options == {"is_causal": True, "enable_gqa": True}
    for precision, dtype in (("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("16-mixed", torch.float16)):
        attention_kernel(config, precision, CPU)
        assert asked[-1][3] == dtype


def test_a_device_that_torch_has_no_choice_for_takes_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **options: Any) -> int:
        raise NotImplementedError("no such operator for this device")

    monkeypatch.setattr(torch, "_fused_sdp_choice", unknown)
    assert attention_kernel(shape(4, 2), "32-true", torch.device("meta")) == "math"


CONSTANT = "training.optimization.lr_scheduler=constant"


def test_manifests_hold_it_and_a_change_is_told(
    tiny_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*words: str) -> Result:
        done = CliRunner().invoke(main, ["run", str(tiny_yaml), CONSTANT, *words])
        assert done.exit_code == 0, done.output
        return done

    def made_by(step: int) -> dict[str, Any]:
        return read_manifest(tmp_path / "runs" / "tiny" / "checkpoints" / f"step_{step}").made_by.model_dump()

    first = start("training.max_steps=2", "training.fabric.num_threads=1")
    assert "flash attention; the head takes 64 tokens at a time" in first.stderr
    assert "up to rounding only" not in first.stderr
    known = {"micro_batch_size": 4, "attention_kernel": "flash", "head_tokens": 64, "compiled": False}
    assert made_by(0).items() >= known.items()

    monkeypatch.setattr(kernels, "attention_kernel", lambda *args: "math")
    second = start("training.max_steps=4", "training.fabric.num_threads=1")
    said = "from step 2 on the numbers agree with those before up to rounding only: "
    [line] = {
        line for line in second.stderr.splitlines() if said in line
    }  # one process, two starts: each has a console of its own
    assert line.endswith(said + "attention_kernel flash before, math now")
    assert made_by(2)["attention_kernel"] == "flash"
    assert made_by(4)["attention_kernel"] == "math"


def test_of_an_older_checkpoint_nothing_is_said_to_have_changed(tiny_yaml: Path, tmp_path: Path) -> None:
    """Format 1.1 did not know the kernels: reading gives None, and None is no change."""
    CliRunner().invoke(main, ["run", str(tiny_yaml), CONSTANT, "training.max_steps=2"])
    path = tmp_path / "runs" / "tiny" / "checkpoints" / "step_2" / "manifest.json"
    manifest = json.loads(path.read_text())
    for key in ("micro_batch_size", "attention_kernel", "head_tokens", "compiled"):
        del manifest["made_by"][key]
    manifest["format_version"] = "1.1"
    path.write_text(json.dumps(manifest | {"sha256": seal(manifest)}))
    assert read_manifest(path.parent).made_by.attention_kernel is None
    done = CliRunner().invoke(main, ["run", str(tiny_yaml), CONSTANT, "training.max_steps=4"])
    assert done.exit_code == 0, done.output
    assert "up to rounding only" not in done.stderr
