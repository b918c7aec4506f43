"""Weighting of micro-batches: what a pass computes must not depend on how it is cut."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from pico_train.data.batches import Batch
from pico_train.loop import forward_backward, pass_seed


@dataclass(frozen=True, eq=False)
class MaskedBatch(Batch):
    """A batch of which only some labels are scored."""

    scored: Tensor

    @property
    def n_scored(self) -> int:
        return int(self.scored.sum())

    def split(self, size: int) -> Iterator["MaskedBatch"]:
        parts = zip(self.input_ids.split(size), self.sample_ids.split(size), self.scored.split(size), strict=True)
        for ids, numbers, scored in parts:
            yield MaskedBatch(self.step, ids, numbers, scored)


def objective(model: nn.Module, batch: Batch, step: int) -> Tensor:
    assert isinstance(batch, MaskedBatch)
    labels = batch.labels.masked_fill(~batch.scored, -100)
    return nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), labels.flatten())


def gradient(micro_batch_size: int, scored: Tensor) -> tuple[float, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    ids = torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(1))
    batch = MaskedBatch(0, ids, torch.arange(12), scored)
    fabric = SimpleNamespace(backward=lambda loss: loss.backward())
    losses = forward_backward(fabric, model, objective, batch, micro_batch_size, step=0, dropout_seed=0)  # type: ignore[arg-type]
    return float(losses.sum()), model[1].weight.grad


MASKS = {
    "rows 1 to 5 masked": torch.tensor([[row not in range(1, 6)] * 5 for row in range(12)]),
    "a whole micro-batch masked": torch.tensor([[row >= 6] * 5 for row in range(12)]),
    "single tokens": torch.arange(60).view(12, 5) % 7 == 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [6, 4, 5, 1])
def test_loss_and_gradient_are_those_of_the_whole_batch(mask: str, size: int) -> None:
    loss, whole = gradient(12, MASKS[mask])
    part_loss, parts = gradient(size, MASKS[mask])
    assert part_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)


def test_the_seed_of_a_pass_depends_on_all_that_it_should() -> None:
    seeds = {pass_seed(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
