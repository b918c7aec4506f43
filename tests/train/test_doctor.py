"""What the doctor says, and what it says of a machine that is ill."""

import time

import pytest
import torch
from click.testing import CliRunner, Result

from pico_train import doctor
from pico_train.cli import main


def examine(*words: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *words])


def errors(result: Result) -> dict[str, str]:
    table = result.stdout.partition("largest error")[2].splitlines()[1:]
    return {line[:28].strip(): line[28:43].strip() for line in table}


def test_a_healthy_machine_fits_a_screen() -> None:
    began = time.perf_counter()
    result = examine()
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - began < 20
    assert len(result.stdout.splitlines()) <= 24
    for fact in ("CPU", "memory", "auto takes", "precisions", "attention"):
        assert f"\n{fact} " in result.stdout
    assert f"torch {torch.__version__}" in result.stdout
    found = errors(result)
    assert found["plain fp32"] == "0.0e+00"
    assert found["activation checkpointing"] == "0.0e+00"
    assert 0 < float(found["bf16 autocast"]) < 0.1
    assert float(found["flash attention"]) < 1e-5
    assert found["torch.compile"] == found["FlexAttention"] == "-"
    assert "use --compile" in result.stdout


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: object, **options: object) -> object:
        raise RuntimeError("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found\n\nmore")

    monkeypatch.setattr(torch, "compile", broken)
    result = examine("--compile")
    assert result.exit_code == 0
    [line] = [line for line in result.stdout.splitlines() if line.startswith("torch.compile")]
    assert line.endswith("InvalidCxxCompiler: No working C++ compiler found")


@pytest.mark.parametrize("ill", ["raises", "not finite"])
def test_a_plain_path_that_fails_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, ill: str) -> None:
    def sick(*args: object) -> list[torch.Tensor]:
        if ill == "raises":
            raise RuntimeError("illegal instruction")
        return [torch.tensor([float("nan")])]

    monkeypatch.setattr(doctor, "decoder_gradients", sick)
    result = examine()
    assert result.exit_code == 1
    assert ("illegal instruction" if ill == "raises" else "not finite") in result.stdout
    assert errors(result) == {"plain fp32": "-"}
