"""Batches are a function of the step, slices of one stream, and the probe is the same for everybody."""

import json

import pytest
import torch

from pico_train.config import DataConfig
from pico_train.data.batches import Batch, Batches, probe
from pico_train.data.cache import open_cache
from pico_train.data.sources import DataError

T = 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    rows = [json.dumps({"text": f"row {number} of some text, é " * 3}) for number in range(60)]
    (folder / "a.jsonl").write_text("\n".join(rows))
    data = DataConfig.model_validate(
        {
            "dataset": {"name": "text", "path": str(folder / "a.jsonl"), "held_out_fraction": 0.1},
            "tokenizer": {"name": "byte-level-bpe", "vocab_size": 280},
            "cache_dir": str(folder / "caches"),
        }
    )
    return open_cache(data, model_vocab_size=280)


@pytest.fixture(scope="module")
def batches(cache):
    def make(batch_size=4, seed=3, shuffle=True):
        return Batches(cache, batch_size=batch_size, seq_len=T, seed=seed, shuffle=shuffle)

    return make


def test_a_batch_is_a_function_of_the_step(batches):
    first, again = batches().at(5), batches().at(5)
    assert first.step == 5
    assert first.input_ids.dtype == first.sample_ids.dtype == torch.int64
    assert first.input_ids.shape == (4, T + 1)
    assert first.sample_ids.shape == (4,)
    assert torch.equal(first.input_ids, again.input_ids)
    assert torch.equal(first.sample_ids, again.sample_ids)


def test_rows_are_the_windows_of_their_sample_ids(cache, batches):
    batch = batches().at(2)
    for row, sample in zip(batch.input_ids, batch.sample_ids, strict=True):
        assert row.tolist() == cache.train[sample * T : sample * T + T + 1].tolist()


def test_labels_are_the_inputs_one_on(batches):
    batch = batches().at(0)
    assert torch.equal(batch.inputs, batch.input_ids[:, :T])
    assert torch.equal(batch.labels[:, :-1], batch.inputs[:, 1:])
    assert torch.equal(batch.labels[:, -1], batch.input_ids[:, T])
    assert batch.n_scored == 4 * T


@pytest.mark.parametrize(("batch_size", "micro"), [(4, 4), (8, 8), (8, 4), (8, 2), (32, 8), (32, 32)])
def test_batch_and_micro_batch_only_slice_one_stream(batches, batch_size, micro):
    """32 samples as 8 x 4, 4 x 8 or 1 x 32, in 1, 2 or 4 parts, are the same tokens in the same order."""
    parts = [part for step in range(32 // batch_size) for part in batches(batch_size).at(step).split(micro)]
    assert {len(part.input_ids) for part in parts} == {micro}
    stream = batches(1)
    assert torch.cat([part.sample_ids for part in parts]).tolist() == [int(stream.at(p).sample_ids) for p in range(32)]
    assert torch.equal(
        torch.cat([part.input_ids for part in parts]), torch.cat([stream.at(p).input_ids for p in range(32)])
    )


def test_the_last_part_may_be_shorter(batches):
    parts = list(batches(7).at(1).split(3))
    assert [len(part.input_ids) for part in parts] == [3, 3, 1]
    assert [part.step for part in parts] == [1, 1, 1]
    assert torch.equal(torch.cat([part.sample_ids for part in parts]), batches(7).at(1).sample_ids)


def test_ids_over_epochs_come_each_exactly_once(batches):
    seven = batches(7)
    n = seven.n_windows
    assert n % 7, "the epoch must end inside a batch"
    ids = torch.cat([seven.at(step).sample_ids for step in range(3 * n // 7 + 1)])[: 3 * n].view(3, n)
    assert torch.equal(ids.sort(dim=1).values, torch.arange(n).expand(3, n))
    assert not torch.equal(ids[0], ids[1])
    assert [seven.epoch(step) for step in (0, n // 7, n // 7 + 1, 3 * n // 7 + 1)] == [0, 0, 1, 3]


def test_seed_and_shuffle_choose_the_order(batches):
    assert not torch.equal(batches(32, seed=1).at(0).sample_ids, batches(32, seed=2).at(0).sample_ids)
    assert batches(4, shuffle=False).at(2).sample_ids.tolist() == [8, 9, 10, 11]


def test_describe_is_the_batch_to_read(cache, batches):
    batch, samples = batches().at(3), batches().describe(3)
    assert [sample.sample_id for sample in samples] == batch.sample_ids.tolist()
    assert [sample.token_ids for sample in samples] == batch.input_ids.tolist()
    whole = cache.tokenizer.decode(cache.train.tolist())
    assert all(sample.text.strip("\ufffd") in whole for sample in samples)
    assert {len(sample.text) > T for sample in samples} == {True}


def test_moving_a_batch_keeps_it(batches):
    batch = batches().at(1)
    moved = batch.to(torch.device("meta"))
    assert moved.input_ids.device.type == moved.sample_ids.device.type == "meta"
    assert (moved.step, moved.input_ids.shape) == (1, batch.input_ids.shape)
    assert torch.equal(batch.to(torch.device("cpu")).input_ids, batch.input_ids)


def test_the_probe_is_spread_over_the_held_out_text(cache):
    n = cache.n_windows("held_out", T)
    few = probe(cache, 4, T)
    assert few.sample_ids.tolist() == [0, n // 4, n * 2 // 4, n * 3 // 4]
    assert few.input_ids[1].tolist() == cache.held_out[n // 4 * T : n // 4 * T + T + 1].tolist()
    assert probe(cache, 10 * n, T).sample_ids.tolist() == list(range(n))


def test_a_window_longer_than_the_text_is_refused(cache):
    with pytest.raises(DataError, match="the train text has"):
        Batches(cache, batch_size=1, seq_len=len(cache.train), seed=0, shuffle=True)
    with pytest.raises(DataError, match="the held_out text has"):
        probe(cache, 1, len(cache.held_out))


def test_a_batch_cannot_be_changed(batches):
    batch: Batch = batches().at(0)
    with pytest.raises(AttributeError):
        batch.step = 1  # type: ignore[misc]
