"""What the doctor says, and what it says of a machine that is ill."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result

from pico_train import doctor
from pico_train.cli import main
from pico_train.config import ModelConfig


def examine(*words: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *words])


def table(result: Result) -> dict[str, list[str]]:
    """Path -> what it stands beside, its largest error, its time, and what is said of it."""
    lines = result.stdout.partition("largest error")[2].splitlines()[1:]
    return {
        line[:28].strip(): [line[28:46].strip(), line[46:61].strip(), line[61:70].strip(), line[70:]] for line in lines
    }


def test_a_healthy_machine_fits_a_screen() -> None:
    began = time.process_time()
    result = examine()
    assert result.exit_code == 0, result.output
    assert time.process_time() - began < 20 * torch.get_num_threads()
    assert len(result.stdout.splitlines()) <= 24
    assert max(map(len, result.stdout.splitlines())) <= 140
    for fact in ("CPU", "memory", "auto takes", "precisions", "attention", "processes"):
        assert f"\n{fact} " in result.stdout
    assert f"torch {torch.__version__}" in result.stdout
    assert "\nattention   flash (8 to 256 features a head) in 32-true" in result.stdout
    found = table(result)
    assert found["plain pass, fp32"] == ["", "0.0e+00", "-", ""]
    largest = {
        "bf16 autocast": 0.1,
        "flash attention": 1e-5,
        "head in chunks": 1e-5,
        "fused AdamW": 1e-5,
        "Muon": 0.1,  # five steps in bf16
    }
    for path, most in largest.items():
        assert 0 < float(found[path][1]) < most
    assert found["activation checkpointing"][1] == "0.0e+00"
    for path in (*largest, "activation checkpointing"):
        assert 0 < float(found[path][2].removesuffix(" x")) < 100
    assert [
        found[path][0] for path in ("bf16 autocast", "flash attention", "head in chunks", "fused AdamW", "Muon")
    ] == [
        "plain pass, fp32",
        "plain attention",
        "plain head",
        "plain AdamW",
        "plain AdamW",
    ]
    for path in ("torch.compile", "FlexAttention"):
        assert found[path][1:] == ["-", "-", "not tried: it compiles for a while; use --compile"]


def test_one_object_for_programs(tiny_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "groups", lambda size, device: iter([(doctor.PLAIN, lambda: lambda: [torch.ones(1)], [])])
    )
    found = json.loads(examine("--json", str(tiny_yaml)).stdout)
    assert found["paths"] == [{"path": "plain pass, fp32", "against": "", "error": 0.0, "time": None, "reason": ""}]
    assert "flash attention; the head takes 64 tokens at a time" in found["facts"]["tiny"]


def test_what_a_configuration_comes_to(tiny_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probes", lambda slow: iter(()))
    said = examine(str(tiny_yaml), "training.fabric.precision=bf16-mixed", "model.max_seq_len=32").stdout
    [line] = [line for line in said.splitlines() if line.startswith("tiny ")]
    assert "(cpu), precision bf16-mixed, " in line
    assert line.endswith("; flash attention; the head takes 128 tokens at a time")
    refused = examine(str(tiny_yaml), "training.fabric.precision=16-mixed")
    assert (refused.exit_code, "needs a CUDA device" in refused.stderr) == (2, True)


def test_heads_of_different_widths_may_take_different_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(model: ModelConfig, precision: str, device: torch.device) -> str:
        return "flash" if precision == "bf16-mixed" and model.head_dim < 256 else "efficient"

    monkeypatch.setattr(doctor, "attention_kernel", kernel)
    cpu = torch.device("cpu")
    assert doctor.kernels_by_width("bf16-mixed", cpu) == "flash (8 to 128), efficient (256 features a head)"
    assert doctor.kernels_by_width("32-true", cpu) == "efficient (8 to 256 features a head)"


def test_several_gpus_add_up_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that are stood in for by the CPU; NCCL puts the sum on each of them."""

    def all_reduce(tensors: list[torch.Tensor]) -> None:
        total = torch.stack(tensors).sum(dim=0)
        for tensor in tensors:
            tensor.copy_(total)

    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", all_reduce)
    [by_nccl] = doctor.sum_pass([cpu, cpu, cpu], doctor.reduced)()
    [added] = doctor.sum_pass([cpu, cpu, cpu], doctor.added)()
    assert torch.equal(by_nccl, added)
    assert float(added.std()) == pytest.approx(6, rel=0.01)  # 1 + 2 + 3 times numbers of spread 1

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    *_, (plain, _, paths) = doctor.groups(doctor.ON_CPU, cpu)
    assert (plain, [path.name for path in paths]) == ("plain sum", ["NCCL all_reduce"])


