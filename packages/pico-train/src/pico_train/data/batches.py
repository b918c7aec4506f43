"""Batches of windows: what pass N trains on, and the fixed held-out batch that is looked at beside it.

B sequences, T = seq_len input positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pico_train.data.cache import Split, TokenCache
from pico_train.data.order import sample_ids


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows in the order of training; ``step`` is the pass they belong to, 0 for held-out ones."""

    step: int
    input_ids: Tensor  # (B, T + 1) int64; the last column is only a label
    sample_ids: Tensor  # (B,) int64: the numbers of the windows in their split

    @property
    def inputs(self) -> Tensor:
        """What the model reads, (B, T)."""
        return self.input_ids[:, :-1]

    @property
    def labels(self) -> Tensor:
        """The token that follows each input, (B, T)."""
        return self.input_ids[:, 1:]

    @property
    def n_scored(self) -> int:
        """Tokens that the loss is a mean over: every label."""
        return self.labels.numel()

    def split(self, size: int) -> Iterator["Batch"]:
        """The batch in order, ``size`` sequences at a time; the last part may be shorter."""
        for ids, numbers in zip(torch.split(self.input_ids, size), torch.split(self.sample_ids, size), strict=True):
            yield Batch(self.step, ids, numbers)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on ``device``."""
        return Batch(self.step, self.input_ids.to(device), self.sample_ids.to(device))


@dataclass(frozen=True)
class Sample:
    """One sequence of a batch to read: its number among all windows, its T + 1 token ids and their text."""

    sample_id: int
    token_ids: list[int]
    text: str


class Batches:
    """The batch of every pass, a pure function of (cache, data seed, step): nothing is kept between calls.

    Pass N trains on places ``N * batch_size .. (N + 1) * batch_size - 1`` of the order of samples
    (``order.py``). So another batch size cuts the same sequence elsewhere, and going on at step N needs no
    more than N.
    """

    def __init__(self, cache: TokenCache, *, batch_size: int, seq_len: int, seed: int, shuffle: bool) -> None:
        self.cache = cache
        self.batch_size, self.seq_len = batch_size, seq_len
        self.seed, self.shuffle = seed, shuffle
        self.n_windows = cache.n_windows("train", seq_len)

    def at(self, step: int) -> Batch:
        """The batch of pass ``step``, on the CPU."""
        ids = sample_ids(
            step * self.batch_size,
            self.batch_size,
            n_windows=self.n_windows,
            seed=self.seed,
            shuffle=self.shuffle,
        )
        return _batch(self.cache, "train", step, ids, self.seq_len)

    def epoch(self, step: int) -> int:
        """The epoch, counted from 0, that the first sample of pass ``step`` lies in."""
        return step * self.batch_size // self.n_windows

    def describe(self, step: int) -> list[Sample]:
        """The batch of pass ``step`` to read: sample ids, token ids and text."""
        batch = self.at(step)
        rows: list[list[int]] = batch.input_ids.tolist()
        return [
            Sample(sample_id, row, self.cache.tokenizer.decode(row))
            for sample_id, row in zip(batch.sample_ids.tolist(), rows, strict=True)
        ]


def probe(cache: TokenCache, n_windows: int, seq_len: int) -> Batch:
    """``n_windows`` windows spread evenly over the held-out text, all if it has fewer, whatever the seeds.

    Raises:
        DataError: the held-out text is shorter than one window.
    """
    n = cache.n_windows("held_out", seq_len)
    k = min(n_windows, n)
    return _batch(cache, "held_out", 0, np.arange(k, dtype=np.int64) * n // k, seq_len)


def _batch(cache: TokenCache, split: Split, step: int, ids: np.ndarray, seq_len: int) -> Batch:
    return Batch(step, torch.from_numpy(cache.windows(split, ids, seq_len)), torch.from_numpy(ids))
