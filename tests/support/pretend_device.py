"""A device that is not the CPU, made of CPU memory: what mixes tensors of both fails on it as on a GPU.

``install()`` registers it with torch under the name ``pretend``, for the rest of the process. Every operation runs on the CPU's kernels.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "pretend:0"
OPERATIONS, ANY = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
CROSSING = ("copy_", "_to_copy", "index")  # the operations that may take a tensor here and one there, as on a GPU


class Pretended(torch.Tensor):
    """A tensor on the device; ``raw`` holds its numbers in the CPU's memory."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Pretended":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(DEVICE),
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the CPU tensor."""
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What ``func`` comes to, on the device unless it was asked for elsewhere."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    name = func._schema.name.removeprefix("aten::")
    strangers = [t for t in tensors if not isinstance(t, Pretended) and t.ndim > 0]
    if strangers and name not in CROSSING and any(isinstance(t, Pretended) for t in tensors):
        raise RuntimeError(
            f"{name}: a tensor of shape {tuple(strangers[0].shape)} is on the CPU, others are on {DEVICE}"
        )
    target = kwargs.get("device")
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    out = func(*tree_map(raw_of, args), **tree_map(raw_of, kwargs))
    if name == "copy_":
        return args[0]
    if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
        return out
    known = {id(t.raw): t for t in tensors if isinstance(t, Pretended)}  # changed in place, or given as out=
    return tree_map(lambda x: _wrapped(x, known), out)


def _wrapped(value: Any, known: dict[int, "Pretended"]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else Pretended(value)


def raw_of(value: Any) -> Any:
    """The CPU tensor inside, or the value itself."""
    return value.raw if isinstance(value, Pretended) else value


def install() -> None:
    """Register the device."""
    from torch.utils import backend_registration as torchs

    class Module(torchs._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def get_rng_state(self, device: int) -> Tensor:  # it draws nothing by itself
            return torch.empty(0)

        def set_rng_state(self, state: Tensor, device: int) -> None:
            pass

    torchs._setup_privateuseone_for_python_backend("pretend", backend_module=Module())
    for name in ("empty.memory_format", "empty_strided"):
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        OPERATIONS.impl(name, lambda *args, func=func, **kwargs: computed(func, args, kwargs), "PrivateUse1")
    OPERATIONS.impl("_copy_from", copied, "PrivateUse1")
    ANY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("linear", "mm", "matmul", "bmm", "scaled_dot_product_attention"):
        func = getattr(torch.ops.aten, name).default
        OPERATIONS.impl(name, lambda *args, func=func, **kwargs: narrowed(func, args, kwargs), "AutocastPrivateUse1")


def copied(x: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    """``x``, written over ``to``."""
    raw_of(to).copy_(raw_of(x))
    return to


def narrowed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A matrix product under autocast: in its dtype, as on a GPU."""
    dtype = torch.get_autocast_dtype("pretend")

    def narrow(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    with torch.autocast("pretend", enabled=False):
        return func(*tree_map(narrow, args), **tree_map(narrow, kwargs))


def train_on_it(rank: int) -> None:
    """Let the runs of this process train on the device: what Fabric is given is otherwise as for a single GPU."""
    import lightning.fabric
    from lightning.fabric.accelerators.cpu import CPUAccelerator
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy

    import pico_train.run
    from pico_train.hardware import Hardware

    class Accelerator(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            pass

    def start_fabric(hardware: Hardware) -> lightning.fabric.Fabric:
        strategy = SingleDeviceStrategy(torch.device(DEVICE), accelerator=Accelerator())
        fabric = lightning.fabric.Fabric(strategy=strategy, precision=hardware.precision)  # type: ignore[arg-type]
        fabric.launch()
        return fabric

    install()
    pico_train.run.start_fabric = start_fabric
