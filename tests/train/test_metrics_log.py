import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from pico_train.errors import PicoError, UserError
from pico_train.metrics_log import MetricsLog, Row, last_row, read_rows


def row(step: int, **changes: object) -> Row:
    values: dict[str, object] = dict.fromkeys(Row.__dataclass_fields__)
    return Row(**(values | {"step": step, "loss": 1 / (step + 1)} | changes))  # type: ignore[arg-type]


def write(path: Path, numbers: range, **changes: object) -> None:
    with MetricsLog(path, numbers.start) as log:
        for step in numbers:
            log.append(row(step, **changes))


def steps(path: Path) -> list[int]:
    return [r["step"] for r in read_rows(path)]


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) == (None, 0)
    write(path, range(5), grad_norms={"layers.0": 0.5})
    assert read_rows(path) == [asdict(row(step, grad_norms={"layers.0": 0.5})) for step in range(5)]


@pytest.mark.parametrize("at", [0, 3, 5])
def test_going_on_at_a_step_drops_it_and_what_follows(tmp_path: Path, at: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(5))
    write(path, range(at, 12))
    assert steps(path) == [*range(min(at, 5)), *range(at, 12)]


def test_a_torn_last_line_is_left_out_and_then_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps(path) == [0, 1, 2]
    last, _ = last_row(path)
    assert last is not None
    assert last["step"] == 2
    write(path, range(3, 5))
    assert steps(path) == [0, 1, 2, 3, 4]


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(asdict(row(0)))
    path.write_text("".join(line.replace('"step": 0', f'"step": {step}') + "\n" for step in range(20_000)))
    parsed = 0
    loads = json.loads

    def counting(text: bytes) -> object:
        nonlocal parsed
        parsed += 1
        return loads(text)

    monkeypatch.setattr(json, "loads", counting)
    for below, expected in ((math.inf, 19_999), (19_990, 19_989)):
        last, end = last_row(path, below)
        assert last is not None
        assert last["step"] == expected
        assert path.read_bytes()[:end].endswith(b"\n")
    assert parsed < 20
    assert last_row(path, 12_345)[0] == loads(path.read_bytes().split(b"\n")[12_344])  # further back than one block
    assert last_row(path, 0) == (None, 0)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(PicoError, match=r"metrics\.jsonl has a line that is no row: b'nonsense'"):
        read_rows(path)


def test_a_log_with_rows_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(5))
    with pytest.raises(UserError, match="ends at step 4 although the run stands at step 9"):
        MetricsLog(path, 9)
    assert steps(path) == [0, 1, 2, 3, 4]
