from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pico_train.strict_yaml import ConfigError, flattened, merged, parse, read_mapping, read_overrides, to_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("200_000", 200_000),
        ("-7", -7),
        ('"12"', "12"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("null", None),
        ("", None),
        ("true", True),
        ("[1, 2e0, a]", [1, 2.0, "a"]),
        ("e5", "e5"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    parsed = parse(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
number_like = st.text("0123456789+-.eE_:xnaify", max_size=8)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True), leaves | number_like | st.lists(leaves | number_like)
    )
)
def test_what_is_written_reads_back_equal(raw: dict[str, object]) -> None:
    assert parse(to_text(raw), "here") == raw


def test_a_key_that_stands_twice_is_refused_at_any_depth() -> None:
    with pytest.raises(ConfigError, match=r"line 4, column 3: the key lr stands twice"):
        parse("training:\n  lr: 1\n  max_steps: 2\n  lr: 3\n", "run.yaml")


def test_syntax_errors_name_file_and_line() -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:\n  line 2, column 5: "):
        parse("a: 1\nb: c: d\n", "run.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1\n- 2\n", "must hold `key: value` lines at the top level, not [1, 2]"),
        (b"just text", 'must hold `key: value` lines at the top level, not "just text"'),
        (b"a: \xff\xfe", "not a text file in UTF-8 (byte 3)"),
        (b"a: \x00", "not allowed"),
        (b"a: 1\n---\nb: 2\n", "line 2, column 1: expected a single document"),
        (b"!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_files_that_are_no_mapping(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_mapping(path)
    assert str(caught.value).startswith(f"{path}:\n  ")
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_mapping(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_mapping(tmp_path)


@pytest.mark.parametrize("content", ["", "\n  \n", "# only a comment\n", "\ufeff"])
def test_an_empty_file_is_an_empty_mapping(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content, encoding="utf-8")
    assert read_mapping(path) == {}


def test_overrides_are_yaml_and_the_last_one_wins() -> None:
    overrides = ["a.b=3e-4", "a.c=[1, two]", "d=", "e='12'", "a.b=2", "f.g={h: 1}", "i=x=y"]
    assert read_overrides(overrides) == {
        "a": {"b": 2, "c": [1, "two"]},
        "d": None,
        "e": "12",
        "f": {"g": {"h": 1}},
        "i": "x=y",
    }


def test_all_malformed_overrides_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        read_overrides(["training.max_steps", "=3", "a..b=1", "a=[1", "fine=1"])
    words = [line.split(":")[0] for line in caught.value.problems]
    assert words == ["training.max_steps", "=3", "a..b=1", "a=[1"]


def test_merging_goes_mapping_by_mapping_and_leaves_its_arguments_alone() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(base, {"a": {"c": 3}, "d": [2], "e": {}}) == {"a": {"b": 1, "c": 3}, "d": [2], "e": {}}
    assert base == {"a": {"b": 1, "c": 2}, "d": [1]}
    assert flattened({"a": {"b": 1, "c": {"d": 2}}, "e": [1], "f": {}}) == {"a.b": 1, "a.c.d": 2, "e": [1], "f": {}}
