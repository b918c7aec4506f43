"""Which devices, precision and strategy a run uses: ``auto`` resolved, printed once and stored in every manifest."""

import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pico_train.errors import UserError
from pico_train.launch import Place
from pico_train.sharding import shard

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from pico_train.config import FabricConfig


Strategy = Literal["single_device", "ddp", "fsdp"]


@dataclass(frozen=True)
class Hardware:
    """What ``auto`` came to: Lightning's accelerator and precision words, the device's name, the CPU threads of each process.

    ``world_size`` processes, ``n_devices`` of them on each machine, with a device each.
    """

    accelerator: str
    precision: str
    device_name: str
    n_threads: int
    world_size: int = 1
    n_devices: int = 1
    strategy: Strategy = "single_device"

    def __str__(self) -> str:
        one = f"{self.device_name} ({self.accelerator}), precision {self.precision}, {self.n_threads} CPU threads"
        return one if self.world_size == 1 else f"{self.world_size} ranks by {self.strategy}, each {one}"


def choose_hardware(section: "FabricConfig", place: Place) -> Hardware:
    """Resolve ``training.fabric`` on this machine, for the process at ``place``.

    ``auto`` takes CUDA, then MPS, then the CPU; precision ``auto`` is fp32 on CPU and MPS, fp16 with a loss scaler on CUDA
    devices before Ampere, bf16 autocast from Ampere on.

    Raises:
        UserError: the device asked for is not there, or cannot do the precision asked for.
    """
    accelerator = _accelerator(section.accelerator)
    precision = section.precision
    if precision == "auto":
        precision = "32-true"
        if accelerator == "cuda":
            precision = "bf16-mixed" if torch.cuda.get_device_capability()[0] >= 8 else "16-mixed"
    if precision == "16-mixed" and accelerator != "cuda":
        raise UserError(
            f"training.fabric.precision: '16-mixed' needs a CUDA device and this run is on {accelerator}; "
            "use 'auto', '32-true' or 'bf16-mixed'"
        )
    if precision.startswith("bf16") and accelerator == "cuda" and torch.cuda.get_device_capability()[0] < 8:
        raise UserError(
            f"training.fabric.precision: {precision!r} needs a device that computes in bf16 (NVIDIA Ampere or newer) and "
            f"{_device_name(accelerator)} does not; use 'auto', '32-true' or '16-mixed'"
        )
    there = {"cpu": place.local_size, "cuda": torch.cuda.device_count(), "mps": 1}[accelerator]
    if place.local_size > there:
        raise UserError(
            f"training.fabric.num_devices: {place.local_size} processes on this machine, and it has {there} {accelerator} "
            f"{'device' if there == 1 else 'devices'}; use as many, or training.fabric.accelerator=cpu"
        )
    strategy: Strategy = "single_device"
    if place.size > 1:
        strategy = "ddp" if section.strategy == "auto" else section.strategy
    if strategy == "fsdp" and precision == "16-mixed":
        raise UserError(
            "training.fabric.strategy: fsdp has no loss scaling for precision 16-mixed; use bf16-mixed, 32-true or ddp"
        )
    if section.num_threads is not None:
        torch.set_num_threads(section.num_threads)
    if accelerator == "cuda":
        torch.cuda.set_device(place.local_rank)
    return Hardware(
        accelerator,
        precision,
        _device_name(accelerator),
        torch.get_num_threads(),
        world_size=place.size,
        n_devices=place.local_size,
        strategy=strategy,
    )


def _accelerator(asked: str) -> str:
    there: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    if asked == "auto":
        return next(name for name, available in there.items() if available())
    name = "cuda" if asked == "gpu" else asked
    if not there[name]():
        found = ", ".join(name for name, available in there.items() if available())
        raise UserError(f"training.fabric.accelerator: {asked!r} is not on this machine; there is: {found} (or 'auto')")
    return name


def _device_name(accelerator: str) -> str:
    if accelerator == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError):  # Linux names the model of the processor here, platform only its architecture
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def start_fabric(hardware: Hardware) -> "Fabric":
    """Lightning Fabric on ``hardware``; several processes have found each other before."""
    from lightning.fabric import Fabric  # takes seconds to import, and most commands do not train
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    several = hardware.world_size > 1
    strategies: dict[Strategy, Callable[[], Any]] = {
        "single_device": lambda: "auto",
        "ddp": DDPStrategy,
        "fsdp": lambda: ModelParallelStrategy(shard, data_parallel_size=hardware.world_size, tensor_parallel_size=1),
    }
    fabric = Fabric(
        accelerator=hardware.accelerator,
        devices=hardware.n_devices,
        num_nodes=hardware.world_size // hardware.n_devices,
        strategy=strategies[hardware.strategy](),
        precision=hardware.precision,  # type: ignore[arg-type]
        # Not what Fabric would find by itself: the variables of torchrun are there whoever started several processes, and a single one
        # is a single one also in a job of Slurm with several tasks.
        plugins=[TorchElasticEnvironment() if several else LightningEnvironment()],
    )
    fabric.launch()
    return fabric


def peak_memory(device: torch.device) -> int | None:
    """The highest resident memory of this process so far in bytes; on CUDA the highest allocated device memory.

    None on Windows, which keeps no such figure.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
