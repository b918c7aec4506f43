"""How the processes of a run agree: rank 0 decides, looks and writes; the others are told.

A rank is one of the processes that train a run together, numbered from 0. Every method below that speaks to other ranks is called by all of
them, in the same order. Alone (``size`` 1) each does nothing but what the caller would have done.
"""

import datetime
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pico_train.errors import PicoError, UserError
from pico_train.launch import Place

T = TypeVar("T")
GLOO_SOURCE = re.compile(r"^\[/[^]]*\] *")  # the line of code that a message begins with
DAYS = datetime.timedelta(days=30)


class LostContact(PicoError):
    """Another rank has ended or does not answer; what happened there is told there."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run. ``patient`` is a group whose members wait for each other without a limit."""

    rank: int = 0
    size: int = 1
    patient: "dist.ProcessGroup | None" = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which decides and writes."""
        return self.rank == 0

    def lead(self, act: Callable[[], T], *, patiently: bool = False) -> T | None:
        """Let rank 0 alone ``act``, and go on together once it is done; what it returned, None on the other ranks.

        ``patiently`` waits for as long as it takes, beyond ``training.fabric.timeout_minutes``.

        Raises:
            PicoError: what ``act`` raised, on every rank.
        """
        if self.size == 1:
            return act()
        result, error = None, None
        if self.first:
            try:
                result = act()
            except PicoError as raised:
                error = raised
                error.alike_on_all_ranks = True
        told = self._told((str(error), error.exit_code) if error else None, self.patient if patiently else None)
        if error:
            raise error
        if told:
            raise AsRankZero(*told)
        return result

    def decided(self, decide: Callable[[], T]) -> T:
        """What ``decide`` returns on rank 0, the only one to call it."""
        result = self.lead(decide)
        return result if self.size == 1 else self._told(result)  # type: ignore[return-value]

    def share(self, rows: Tensor) -> Tensor:
        """The part of ``rows`` (B, ...) that is this rank's: B / size of them, in the order of the ranks."""
        return torch.split(rows, len(rows) // self.size)[self.rank]

    def any(self, *flags: bool) -> list[bool]:
        """Each flag: whether it is set on some rank."""
        if self.size == 1:
            return list(flags)
        joint = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(joint, dist.ReduceOp.MAX)
        return [bool(flag) for flag in joint]

    def joined(self, part: Tensor) -> Tensor:
        """The parts of all ranks one after the other along the first dimension; all parts have the same shape."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    def joined_on_first(self, part: Tensor) -> Tensor | None:
        """``joined`` of a tensor on the CPU, of any dtype, for rank 0 only."""
        if self.size == 1:
            return part
        data = part.contiguous().view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.size)] if self.first else None
        dist.gather(data, parts)
        return torch.cat(parts).view(part.dtype) if parts else None

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the ranks."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
                tensor /= self.size

    def check_same(self, values: Mapping[str, str], what: str) -> None:
        """Make sure that ``values`` are the same on every rank.

        Raises:
            UserError: they are not, on every rank; the message says ``what`` differs, on which rank and in which keys.
        """
        if self.size == 1:
            return
        everywhere: list[Any] = [None] * self.size
        dist.all_gather_object(everywhere, dict(values))
        zero = everywhere[0]
        for rank, other in enumerate(everywhere):
            lines = [
                f"{key}: {zero.get(key, 'missing')} on rank 0, {other.get(key, 'missing')} on rank {rank}"
                for key in zero | other
                if zero.get(key) != other.get(key)
            ]
            if lines:
                error = UserError(f"rank {rank} {what}:\n  " + "\n  ".join(lines))
                error.alike_on_all_ranks = True
                raise error

    def _told(self, value: Any, group: "dist.ProcessGroup | None" = None) -> Any:
        """What ``value`` is on rank 0."""
        data = pickle.dumps(value) if self.first else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group)
        content = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(content, 0, group)
        return pickle.loads(content.numpy().tobytes())


ALONE = Ranks()


class AsRankZero(PicoError):
    """What rank 0 has raised, and tells, on another rank."""

    alike_on_all_ranks = True

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def gathered(place: Place, *, on_cuda: bool, timeout_minutes: float) -> Iterator[Ranks]:
    """The ranks of the processes that were started together; within the block, losing one of them raises ``LostContact``.

    ``timeout_minutes`` is how long a rank waits for another.
    """
    if place.size == 1:
        yield ALONE
        return
    limit = datetime.timedelta(minutes=timeout_minutes)
    try:
        if not dist.is_initialized():
            # tensors of the CPU go through gloo also where those of the GPU go through NCCL
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=limit)
        yield Ranks(place.rank, place.size, dist.new_group(backend="gloo", timeout=DAYS))
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostContact(
            f"rank {place.rank} has lost the other ranks, which have ended or did not answer within "
            f"training.fabric.timeout_minutes={timeout_minutes:g} ({GLOO_SOURCE.sub('', str(error)).split('. ')[0]}); "
            "what they said comes first. The same command goes on from the last checkpoint"
        ) from error
