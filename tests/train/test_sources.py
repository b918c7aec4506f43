"""Documents: what is read, in which order and pieces, and what is said of what cannot be read."""

import json
import os
import sysconfig

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pico_train.config import DatasetConfig
from pico_train.data import sources
from pico_train.data.sources import DataError, PythonLibrary, open_source


def text(path, **options):
    return open_source(DatasetConfig.model_validate({"name": "text", "path": str(path), **options}))


def texts(source):
    return [document.text for document in source.documents()]


def refused(source):
    with pytest.raises(DataError) as caught:
        list(source.documents())
    return str(caught.value)


def write_parquet(path, columns):
    pq.write_table(pa.table(columns), path, row_group_size=2)


# ---- plain text


def test_a_short_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("héllo\nworld", encoding="utf-8")
    assert [tuple(document) for document in text(tmp_path / "a.txt").documents()] == [("a.txt:1", "héllo\nworld")]


def test_a_long_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    lines = [f"line {number} é 日本\r\n" for number in range(40)] + ["the end"]
    (tmp_path / "a.txt").write_bytes("".join(lines).encode())
    documents = list(text(tmp_path / "a.txt", document_bytes=100).documents())
    assert "".join(document.text for document in documents) == "".join(lines)
    for document in documents[:-1]:
        assert document.text.endswith("\n")
        assert 100 <= len(document.text.encode()) < 100 + len(lines[-2].encode())
    assert documents[1].name == "a.txt:7"  # six lines of 18 bytes come first


