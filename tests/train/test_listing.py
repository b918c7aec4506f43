"""``pico-train ls``: the names of the folders, and the step at which a stop says that it goes on."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Pico = Callable[..., Result]


def listed(pico: Pico, folder: Path) -> dict[str, str]:
    """The lines of the table by the name of the run."""
    result = pico("ls", folder)
    assert result.exit_code == 0, result.output
    return {line.split()[0]: line for line in result.stdout.splitlines()[1:]}


def test_the_step_is_the_one_that_the_stop_has_named(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    for step in (1, 2):  # a limit that is over at the start lets each start make one pass
        stopped = pico("run", tiny_yaml, "training.max_minutes=1e-6")
        assert stopped.exit_code == 75
        assert f"at step {step}; the same command goes on there" in stopped.stderr
        assert f"  {step} of 6  " in listed(pico, tmp_path / "runs")["tiny"]


def test_finished_is_the_look_after_the_last_update(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    one = (tiny_yaml, "training.max_steps=1")
    assert pico("run", *one, "training.max_minutes=1e-6").exit_code == 75
    assert "  1 of 1, not finished  " in listed(pico, tmp_path / "runs")["tiny"]
    assert pico("run", *one).exit_code == 0
    assert "  1 of 1  " in listed(pico, tmp_path / "runs")["tiny"]


def test_a_run_that_keeps_nothing(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    nothing = (
        "checkpointing.save_every_n_steps=0",
        "checkpointing.schedule={log2_until: 0, first: false, last: false}",
    )
    assert pico("run", tiny_yaml, "training.max_steps=1", *nothing).exit_code == 0
    assert listed(pico, tmp_path / "runs")["tiny"].endswith("  none")


def test_a_copy_of_a_run_is_listed_by_its_folder(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    assert pico("run", tiny_yaml, "training.max_steps=1").exit_code == 0
    runs = tmp_path / "runs"
    shutil.copytree(runs / "tiny", runs / "other")
    lines = listed(pico, runs)
    assert lines.keys() == {"tiny", "other"}
    assert lines["other"].startswith("other (made as tiny)  ")
    assert re.match("tiny  +14,288", lines["tiny"])