def test_muons_formula_makes_a_matrix_nearly_orthogonal() -> None:
    """Over lr sqrt(max(1, rows / columns)) the singular values of the update lie in 0.6 .. 1.3, but for the smallest of a square one."""
    for update in doctor.muon_update(doctor.ON_CPU, torch.device("cpu")):
        rows, columns = update.shape
        values = torch.linalg.svdvals(update) / (1e-3 * max(1, rows / columns) ** 0.5)
        assert (values if rows != columns else values.quantile(0.1)).min() > 0.6
        assert values.max() < 1.3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ampere card with 8 of 40 GB free that nothing is computed on."""
    ampere = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", major=8, minor=0, total_memory=40 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: ampere.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ampere)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 10**9, ampere.total_memory))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def test_a_gpu_is_shown(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "attention_kernel", lambda model, precision, device: f"flash on {device.type}")
    facts = dict(doctor.facts())
    assert facts["GPU 0"] == "NVIDIA A100-SXM4-40GB, compute capability 8.0, 8.0 of 40.0 GB free"
    assert "NVIDIA A100-SXM4-40GB (cuda), precision bf16-mixed" in facts["auto takes"]
    assert facts["precisions"].endswith("16-mixed")
    assert facts["attention"].count("flash on cuda (8 to 256 features a head)") == 2
    assert facts["processes"] == "gloo; NCCL"
    assert facts["peak"].startswith("312 TFLOP/s")


def test_a_gpu_gets_a_larger_size(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[doctor.Size, torch.device]] = []
    monkeypatch.setattr(doctor, "groups", lambda size, device: seen.append((size, device)) or iter(()))  # type: ignore[func-returns-value]
    assert list(doctor.probes(slow=False)) == []
    assert seen == [(doctor.ON_GPU, torch.device("cuda"))]


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: object, **options: object) -> object:
        raise RuntimeError("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found\n\nmore")

    monkeypatch.setattr(torch, "compile", broken)
    result = examine("--compile")
    assert result.exit_code == 0
    found = table(result)
    assert found["torch.compile"][1:] == ["-", "-", "InvalidCxxCompiler: No working C++ compiler found"]
    assert found["memory-efficient attention"][1:3] == ["-", "-"]
    assert "No viable backend for scaled_dot_product_attention" in found["memory-efficient attention"][3]


def test_flex_attention_has_no_backward_on_a_cpu() -> None:
    """It is tried, and says so itself, in a line."""
    cpu = torch.device("cpu")
    [(_, prepare, paths)] = [group for group in doctor.groups(doctor.ON_CPU, cpu) if group[0] == "plain attention"]
    [path] = [path for path in paths if path.name == "FlexAttention"]
    found = doctor.probed(path, "plain attention", prepare(), [], cpu, slow=True)
    assert (found.error, found.reason) == (None, "FlexAttention does not support backward on CPU")


@pytest.mark.parametrize("ill", ["raises", "not finite"])
def test_a_plain_path_that_fails_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, ill: str) -> None:
    def sick(*args: object) -> doctor.Run:
        if ill == "raises":
            raise RuntimeError("illegal instruction")
        return lambda: [torch.tensor([float("nan")])]

    monkeypatch.setattr(doctor, "decoder_pass", sick)
    result = examine()
    assert result.exit_code == 1
    assert ("illegal instruction" if ill == "raises" else "not finite") in result.stdout
    assert list(table(result)) == ["plain pass, fp32"]
