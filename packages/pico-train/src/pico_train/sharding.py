"""A model whose parameters are spread over the ranks: how it is cut, and how its tensors are put together and taken apart.

A sharded parameter is a ``DTensor``, of which each rank holds some rows. What is not sharded passes through all of this unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Cut the parameters of a model (on the meta device) over the ranks, block by block, and the rest as one; values are to come.

    Blocks are put together for their own forward and backward only. The rest stays together from the forward to the end of the
    backward, for it is used at both ends of the model. ``module`` is the model, or calls it as its ``model``; one that is cut stays
    as it is.
    """
    from torch.distributed.fsdp import fully_shard

    model: Any = getattr(module, "model", module)
    if is_sharded(next(model.parameters())):  # for a compiled forward that was given up
        return module
    ranks = mesh["data_parallel"]
    for block in model.layers:
        fully_shard(block, mesh=ranks)
    fully_shard(model, mesh=ranks, reshard_after_forward=False)
    model.to_empty(device=mesh.device_type)
    return module


def whole(tensor: Tensor) -> Tensor:
    """``tensor``, put together on every rank where it is sharded."""
    sharded: Any = tensor
    together: Tensor = sharded.full_tensor() if is_sharded(tensor) else tensor
    return together


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: all of it, where it is not sharded."""
    sharded: Any = tensor
    part: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds only a part of ``tensor``."""
    return hasattr(tensor, "full_tensor")


def is_finite(tensor: Tensor) -> bool:
    """Whether every entry is finite, on every rank alike."""
    return bool(whole(tensor.isfinite().all()))


def part_like(full: Tensor, like: Tensor) -> Tensor:
    """``full`` on the device of ``like``; where that is sharded, this rank's part of it. Nothing is sent."""
    if not is_sharded(like):
        return full.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(full.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


@contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """For forwards without a backward, also of parts of ``model``: what is not in a block is put together, and given back at the end."""
    sharded: Any = model
    if hasattr(model, "unshard"):
        sharded.unshard()
    try:
        yield
    finally:
        if hasattr(model, "reshard"):
            sharded.reshard()
