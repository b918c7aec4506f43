"""From text to token ids: a byte-level BPE trained on the training documents, or a tokenizer that exists.

Every tokenizer is the text of one ``tokenizer.json`` (library ``tokenizers``) and the two special tokens that
begin and end a document; that text is what the tokenizer's hash covers and what a checkpoint stores.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pico_train.data.sources import DataError, Document

log = logging.getLogger("pico_train.data")

END_OF_TEXT = "<|endoftext|>"

# What a tokenizer.json without a tokenizer_config.json may call its end of text.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")

# Said aloud, so that a process forked later does not warn; batches are only encoded where the cache is built.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class Tokenizer:
    """A ``tokenizer.json`` and its special tokens, thin over ``tokenizers.Tokenizer``.

    Attributes:
        json: the text of ``tokenizer.json``.
        bos, eos: the tokens that begin and end a document; the same where there is none for the beginning.
        bos_id, eos_id: their ids.
    """

    def __init__(self, text: str, *, eos: str, bos: str | None = None) -> None:
        self.json = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self.eos, self.bos = eos, bos or eos
        self.eos_id, self.bos_id = self._id(self.eos), self._id(self.bos)

    @classmethod
    def train(cls, documents: Iterable[Document], *, vocab_size: int) -> "Tokenizer":
        """A byte-level BPE of ``vocab_size`` entries: end of text, 256 bytes, merges learnt from the text.

        Deterministic. Where the text has too few pairs to merge there are fewer entries, and the log says so.

        Raises:
            DataError: ``vocab_size`` is too small for the bytes.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        smallest = len(alphabet) + 1
        if vocab_size < smallest:
            raise DataError(
                f"data.tokenizer.vocab_size: {vocab_size} is too small for {len(alphabet)} bytes "
                f"and {END_OF_TEXT}: at least {smallest}"
            )
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        # Where the text spells out the special token, its letters must not become merges.
        tokenizer.train_from_iterator((document.text.split(END_OF_TEXT) for document in documents), trainer)
        size = tokenizer.get_vocab_size()
        if size < vocab_size:
            log.warning(
                "the text has pairs for a tokenizer of %d entries only, not the %d asked for",
                size,
                vocab_size,
            )
        return cls(tokenizer.to_str(pretty=True), eos=END_OF_TEXT)

    @classmethod
    def load(cls, name: str) -> "Tokenizer":
        """The tokenizer in a folder, in a ``tokenizer.json`` file, or of the Hub id ``name``.

        ``tokenizer_config.json`` beside it names the special tokens; without one, a usual name of the end of
        text is looked for.

        Raises:
            DataError: it cannot be read or fetched, or has no end-of-text token.
        """
        file, config_file = _files_of(name)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"data.tokenizer.name: {file} is not a tokenizer.json: {error}") from None
        tokenizer.no_truncation()  # a cut document would go unnoticed
        tokenizer.no_padding()

        config = _read_config(config_file) if config_file else {}
        eos, bos = _token(config, "eos_token"), _token(config, "bos_token")
        if config_file is None:
            eos = next((end for end in END_NAMES if tokenizer.token_to_id(end) is not None), None)
        for token in (eos, bos):
            if token is not None and tokenizer.token_to_id(token) is None:
                raise DataError(
                    f"data.tokenizer.name: {config_file} names the special token {token!r}, which {file} does not have"
                )
        if eos is None:
            names = ", ".join(END_NAMES)
            where = f"{config_file} has no eos_token" if config_file else f"none of {names} is in {file}"
            raise DataError(
                f"data.tokenizer.name: {name} has no end-of-text token, which documents must end with: {where}. "
                'Name it as "eos_token" in a tokenizer_config.json beside tokenizer.json'
            )
        return cls(tokenizer.to_str(pretty=True), eos=eos, bos=bos)

    @classmethod
    def read_files(cls, folder: Path) -> "Tokenizer":
        """The tokenizer that ``write_files`` left in ``folder``, character by character."""
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        text = (folder / "tokenizer.json").read_bytes().decode()
        return cls(text, eos=config["eos_token"], bos=config["bos_token"])

    @cached_property
    def size(self) -> int:
        """The largest id that can be emitted, plus 1; tokens added to the base vocabulary included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def hash(self) -> str:
        """SHA-256 of ``tokenizer.json``."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, nothing added; a special token that a text spells out becomes its id."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens spelled out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str | None:
        """How the vocabulary writes the token ``token_id``, None for an id that has none."""
        return self._tokenizer.id_to_token(token_id)

    def files(self) -> dict[str, bytes]:
        """What ``AutoTokenizer.from_pretrained(folder)`` needs to read this tokenizer without remote code."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos,
            "eos_token": self.eos,
            "clean_up_tokenization_spaces": False,  # decoding must give back the text
        }
        return {
            "tokenizer.json": self.json.encode(),
            "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
        }

    def write_files(self, folder: Path) -> None:
        """Write ``files()`` into ``folder``."""
        for name, content in self.files().items():
            (folder / name).write_bytes(content)

    def _id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, f"{token!r} is not in the vocabulary"
        return token_id


def _files_of(name: str) -> tuple[Path, Path | None]:
    """``tokenizer.json`` and, if there is one, ``tokenizer_config.json`` of a folder, a file or a Hub id."""
    path = Path(name).expanduser()
    if path.exists():
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DataError(f"data.tokenizer.name: {name} has no tokenizer.json: only fast tokenizers can be used")
        config_file = file.with_name("tokenizer_config.json")
        return file, config_file if config_file.is_file() else None

    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    log.info("fetching the tokenizer %s from the Hub", name)
    try:
        with _silent("huggingface_hub"):
            file = Path(hf_hub_download(name, "tokenizer.json"))
            try:
                return file, Path(hf_hub_download(name, "tokenizer_config.json"))
            except RemoteEntryNotFoundError:
                return file, None
    except Exception as error:  # the network, the Hub, its cache or the name: many kinds, one consequence
        raise DataError(
            f"data.tokenizer.name: {name!r} is no file or folder here, and as a Hub id it could not be "
            f"fetched: {_reason(error)}. Give the path of a folder or tokenizer.json, or byte-level-bpe to train one"
        ) from None


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Keep a library's own logger from telling of each try: what comes of them is told once."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: Exception) -> str:
    """Why the Hub gave no tokenizer, in one line."""
    from huggingface_hub import errors

    reasons = {
        errors.GatedRepoError: "its owner has to grant access first, on its page at the Hub",
        errors.RepositoryNotFoundError: "the Hub has no such repository, or it is private and no login of `hf auth login` may see it",
        errors.RemoteEntryNotFoundError: "it has no tokenizer.json, and only fast tokenizers can be used",
        errors.LocalEntryNotFoundError: "the Hub cannot be reached, and it is not in the cache of earlier downloads",
    }
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return next((reason for kind, reason in reasons.items() if isinstance(error, kind)), first_line)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer.name: {path} is not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise DataError(f"data.tokenizer.name: {path} is not a JSON object")
    return config


def _token(config: dict[str, Any], key: str) -> str | None:
    """A special token of ``tokenizer_config.json``: text, or an object with the text under ``content``."""
    token = config.get(key)
    return token["content"] if isinstance(token, dict) else token
