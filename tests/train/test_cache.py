"""The token cache: what it holds, its names, and that nothing half-built, damaged or foreign is ever used."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.stats
import tokenizers
from tokenizers import models, pre_tokenizers

from pico_train.config import DataConfig
from pico_train.data import cache as cache_module
from pico_train.data.cache import open_cache, verify
from pico_train.data.sources import DataError, open_source
from pico_train.data.tokenizer import END_OF_TEXT

DOCUMENTS = [f"document {number}: " + " ".join(f"w{number}x{k}" for k in range(12)) for number in range(43)]


def write_text(folder, documents=DOCUMENTS):
    folder.mkdir(exist_ok=True)
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8"
    )


@pytest.fixture
def section(tmp_path):
    """A function from overrides of the data set to a ``data`` section over 43 documents in ``tmp_path``."""
    write_text(tmp_path / "text")

    def make(tokenizer="byte-level-bpe", vocab_size=300, **dataset):
        dataset = {
            "name": "text",
            "path": str(tmp_path / "text"),
            "pattern": "*.jsonl",
            "held_out_fraction": 0.1,
        } | dataset
        return DataConfig.model_validate(
            {
                "dataset": dataset,
                "tokenizer": {"name": str(tokenizer), "vocab_size": vocab_size},
                "cache_dir": str(tmp_path / "caches"),
            }
        )

    return make


def opened(data, model_vocab_size=100_000):
    return open_cache(data, model_vocab_size=model_vocab_size)


def refusal(data, model_vocab_size=100_000):
    with pytest.raises(DataError) as caught:
        opened(data, model_vocab_size)
    return str(caught.value)


def documents_of(cache, tokens):
    text = cache.tokenizer.decode(tokens.tolist())
    assert text.endswith(END_OF_TEXT)
    return text.split(END_OF_TEXT)[:-1]


def word_tokenizer(folder, vocab, added=()):
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(added))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    return folder


# ---- what it holds


def test_every_tenth_document_is_held_out_and_the_text_comes_back(section):
    cache = opened(section())
    assert documents_of(cache, cache.held_out) == DOCUMENTS[9::10]
    assert documents_of(cache, cache.train) == [d for number, d in enumerate(DOCUMENTS) if number % 10 != 9]
    assert (cache.train == cache.tokenizer.eos_id).sum() == cache.ledger.train.documents == 39
    assert cache.ledger.held_out.documents == 4
    assert cache.ledger.train.text_bytes == sum(len(d) for d in documents_of(cache, cache.train))
    assert (len(cache.train), len(cache.held_out)) == (cache.ledger.train.tokens, cache.ledger.held_out.tokens)
    assert isinstance(cache.train, np.memmap)


def test_chunks_leave_no_trace(section, monkeypatch):
    whole = opened(section())
    monkeypatch.setattr(cache_module, "CHUNK_BYTES", 100)
    shutil.rmtree(whole.path)
    assert opened(section()).ledger == whole.ledger


def test_of_few_documents_the_last_is_held_out(section, tmp_path):
    write_text(tmp_path / "text", DOCUMENTS[:3])
    cache = opened(section())
    assert documents_of(cache, cache.held_out) == DOCUMENTS[2:3]
    assert documents_of(cache, cache.train) == DOCUMENTS[:2]


def test_one_document_cannot_be_split(section, tmp_path):
    write_text(tmp_path / "text", DOCUMENTS[:1])
    message = refusal(section())
    assert "data.dataset.document_bytes" in message
    assert "data.dataset.held_out_fraction=0" in message
    cache = opened(section(held_out_fraction=0))
    assert documents_of(cache, cache.train) == DOCUMENTS[:1]
    assert len(cache.held_out) == 0
    verify(cache)


def test_the_tokenizer_is_trained_on_training_documents_only(section, tmp_path):
    before = opened(section())
    write_text(tmp_path / "text", [d + " zzzzzzzz" * 50 if n % 10 == 9 else d for n, d in enumerate(DOCUMENTS)])
    after = opened(section())
    assert after.path != before.path
    assert after.tokenizer_hash == before.tokenizer_hash
    assert np.array_equal(after.train, before.train)
    assert after.fingerprint != before.fingerprint


def test_unigram_entropy_is_that_of_the_training_tokens(section):
    cache = opened(section())
    by_scipy = scipy.stats.entropy(np.bincount(cache.train))
    assert cache.unigram_entropy_nats == pytest.approx(by_scipy, rel=1e-12)


def test_windows_overlap_by_the_token_that_is_only_a_label(section):
    cache = opened(section())
    n = cache.n_windows("train", 16)
    assert n == (len(cache.train) - 1) // 16
    windows = cache.windows("train", np.array([0, 1, n - 1]), 16)
    assert windows.dtype == np.int64
    assert np.array_equal(windows[0], cache.train[:17])
    assert np.array_equal(windows[1], cache.train[16:33])
    assert np.array_equal(windows[2], cache.train[(n - 1) * 16 : n * 16 + 1])
    assert np.array_equal(cache.windows("held_out", np.array([1]), 16)[0], cache.held_out[16:33])


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_text_shorter_than_one_window_is_refused(section, split):
    cache = opened(section())
    n_tokens = len(getattr(cache, split))
    assert cache.n_windows(split, n_tokens - 1) == 1
    with pytest.raises(DataError) as caught:
        cache.n_windows(split, n_tokens)
    assert f"the {split} text has {n_tokens:,} tokens, and one window needs {n_tokens + 1:,}" in str(caught.value)
    assert f"set model.max_seq_len to at most {n_tokens - 1}" in str(caught.value)
    assert cache.n_windows(split, n_tokens - 1) == 1


# ---- ids and dtypes


def base_vocab(size):
    return {"[UNK]": 0, "<e>": 1} | {f"t{number}": number for number in range(2, size)}


@pytest.mark.parametrize(("n_added", "dtype"), [(6, "uint16"), (7, "uint32"), (20, "uint32")])
def test_ids_of_added_tokens_survive_beyond_16_bits(section, tmp_path, n_added, dtype):
    """A base vocabulary of 65,530 and added tokens: ids up to 65,535 fit 16 bits, later ones must not wrap."""
    added = [f"<a{k}>" for k in range(n_added)]
    last = 65_530 + n_added - 1
    write_text(tmp_path / "text", [f"t2 <a{n_added - 1}> t65529", "t3", "t4"])
    cache = opened(section(word_tokenizer(tmp_path / "words", base_vocab(65_530), added)))
    assert cache.train.dtype == dtype
    assert cache.train.tolist() == [2, last, 65_529, 1, 3, 1]
    assert cache.windows("train", np.array([0]), 5).tolist() == [[2, last, 65_529, 1, 3, 1]]


def test_a_model_without_a_row_for_every_id_is_refused_before_anything_is_built(section, tmp_path):
    data = section(word_tokenizer(tmp_path / "words", base_vocab(40), ["<last>"]))
    message = refusal(data, model_vocab_size=40)
    assert "model.vocab_size: 40 is smaller than the tokenizer, which can emit the id 40 ('<last>')" in message
    assert "at least 41" in message
    assert not (tmp_path / "caches").exists()
    opened(data, model_vocab_size=41)
    assert refusal(data, model_vocab_size=40) == message  # also of a cache that another model has built


# ---- names


def test_a_second_opening_builds_nothing(section, monkeypatch):
    first = opened(section())
    monkeypatch.setattr(cache_module, "_build", None)
    assert opened(section()).ledger == first.ledger


@pytest.mark.parametrize(
    "change", [{"vocab_size": 301}, {"held_out_fraction": 0.2}, {"document_bytes": 99}, {"pattern": "*.json*"}]
)
def test_another_option_has_another_cache(section, change):
    assert opened(section(**change)).path != opened(section()).path


def test_another_tokenizer_in_the_same_folder_has_another_cache(section, tmp_path):
    paths = {opened(section(word_tokenizer(tmp_path / "words", base_vocab(size)))).path for size in (10, 11)}
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"eos_token": "t2"}')
    other_end = opened(section(tmp_path / "words"))
    assert len(paths | {other_end.path}) == 3
    assert other_end.train[-1] == 2


def test_the_same_text_elsewhere_and_later_has_the_same_fingerprint(section, tmp_path):
    first = opened(section())
    os.utime(tmp_path / "text" / "text.jsonl", ns=(1, 1))
    later = opened(section())
    write_text(tmp_path / "moved")
    elsewhere = opened(section(path=str(tmp_path / "moved")))
    assert len({first.path, later.path, elsewhere.path}) == 3
    assert first.fingerprint == later.fingerprint == elsewhere.fingerprint


def test_other_content_has_another_fingerprint(section, tmp_path):
    first = opened(section())
    write_text(tmp_path / "text", [*DOCUMENTS[:-1], DOCUMENTS[-1] + "!"])
    assert opened(section()).fingerprint != first.fingerprint


# ---- interruption


KILLED = """
import sys, time
from pico_train.config import DataConfig
from pico_train.data import cache
write = cache._SplitWriter.write
def write_and_wait(self, *args, **options):
    write(self, *args, **options)
    self._file.flush()
    print("writing", flush=True)
    time.sleep(60)