def test_a_long_line_stays_whole_up_to_a_bound(tmp_path, monkeypatch):
    line = "x" * 5000
    (tmp_path / "a.txt").write_text(line)
    assert texts(text(tmp_path / "a.txt", document_bytes=10)) == [line]
    monkeypatch.setattr(sources, "LONGEST_LINE", 3)
    (tmp_path / "a.txt").write_text("日本日本日本日", encoding="utf-8")
    assert texts(text(tmp_path / "a.txt", document_bytes=4)) == ["日本日", "本日本", "日"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert texts(text(tmp_path / "a.txt")) == ["abc"]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "B.txt", "a/b/c.txt", "skip.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(text(tmp_path)) == ["B.txt", "a.txt", "a/b/c.txt", "a/z.txt", "b.txt"]
    assert texts(text(tmp_path, pattern="*.md")) == ["skip.md"]


def test_reading_is_a_stream(tmp_path):
    (tmp_path / "a.txt").write_text("first\n" * 100_000)
    (tmp_path / "b.txt").write_bytes(b"\xff")  # would be refused if it were read
    assert next(text(tmp_path, document_bytes=12).documents()).text == "first\nfirst\n"


# ---- JSON Lines and Parquet


def test_json_lines_are_one_document_each(tmp_path):
    rows = [{"body": "one\ntwo"}, {"body": "drei \u2028 vier 😀", "id": 3}, {"body": ""}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    documents = list(text(tmp_path / "a.jsonl", text_key="body").documents())
    assert [tuple(document) for document in documents] == [
        ("a.jsonl:1", "one\ntwo"),
        ("a.jsonl:3", "drei \u2028 vier 😀"),
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_rows_are_one_document_each(tmp_path, kind):
    write_parquet(tmp_path / "a.parquet", {"n": range(5), "text": pa.array(["a", "b", "", "ç", "d"], kind)})
    documents = list(text(tmp_path, pattern="*.parquet").documents())
    assert [document.text for document in documents] == ["a", "b", "ç", "d"]
    assert documents[2].name == "a.parquet:3"


# ---- the standard library


def test_the_standard_library_has_its_modules_and_no_tests():
    source = open_source(DatasetConfig.model_validate({"name": "python-stdlib"}))
    names = [stamp.path for stamp in source.signature()]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "email/message.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    assert sum(stamp.size_bytes for stamp in source.signature()) > 5e6
    first = next(source.documents())
    with open(os.path.join(sysconfig.get_path("stdlib"), first.name), encoding="utf-8") as file:
        assert first.text == file.read()


def test_library_files_are_decoded_by_their_coding_line_or_left_out(tmp_path):
    files = {
        "latin.py": "# coding: latin-1\nx = 'é'\n".encode("latin-1"),
        "bad.py": b"x = '\xff'\n",
        "lie.py": b"# coding: no-such-codec\n",
        "empty.py": b"",
        "plain.py": b"x = 1\r\n",
        "test/test_x.py": b"y\n",
        "_sysconfigdata_x.py": b"build\n",
        "data.txt": b"text\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    documents = {document.name: document.text for document in PythonLibrary(tmp_path).documents()}
    assert documents == {"latin.py": "# coding: latin-1\nx = 'é'\n", "plain.py": "x = 1\n"}


def test_a_python_without_its_source_text_is_refused(tmp_path):
    assert "no source text" in refused(PythonLibrary(tmp_path))


# ---- signatures


def test_a_signature_knows_path_size_and_time(tmp_path):
    file = tmp_path / "sub" / "a.txt"
    file.parent.mkdir()
    file.write_text("four")
    os.utime(file, ns=(5, 7_000_000_000))
    assert [tuple(stamp) for stamp in text(tmp_path).signature()] == [("sub/a.txt", 4, 7_000_000_000)]
    assert [tuple(stamp) for stamp in text(file).signature()] == [("a.txt", 4, 7_000_000_000)]


# ---- what cannot be read


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data\.dataset\.path: .*nowhere does not exist"):
        text(tmp_path / "nowhere")


def test_a_path_that_is_no_file_is_refused():
    with pytest.raises(DataError, match=r"data\.dataset\.path: /dev/null is neither a file nor a folder"):
        text("/dev/null")


def test_a_pattern_that_matches_nothing_is_named(tmp_path):
    (tmp_path / "a.md").write_text("Text.")
    message = refused(text(tmp_path))
    assert f"data.dataset.pattern: no file in {tmp_path} ends in .txt, .jsonl, .parquet" in message
    assert "matches '*.rst'" in refused(text(tmp_path, pattern="*.rst"))


def test_without_a_pattern_all_three_kinds_are_read(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "line"}\n')
    (tmp_path / "c.py").write_text("code")
    assert texts(text(tmp_path)) == ["plain", "line"]


def test_an_absolute_pattern_is_refused(tmp_path):
    assert "data.dataset.pattern: '/etc/*.conf' is not a pattern below" in refused(
        text(tmp_path, pattern="/etc/*.conf")
    )


def test_bytes_that_are_no_text_are_named_by_their_offset(tmp_path):
    good = ("é" * 700_000).encode()  # more than one chunk of the scan, whose border falls inside a character
    (tmp_path / "a.txt").write_bytes(b"x" + good + b"\xff" + good)
    message = refused(text(tmp_path / "a.txt"))
    assert f"not UTF-8 at byte {1 + len(good)};" in message
    assert "a.txt" in message


def test_a_character_cut_off_by_the_end_of_the_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xe6\x97")
    assert "not UTF-8 at byte 3;" in refused(text(tmp_path / "a.txt"))


def test_json_lines_that_are_not_utf8_are_named_by_their_offset(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "not UTF-8 at byte 24;" in refused(text(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "cut', "column 14: not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["text"]', "not a JSON object"),
        (
            '{"body": "x", "id": 1}',
            "no field 'text'; data.dataset.text_key names the field with the text, here there are: 'body', 'id'",
        ),
        ('{"text": null}', "the field 'text' is null, not text"),
        ('{"text": "\\ud800"}', r"'\ud800' is half a surrogate pair"),
    ],
)
def test_a_bad_json_line_is_named_by_its_number(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    message = refused(text(tmp_path / "a.jsonl"))
    assert f"{tmp_path / 'a.jsonl'}, line 2" in message
    assert problem in message


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (
            {"body": ["x"], "id": [1]},
            "no column 'text'; data.dataset.text_key names the column, here there are: 'body', 'id'",
        ),
        ({"text": [1, 2]}, "holds int64, not text"),
        ({"text": ["x", None]}, "no text in row 1"),
    ],
)
def test_a_bad_parquet_column_is_named(tmp_path, column, problem):
    write_parquet(tmp_path / "a.parquet", column)
    message = refused(text(tmp_path / "a.parquet"))
    assert str(tmp_path / "a.parquet") in message
    assert problem in message


def test_a_parquet_file_that_is_none_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("not at all")
    assert "a.parquet: not a readable Parquet file" in refused(text(tmp_path / "a.parquet"))


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert "holds no text" in refused(text(tmp_path))


def test_a_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")

    def locked(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    source = text(tmp_path / "a.txt")
    monkeypatch.setattr(type(tmp_path), "open", locked)
    assert refused(source) == f"{tmp_path / 'a.txt'}: cannot be read: Permission denied"
