"""The device of the linear algebra: tensors are moved there, and what there is not is refused."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from torch.utils import backend_registration

from pico_analyze import analyze
from pico_analyze.checkpoint.reader import open_run
from pico_analyze.cli import main
from pico_analyze.components import matrix
from pico_analyze.components.matrix import Matrix
from pico_analyze.device import DeviceError, check
from pico_analyze.metrics import METRICS, Number

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device")
SIMPLE = {"component_name": "simple", "data_type": "weights", "layer_suffixes": "swiglu.w_2"}


@no_gpu
def test_a_device_that_is_not_there(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "analysis.yaml").write_text(json.dumps({"metrics": [{"metric_name": "per", "components": [SIMPLE]}]}))
    words = ["run", "analysis.yaml", "--run-path", str(run_folder), "--device", "cuda"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "device: cuda cannot be used: torch" in result.stderr
    assert "finds no CUDA device here; leave it out to use the CPU" in result.stderr
    assert not (tmp_path / "analysis_results").exists()


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:one", "cpu:0", ""])
def test_names(name):
    with pytest.raises(DeviceError, match="is not one of cpu, cuda, cuda:<number>"):
        check(name)
    check("cpu")


def test_tensors_go_to_the_device(run_folder, tmp_path, monkeypatch):
    """As far as a CPU goes: on torch's device ``meta`` tensors have shapes and no numbers."""
    checkpoint = open_run(run_folder).checkpoint(0, "meta")
    assert {checkpoint.tensor(row).device.type for row in checkpoint.select("weights")} == {"meta"}
    (tmp_path / "where.py").write_text(
        "from pico_analyze.metrics import Metric\n"
        "def one(x): return float(x.left.device.type == 'meta')\n"
        "def two(x, y): return float({x.left.device.type, y.left.device.type} == {'meta'})\n"
        "METRICS = {'one': Metric(f'{__name__}:one', 'matrix', '', '', ''),\n"
        "           'two': Metric(f'{__name__}:two', 'pair', '', '', '')}\n"
    )
    monkeypatch.setattr("pico_analyze.analysis.check", lambda name: None)
    activations = SIMPLE | {"data_type": "activations"}
    config = {
        "plugins": [str(tmp_path / "where.py")],
        "metrics": [
            {"metric_name": "one", "components": [SIMPLE]},
            {"metric_name": "two", "data_split": "val", "target_checkpoint": 0, "components": [activations]},
        ],
    }
    frame = analyze(run_folder, config, device="meta").query("kind != 'training'")
    assert set(frame["value"]) == {1.0}
    frame = analyze(run_folder, config).query("kind != 'training'")
    assert set(frame["value"]) == {0.0}


@pytest.mark.parametrize("name", [name for name in METRICS if name != "composition_score"])
def test_the_way_of_a_device_gives_the_same_values(name, monkeypatch):
    """What a device computes by torch alone, computed so on the CPU."""
    metric = METRICS[name]
    generator = torch.Generator().manual_seed(0)
    square = name == "eigenvalue_positivity"
    shape = (30, 30) if square else (40, 30)

    def inputs():
        generator.manual_seed(0)
        dense = [torch.randn(*shape, generator=generator) for _ in range(2)]
        right = torch.randn(11, 30 if square else 20, generator=generator)
        products = [Matrix.product(x[:, :11], right) for x in dense]
        stored = [Matrix.dense(x) for x in dense]
        return [side[: 2 if metric.consumes == "pair" else 1] for side in (stored, products)]

    offered = [(p.default,) if isinstance(p, Number) else p.allowed for p in metric.parameters.values()]
    for values in itertools.product(*offered):
        chosen = dict(zip(metric.parameters, values, strict=True))
        for parameter, p in metric.parameters.items():
            if isinstance(p, Number) and p.only and chosen[p.only[0]] != p.only[1]:
                del chosen[parameter]
        here = [metric.compute(*side, **chosen) for side in inputs()]
        with monkeypatch.context() as patched:
            patched.setattr(matrix, "_on_cpu", lambda x: False)
            there = [metric.compute(*side, **chosen) for side in inputs()]
        assert there == pytest.approx(here, rel=1e-9)


ON_A_PRETENDED_DEVICE = """
import json, sys
import pico_analyze.analysis, pretend_device
pretend_device.install()
pico_analyze.analysis.check = lambda name: None
frame = pico_analyze.analyze(sys.argv[1], json.loads(sys.argv[2]), device=pretend_device.DEVICE)
frame.to_parquet(sys.argv[3])
"""


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot be given a device written in Python",
)
def test_a_whole_analysis_on_a_device_that_is_not_the_cpu(run_folder, tmp_path):
    """Nothing mixes tensors of the device and the CPU, in every metric and component of the example."""
    activations = SIMPLE | {"data_type": "activations"}
    value_and_output = {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"}
    circuit = SIMPLE | {"component_name": "ov_circuit", "layer_suffixes": value_and_output}
    of_matrices = ["per", "stable_rank", "condition_number", "gini", "hoyer", "kurtosis", "alpha"]
    of_pairs = ["cka", "pwcca", "procrustes", "rsa"]
    compared = {"data_split": "val", "target_checkpoint": 0, "components": [activations]}
    config = {
        "metrics": [
            *({"metric_name": name, "components": [SIMPLE, circuit]} for name in of_matrices),
            *({"metric_name": name, **compared} for name in of_pairs),
        ]
    }
    expected = analyze(run_folder, config)
    table = tmp_path / "table.parquet"
    words = [sys.executable, "-c", ON_A_PRETENDED_DEVICE, str(run_folder), json.dumps(config), str(table)]
    subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    actual = pd.read_parquet(table)
    assert len(actual) == len(expected) > 100
    np.testing.assert_allclose(actual["value"], expected["value"], rtol=1e-7)
