"""Every command and every piece of Python in README.md runs, in the order in which they stand there."""

import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pico_analyze.cli import main as pico_analyze
from pico_train.cli import main as pico_train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# What makes a run of the README's size one of seconds.
SHORTER = [
    "training.max_steps=100",
    "data.dataloader.batch_size=2",
    "model.max_seq_len=32",
    "checkpointing.save_every_n_steps=0",
    "checkpointing.schedule.log2_until=0",
    "evaluation.sample.max_new_tokens=8",
    "checkpointing.learning_dynamics.probe_windows=40",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the configurations of the repository and a text, which is the working directory."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "analysis_configs"):
        shutil.copytree(ROOT / name, folder / name)
    library = Path(os.__file__).parent
    texts = [(library / name).read_text(encoding="utf-8") for name in ("argparse.py", "inspect.py", "typing.py")]
    (folder / "my_text.txt").write_text("\n".join(texts), encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_the_commands_and_then_the_python_run(copy: Path) -> None:
    for line in COMMANDS:
        program, *words = shlex.split(line)
        if program not in ("pico-train", "pico-analyze"):
            continue
        if (program, words[0]) == ("pico-train", "run"):
            words += SHORTER
        if (program, words[0]) == ("pico-analyze", "plot"):
            words += ["--format", "png"]
        result = CliRunner().invoke(pico_train if program == "pico-train" else pico_analyze, words)
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert (copy / "analysis_results" / "mine" / "results.csv").is_file()
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, namespace)
    assert len(namespace["table"]) > 100  # type: ignore[arg-type]


def test_what_is_not_run_here_is_run_by_nox() -> None:
    """The other lines install the packages or start a session of noxfile.py, which CI does with the same words."""
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    others = [line for line in COMMANDS if shlex.split(line)[0] not in ("pico-train", "pico-analyze")]
    for line in others:
        if nox := re.fullmatch(r"pip install nox && nox -s (\w+)", line):
            assert nox[1] in sessions
        else:
            package = re.fullmatch(r"pip install -c constraints.txt -e (packages/[\w-]+)", line)
            assert package, line
            assert tomllib.loads((ROOT / package[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "\npip install nox && nox -s tests\n" in ci
    assert "pip install nox && nox -s tests" in others


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
