"""Which precision a device gets by itself, and which it is refused. The devices are stood in for: no GPU is needed."""

import pytest
import torch

from pico_train.config import FabricConfig
from pico_train.errors import UserError
from pico_train.hardware import choose_hardware
from pico_train.launch import Place

VOLTA, AMPERE, HOPPER = (7, 0), (8, 0), (9, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: f"GPU of capability {request.param}")


@pytest.mark.parametrize(
    ("gpu", "precision"), [(VOLTA, "16-mixed"), (AMPERE, "bf16-mixed"), (HOPPER, "bf16-mixed")], indirect=["gpu"]
)
def test_what_auto_takes(gpu: None, precision: str) -> None:
    hardware = choose_hardware(FabricConfig(), Place())
    assert (hardware.accelerator, hardware.precision) == ("cuda", precision)


@pytest.mark.parametrize("gpu", [VOLTA], indirect=True)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_is_refused_where_the_device_has_none(gpu: None, precision: str) -> None:
    with pytest.raises(
        UserError, match=rf"'{precision}' needs a device that computes in bf16 .* GPU of capability \(7, 0\)"
    ):
        choose_hardware(FabricConfig(precision=precision), Place())


@pytest.mark.parametrize("gpu", [HOPPER], indirect=True)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "32-true"])
def test_what_the_device_has_is_taken_as_asked_for(gpu: None, precision: str) -> None:
    assert choose_hardware(FabricConfig(precision=precision), Place()).precision == precision


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="'16-mixed' needs a CUDA device and this run is on cpu"):
        choose_hardware(FabricConfig(precision="16-mixed", accelerator="cpu"), Place())


def test_a_mac_computes_in_fp32_unless_it_is_asked_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    hardware = choose_hardware(FabricConfig(), Place())
    assert (hardware.accelerator, hardware.precision) == ("mps", "32-true")
    assert choose_hardware(FabricConfig(precision="bf16-mixed"), Place()).precision == "bf16-mixed"
    with pytest.raises(UserError, match="'16-mixed' needs a CUDA device and this run is on mps"):
        choose_hardware(FabricConfig(precision="16-mixed"), Place())