cache._SplitWriter.write = write_and_wait
cache.open_cache(DataConfig.model_validate_json(sys.argv[1]), model_vocab_size=1000)
"""


def test_a_killed_build_is_ignored_then_swept_up(section, tmp_path):
    data = section()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, data.model_dump_json()], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    left = list((tmp_path / "caches").iterdir())
    assert [".tmp-" in folder.name for folder in left] == [True]
    assert (left[0] / "train.bin").stat().st_size > 0

    cache = opened(data)
    assert documents_of(cache, cache.held_out) == DOCUMENTS[9::10]
    assert left[0].exists()  # it might be another machine's, still at work

    long_ago = time.time() - 2 * cache_module.STALE_S
    for path in [*left[0].iterdir(), left[0]]:
        os.utime(path, (long_ago, long_ago))
    other = opened(section(vocab_size=301))
    assert {path.name for path in (tmp_path / "caches").iterdir()} == {cache.path.name, other.path.name}


def test_an_interrupted_build_leaves_nothing(section, tmp_path, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module._SplitWriter, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(section())
    assert list((tmp_path / "caches").iterdir()) == []


def test_the_slower_of_two_builders_uses_what_the_faster_built(section, tmp_path, monkeypatch, caplog):
    encode, winner = cache_module._encode, []

    def slow_encode(*args):
        monkeypatch.setattr(cache_module, "_encode", encode)
        winner.append(opened(section()))
        (winner[0].path / "mark").touch()
        return encode(*args)

    monkeypatch.setattr(cache_module, "_encode", slow_encode)
    with caplog.at_level(logging.INFO, "pico_train.data"):
        cache = opened(section())
    assert "another process has built" in caplog.text
    assert (cache.path / "mark").exists()
    assert [path.name for path in (tmp_path / "caches").iterdir()] == [cache.path.name]


def test_a_text_that_changes_while_it_is_read_is_refused(section, tmp_path, monkeypatch):
    encode = cache_module._encode

    def change_and_encode(*args):
        write_text(tmp_path / "text", [*DOCUMENTS, "one more"])
        return encode(*args)

    monkeypatch.setattr(cache_module, "_encode", change_and_encode)
    assert "was changed while it was read" in refusal(section())
    assert list((tmp_path / "caches").iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_named(section, tmp_path):
    (tmp_path / "caches").write_text("a file")
    assert "data.cache_dir: cannot build a token cache" in refusal(section())


# ---- damage


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def edit_ledger(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("train.bin", truncate, "train.bin has"),
        ("held_out.bin", os.remove, "held_out.bin is missing"),
        ("ledger.json", os.remove, "ledger.json is missing"),
        ("ledger.json", truncate, "ledger.json: "),
        ("ledger.json", lambda path: edit_ledger(path, format_version=2), "ledger.json: format_version"),
        ("ledger.json", lambda path: edit_ledger(path, fingerprint="0" * 64), "fingerprint"),
        ("ledger.json", lambda path: edit_ledger(path, inputs={}), "belongs to another cache"),
        ("tokenizer.json", os.remove, "the tokenizer cannot be read"),
        (
            "tokenizer.json",
            lambda path: path.write_text(path.read_text() + " "),
            "tokenizer.json or tokenizer_config.json has",
        ),
        ("tokenizer_config.json", lambda path: path.write_text('{"eos_token": "a", "bos_token": "a"}'), "has changed"),
        (
            "tokenizer_config.json",
            lambda path: path.write_text('{"eos_token": "<?>", "bos_token": "a"}'),
            "cannot be read",
        ),
    ],
)
def test_a_damaged_cache_is_refused_and_named(section, file, damage, problem):
    cache = opened(section())
    damage(cache.path / file)
    message = refusal(section())
    assert message.startswith(f"the token cache {cache.path} cannot be used: ")
    assert problem in message
    assert "Delete this folder" in message


def test_a_renamed_cache_is_foreign(section):
    first, second = opened(section()), opened(section(vocab_size=301))
    shutil.rmtree(second.path)
    first.path.rename(second.path)
    assert "belongs to another cache" in refusal(section(vocab_size=301))


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_verify_reads_every_token(section, split, monkeypatch):
    monkeypatch.setattr(cache_module, "CHUNK_TOKENS", 100)
    cache = opened(section())
    verify(cache)
    with (cache.path / f"{split}.bin").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x07\x00")
    with pytest.raises(DataError, match=rf"the content of {split}\.bin has changed"):
        verify(opened(section()))


# ---- whatever the text


def test_unicode_survives(section, tmp_path):
    documents = ["  leading", "é e\u0301 日本語 😀 👩‍👩‍👧", "\ttab\r\n\x00 \ufeff", "trailing  \n\n"]
    write_text(tmp_path / "text", documents)
    cache = opened(section())
    assert documents_of(cache, cache.train) + documents_of(cache, cache.held_out) == documents


def test_the_ledger_counts_what_the_source_gives(section):
    data = section(held_out_fraction=0.5)
    ledger = opened(data).ledger
    documents = list(open_source(data.dataset).documents())
    assert ledger.train.documents + ledger.held_out.documents == len(documents)
    assert ledger.train.text_bytes + ledger.held_out.text_bytes == sum(len(d.text.encode()) for d in documents)
