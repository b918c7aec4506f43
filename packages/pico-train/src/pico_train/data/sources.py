"""Where documents come from: the text of the standard library, or local text, JSON Lines and Parquet files.

A source streams documents in one fixed order, that of the sorted relative paths of its files; the whole text
is never in memory. What it cannot read it names, in one ``DataError``.
"""

import codecs
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from pico_train.config import DatasetConfig
from pico_train.errors import UserError

TEXT_KINDS = (".txt", ".jsonl", ".parquet")  # of a folder, unless a pattern says otherwise
LONGEST_LINE = 1 << 20  # characters; a longer line of plain text is cut there

# Tests and installed packages differ between installations of one Python version.
NOT_LIBRARY = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})


class DataError(UserError):
    """What is wrong with the text, the tokenizer or the token cache, and what to do about it."""


class Document(NamedTuple):
    """A text that belongs together; ``name`` says where it stands, for messages."""

    name: str
    text: str


class FileStamp(NamedTuple):
    """A file from outside: enough to find the cache of an unchanged source without reading it."""

    path: str
    size_bytes: int
    mtime_ns: int


class Source(Protocol):
    """A stream of documents that can be started again and then gives the same ones."""

    @property
    def root(self) -> Path:
        """The file or folder that is read."""
        ...

    def documents(self) -> Iterator[Document]:
        """All documents that hold text, in order.

        Raises:
            DataError: a file cannot be read, or there is no text at all.
        """
        ...

    def signature(self) -> list[FileStamp]:
        """The files that are read, in order, by their paths relative to the root."""
        ...


def open_source(dataset: DatasetConfig) -> Source:
    """The source that the section ``data.dataset`` describes.

    Raises:
        DataError: nothing is there to read.
    """
    if dataset.name == "python-stdlib":
        return PythonLibrary(Path(sysconfig.get_path("stdlib")))
    assert dataset.name == "text", f"data sets of the Hub are refused before: {dataset.name}"
    assert dataset.path is not None, "the config has checked it"
    root = Path(dataset.path).expanduser()
    if not root.exists():
        raise DataError(f"data.dataset.path: {dataset.path} does not exist (it is taken from {Path.cwd()})")
    if not (root.is_file() or root.is_dir()):
        raise DataError(f"data.dataset.path: {dataset.path} is neither a file nor a folder")
    return TextFiles(root, dataset.pattern, dataset.text_key, dataset.document_bytes)


@dataclass(frozen=True)
class PythonLibrary:
    """Python's standard library, a document per file: 11 MB of code and English on every machine with Python.

    Left out are tests, idlelib, installed packages, what describes the machine Python was built on, and files
    that do not decode.
    """

    root: Path

    def documents(self) -> Iterator[Document]:
        """The files that decode and are not empty."""
        found = False
        for path in self._paths():
            try:
                with tokenize.open(path) as file:  # honours a coding line
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue
            except OSError as error:
                raise _unreadable(path, error) from None
            if text:
                found = True
                yield Document(path.relative_to(self.root).as_posix(), text)
        if not found:
            raise DataError(
                f"data.dataset.name: this Python has no source text of its standard library in {self.root}; "
                "use name: text with a path of your own"
            )

    def signature(self) -> list[FileStamp]:
        """The stamp of every file."""
        return _stamps(self._paths(), self.root)

    def _paths(self) -> list[Path]:
        paths = []
        for folder, subfolders, files in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
            paths += [
                Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
            ]
        return sorted(paths, key=lambda path: path.relative_to(self.root).as_posix())


