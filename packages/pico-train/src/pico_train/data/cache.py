"""Memory-mapped tokens, built once per (source, tokenizer, options) and shared by all runs that ask for them.

``<cache_dir>/<key>/`` holds ``train.bin`` and ``held_out.bin`` (token ids, uint16 or uint32, little-endian),
the tokenizer's files, and ``ledger.json``, written last. The key is a hash of what the cache was asked for,
down to size and time of each file of text, so that a change of any of them leads to another folder. The
fingerprint is a hash of what the cache holds, so that two machines with the same text agree on it. A cache is
built in ``<key>.tmp-...`` beside its place and appears by one rename; what a kill leaves behind is never
read.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from pico_train.config import DataConfig
from pico_train.data.sources import DataError, Document, Source, open_source
from pico_train.data.tokenizer import Tokenizer
from pico_train.words import counted

log = logging.getLogger("pico_train.data")

Split: TypeAlias = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")

NOTHING_HELD_OUT = (
    "data.dataset.held_out_fraction=0 evaluation.metrics=null checkpointing.learning_dynamics.eval_data=null"
)
STALE_S = 24 * 3600  # a build that has written nothing for so long is dead, wherever it ran
CHUNK_BYTES = 1 << 20  # of text, encoded at a time
CHUNK_TOKENS = 1 << 22  # hashed at a time


class SplitLedger(BaseModel):
    """One token file: ``sha256`` covers its ids as little-endian 32-bit integers, whatever its dtype."""

    model_config = ConfigDict(frozen=True)

    documents: int
    text_bytes: int
    tokens: int
    sha256: str


class Ledger(BaseModel):
    """What is in a cache and what it was built from: ``ledger.json``."""

    model_config = ConfigDict(frozen=True)

    format: Literal["pico-token-cache"] = "pico-token-cache"
    format_version: Literal[1] = 1
    inputs: dict[str, Any]
    tokenizer_hash: str
    bos_id: int
    eos_id: int
    vocab_size: int
    dtype: Literal["<u2", "<u4"]
    train: SplitLedger
    held_out: SplitLedger
    unigram_entropy_nats: float
    fingerprint: str


@dataclass(frozen=True)
class TokenCache:
    """An opened cache. Window ``w`` is the tokens ``w * seq_len .. w * seq_len + seq_len`` of its split."""

    path: Path
    ledger: Ledger
    tokenizer: Tokenizer

    @cached_property
    def train(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The tokens of the training documents, each document followed by the end of text, memory-mapped."""
        return self._tokens("train")

    @cached_property
    def held_out(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The tokens of the held-out documents, in the same form."""
        return self._tokens("held_out")

    @property
    def fingerprint(self) -> str:
        """SHA-256 that names the cache by what it holds: both token streams and the tokenizer."""
        return self.ledger.fingerprint

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of ``tokenizer.json``."""
        return self.ledger.tokenizer_hash

    @property
    def unigram_entropy_nats(self) -> float:
        """Entropy of the training tokens' frequencies: the loss of the best model that ignores context."""
        return self.ledger.unigram_entropy_nats

    def n_windows(self, split: Split, seq_len: int) -> int:
        """How many windows of ``seq_len + 1`` tokens at stride ``seq_len`` the split holds.

        Raises:
            DataError: not one.
        """
        found, needed = getattr(self.ledger, split).tokens, seq_len + 1
        if found < needed:
            remedies = ["use more text"] + [f"set model.max_seq_len to at most {found - 1}"] * (found > 1)
            if split == "held_out":
                remedies += ["raise data.dataset.held_out_fraction", f"ask for nothing held out ({NOTHING_HELD_OUT})"]
            raise DataError(
                f"{self.path}: the {split} text has {counted(found, 'token')}, and one window needs {needed:,} "
                f"(model.max_seq_len + 1): {', or '.join(remedies)}"
            )
        return int((found - 1) // seq_len)

    def windows(self, split: Split, ids: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
        """The windows with the numbers ``ids`` (B,), shape (B, seq_len + 1)."""
        tokens = self.train if split == "train" else self.held_out
        return np.asarray(tokens[ids[:, None] * seq_len + np.arange(seq_len + 1)], np.int64)

    def _tokens(self, split: Split) -> npt.NDArray[np.unsignedinteger[Any]]:
        if getattr(self.ledger, split).tokens == 0:
            return np.empty(0, self.ledger.dtype)  # an empty file cannot be mapped
        return np.memmap(self.path / f"{split}.bin", self.ledger.dtype, mode="r")


def open_cache(data: DataConfig, *, model_vocab_size: int) -> TokenCache:
    """Open the cache for the section ``data``; build it first where there is none.

    Raises:
        DataError: the text, the tokenizer or an existing cache cannot be used, or the tokenizer can emit an
            id that a model of ``model_vocab_size`` entries has no row for.
    """
    source = open_source(data.dataset)
    trained = data.tokenizer.name == "byte-level-bpe"
    tokenizer = None if trained else Tokenizer.load(data.tokenizer.name)
    inputs = {
        "dataset": data.dataset.model_dump(mode="json", exclude={"path"}),
        "root": str(source.root.resolve()),
        "files_sha256": _sha256(source.signature()),
        "tokenizer": _identity(tokenizer) if tokenizer else data.tokenizer.model_dump(mode="json"),
    }
    root = Path(data.cache_dir).expanduser()
    path = root / _key(inputs)
    _remove_stale(root)
    if not path.exists():
        if tokenizer is not None:
            _check_vocabulary(tokenizer, model_vocab_size)
        try:
            _build(path, inputs, source, tokenizer, data, model_vocab_size)
        except OSError as error:
            raise DataError(f"data.cache_dir: cannot build a token cache in {root}: {error}") from error
    cache = _open(path)
    _check_vocabulary(cache.tokenizer, model_vocab_size)
    return cache


def verify(cache: TokenCache) -> None:
    """Read every token and compare with the ledger.

    Raises:
        DataError: a file is not what was written.
    """
    for split, tokens in (("train", cache.train), ("held_out", cache.held_out)):
        digest = hashlib.sha256()
        for begin in range(0, len(tokens), CHUNK_TOKENS):
            digest.update(tokens[begin : begin + CHUNK_TOKENS].astype("<u4").tobytes())
        if digest.hexdigest() != getattr(cache.ledger, split).sha256:
            raise _damaged(cache.path, f"the content of {split}.bin has changed")


def _open(path: Path) -> TokenCache:
    """The cache in ``path``, if its ledger, file sizes and tokenizer agree."""
    try:
        ledger = Ledger.model_validate_json((path / "ledger.json").read_bytes())
    except FileNotFoundError:
        raise _damaged(path, "ledger.json is missing") from None
    except OSError as error:
        raise _damaged(path, f"ledger.json cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        raise _damaged(path, f"ledger.json: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    if _key(ledger.inputs) != path.name:
        raise _damaged(path, "ledger.json belongs to another cache")
    if ledger.fingerprint != _fingerprint(ledger.train, ledger.held_out, ledger.tokenizer_hash):
        raise _damaged(path, "the fingerprint in ledger.json is not that of its content")
    for split in SPLITS:
        file = path / f"{split}.bin"
        expected = getattr(ledger, split).tokens * np.dtype(ledger.dtype).itemsize
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise _damaged(path, f"{file.name} {found}, the ledger says {expected:,}")
    try:
        tokenizer = Tokenizer.read_files(path)
    except Exception as error:  # whatever is wrong with these two files, the cache is not what was written
        raise _damaged(path, f"the tokenizer cannot be read: {error}") from None
    if _identity(tokenizer) != ledger.model_dump(include={"tokenizer_hash", "bos_id", "eos_id"}):
        raise _damaged(path, "tokenizer.json or tokenizer_config.json has changed")
    return TokenCache(path, ledger, tokenizer)


def _build(
    path: Path,
    inputs: dict[str, Any],
    source: Source,
    tokenizer: Tokenizer | None,
    data: DataConfig,
    model_vocab_size: int,
) -> None:
    """Build a cache beside ``path`` and rename it there, unless another process was faster."""
    began = time.perf_counter()
    staging = path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    staging.mkdir(parents=True)
    try:
        split_of = _splitter(source, data.dataset.held_out_fraction)
        if tokenizer is None:
            log.info("training a byte-level BPE of %d entries on %s", data.tokenizer.vocab_size, source.root)
            training = (document for number, document in enumerate(source.documents()) if split_of(number) == "train")
            tokenizer = Tokenizer.train(training, vocab_size=data.tokenizer.vocab_size)
            _check_vocabulary(tokenizer, model_vocab_size)
        log.info("encoding %s into %s", source.root, path)
        ledger = _encode(staging, inputs, source, split_of, tokenizer)
        if _sha256(source.signature()) != inputs["files_sha256"]:
            raise DataError(f"{source.root} was changed while it was read; start again")
        tokenizer.write_files(staging)
        (staging / "ledger.json").write_text(ledger.model_dump_json(indent=1) + "\n", encoding="utf-8")
        for file in staging.iterdir():
            _fsync(file)
        _fsync(staging)
        try:
            staging.rename(path)
        except OSError:
            if not path.exists():
                raise
            log.info("another process has built %s meanwhile", path)
        else:
            _fsync(path.parent)
            log.info(
                "built %s in %.1f s: %s training and %s held-out tokens",
                path,
                time.perf_counter() - began,
                f"{ledger.train.tokens:,}",
                f"{ledger.held_out.tokens:,}",
            )
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already after the rename


def _encode(
    staging: Path,
    inputs: dict[str, Any],
    source: Source,
    split_of: Callable[[int], Split],
    tokenizer: Tokenizer,
) -> Ledger:
    """Write the tokens of all documents, each followed by the end of text, and return the ledger."""
    dtype: Literal["<u2", "<u4"] = "<u2" if tokenizer.size <= 1 << 16 else "<u4"
    counts = np.zeros(tokenizer.size, np.int64)
    n_documents = 0
    total_bytes = sum(stamp.size_bytes for stamp in source.signature())
    with (
        _SplitWriter(staging / "train.bin", dtype) as train,
        _SplitWriter(staging / "held_out.bin", dtype) as held_out,
        tqdm(total=total_bytes, unit="B", unit_scale=True, desc="encoding", disable=None) as progress,
    ):
        for chunk in _chunks(source.documents()):
            encoded = tokenizer.encode_batch([document.text for document in chunk])
            for split, writer in (("train", train), ("held_out", held_out)):
                mine = [i for i in range(len(chunk)) if split_of(n_documents + i) == split]
                tokens = np.array([token for i in mine for token in (*encoded[i], tokenizer.eos_id)], "<u4")
                text_bytes = sum(_size_bytes(chunk[i]) for i in mine)
                writer.write(tokens, documents=len(mine), text_bytes=text_bytes)
                if split == "train":
                    counts += np.bincount(tokens, minlength=len(counts))
                progress.update(text_bytes)
            n_documents += len(chunk)
    return Ledger(
        inputs=inputs,
        **_identity(tokenizer),
        vocab_size=tokenizer.size,
        dtype=dtype,
        train=train.ledger(),
        held_out=held_out.ledger(),
        unigram_entropy_nats=_entropy_nats(counts),
        fingerprint=_fingerprint(train.ledger(), held_out.ledger(), tokenizer.hash),
    )


class _SplitWriter:
    """Appends tokens to the file of one split and counts what it holds."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self._documents = self._text_bytes = self._tokens = 0

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, tokens: npt.NDArray[np.uint32], *, documents: int, text_bytes: int) -> None:
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._digest.update(tokens.tobytes())
        self._documents += documents
        self._text_bytes += text_bytes
        self._tokens += len(tokens)

    def ledger(self) -> SplitLedger:
        return SplitLedger(
            documents=self._documents,
            text_bytes=self._text_bytes,
            tokens=self._tokens,
            sha256=self._digest.hexdigest(),
        )


def _splitter(source: Source, held_out_fraction: float) -> Callable[[int], Split]:
    """Which split document ``number`` belongs to.

    Every k-th is held out, k = round(1 / fraction); of fewer than k documents the last.

    Raises:
        DataError: there is one document only, which cannot be in both splits.
    """
    if held_out_fraction == 0:
        return lambda number: "train"
    k = round(1 / held_out_fraction)
    n_first = sum(1 for _ in islice(source.documents(), k))
    if n_first == 1:
        size_bytes = sum(stamp.size_bytes for stamp in source.signature())
        raise DataError(
            f"data.dataset: {source.root} is one document of {size_bytes:,} bytes, so none can be held out of "
            "training: use more text, lower data.dataset.document_bytes so that it is cut (at line ends), or hold nothing out "
            f"({NOTHING_HELD_OUT})"
        )
    return lambda number: "held_out" if number % k == n_first - 1 else "train"


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in lists of about ``CHUNK_BYTES`` of text."""
    chunk: list[Document] = []
    size_bytes = 0
    for document in documents:
        chunk.append(document)
        size_bytes += _size_bytes(document)
        if size_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk


def _size_bytes(document: Document) -> int:
    return len(document.text.encode())


def _check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    if tokenizer.size > model_vocab_size:
        largest = tokenizer.size - 1
        raise DataError(
            f"model.vocab_size: {model_vocab_size} is smaller than the tokenizer, which can emit "
            f"the id {largest} ({tokenizer.token(largest)!r}): set it to at least {tokenizer.size}, "
            "or use a smaller tokenizer"
        )


def _identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the tokens of a text."""
    return {"tokenizer_hash": tokenizer.hash, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}


def _entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """-sum p log p, with p = counts / sum(counts) and 0 log 0 = 0."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _key(inputs: dict[str, Any]) -> str:
    return _sha256(["pico-token-cache", 1, inputs])[:16]


def _fingerprint(train: SplitLedger, held_out: SplitLedger, tokenizer_hash: str) -> str:
    return _sha256([train.sha256, held_out.sha256, tokenizer_hash])


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(
        f"the token cache {path} cannot be used: {problem}. Delete this folder; the next run builds it again"
    )


def _remove_stale(root: Path) -> None:
    """Delete the builds that were given up: nothing in their folder has changed for ``STALE_S``."""
    for folder in root.glob("*.tmp-*"):
        try:
            changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except FileNotFoundError:
            continue  # finished or removed while we looked
        if time.time() - changed > STALE_S:
            log.info("removing %s, which an interrupted build left behind", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _fsync(path: Path) -> None:
    if os.name == "nt":
        return  # neither a folder nor a file opened for reading can be synced there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