@dataclass(frozen=True)
class TextFiles:
    """One file, or those of a folder that match ``pattern``: *.jsonl, *.parquet, else plain UTF-8 text."""

    root: Path
    pattern: str | None
    text_key: str
    document_bytes: int

    def documents(self) -> Iterator[Document]:
        """The documents that are not empty, file after file."""
        found = False
        for path in self._paths():
            name = self._name(path)
            if path.suffix == ".jsonl":
                documents = _json_lines(path, name, self.text_key)
            elif path.suffix == ".parquet":
                documents = _parquet_rows(path, name, self.text_key)
            else:
                documents = _plain_text(path, name, self.document_bytes)
            try:
                for document in documents:
                    if document.text:
                        found = True
                        yield document
            except OSError as error:
                raise _unreadable(path, error) from None
            except UnicodeDecodeError:
                raise DataError(
                    f"{path}: not UTF-8 at byte {_first_bad_byte(path)}; convert the file to UTF-8 or leave it out"
                ) from None
        if not found:
            raise DataError(f"data.dataset.path: {self.root} holds no text: every document is empty")

    def signature(self) -> list[FileStamp]:
        """The stamp of every file."""
        return _stamps(self._paths(), self.root if self.root.is_dir() else self.root.parent)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if self.root.is_dir() else path.name

    def _paths(self) -> list[Path]:
        if self.root.is_file():
            return [self.root]
        try:
            found = (path for path in self.root.glob(self.pattern or "**/*") if path.is_file())
            paths = sorted((path for path in found if self.pattern or path.suffix in TEXT_KINDS), key=self._name)
        except (ValueError, NotImplementedError) as error:
            raise DataError(
                f"data.dataset.pattern: {self.pattern!r} is not a pattern below a folder: {error}"
            ) from None
        except OSError as error:
            raise _unreadable(self.root, error) from None
        if not paths:
            wanted = f"matches {self.pattern!r}" if self.pattern else f"ends in {', '.join(TEXT_KINDS)}"
            raise DataError(
                f"data.dataset.pattern: no file in {self.root} {wanted}; set it to a glob of the files to read, such as "
                "data.dataset.pattern=\"'**/*.md'\" on the command line (with both quotes)"
            )
        return paths


def _plain_text(path: Path, name: str, document_bytes: int) -> Iterator[Document]:
    """Cut at line ends into documents of at least ``document_bytes``, except the last one."""
    with path.open(encoding="utf-8-sig", newline="") as file:  # "": line ends stay as they are
        lines: list[str] = []
        size_bytes, first_line, n_lines = 0, 1, 0
        while line := file.readline(LONGEST_LINE):
            lines.append(line)
            size_bytes += len(line.encode())
            n_lines += 1
            if size_bytes >= document_bytes:
                yield Document(f"{name}:{first_line}", "".join(lines))
                lines, size_bytes, first_line = [], 0, n_lines + 1
        yield Document(f"{name}:{first_line}", "".join(lines))


def _json_lines(path: Path, name: str, text_key: str) -> Iterator[Document]:
    """The field ``text_key`` of the JSON object on each line."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}, column {error.colno}: not JSON: {error.msg}") from None
            except (ValueError, RecursionError) as error:  # a number of too many digits, or nested too deeply
                raise DataError(f"{where}: not JSON that can be read: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f'{where}: not a JSON object like {{"{text_key}": "..."}}')
            if text_key not in row:
                raise DataError(
                    f"{where}: no field {text_key!r}; data.dataset.text_key names the field with the text, "
                    f"here there are: {', '.join(map(repr, row)) or 'none'}"
                )
            text = row[text_key]
            if not isinstance(text, str):
                raise DataError(
                    f"{where}: the field {text_key!r} is {json.dumps(text)[:50]}, not text; leave such lines out"
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{where}: {error.object[error.start]!a} is half a surrogate pair, which is no character"
                ) from None
            yield Document(f"{name}:{number}", text)


def _parquet_rows(path: Path, name: str, text_key: str) -> Iterator[Document]:
    """The column ``text_key``, read row group by row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if text_key not in file.schema_arrow.names:
                raise DataError(
                    f"{path}: no column {text_key!r}; data.dataset.text_key names the column, "
                    f"here there are: {', '.join(map(repr, file.schema_arrow.names))}"
                )
            kind = file.schema_arrow.field(text_key).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                raise DataError(f"{path}: column {text_key!r} holds {kind}, not text")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        raise DataError(f"{path}: no text in row {number} of column {text_key!r}")
                    yield Document(f"{name}:{number}", text)
                    number += 1
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def _stamps(paths: list[Path], root: Path) -> list[FileStamp]:
    stamps = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        stamps.append(FileStamp(path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return stamps


def _first_bad_byte(path: Path) -> int:
    """The offset of the first byte that is not UTF-8; the error itself only knows its place in a chunk."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin = 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(1 << 20)
            kept, _ = decoder.getstate()  # the start of a character whose end is in this chunk
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return begin - len(kept) + error.start
            begin += len(chunk)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read: {error.strerror or error}")
