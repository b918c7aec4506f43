"""Every configuration file in the repository loads, and ours say what the published ones say."""

from pathlib import Path

import pytest

from pico_analyze.config import load_config as load_analysis
from pico_train.config import load_config
from pico_train.suite import load

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "fixtures" / "published"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.yaml"))


@pytest.mark.parametrize("path", [*files(ROOT / "configs"), *files(PUBLISHED / "training")], ids=str)
def test_training_files_load(path: Path) -> None:
    assert load(path).runs


@pytest.mark.parametrize("path", [*files(ROOT / "analysis_configs"), *files(PUBLISHED / "analysis")], ids=str)
def test_analysis_files_load(path: Path) -> None:
    assert load_analysis(path).metrics


@pytest.mark.parametrize("size", ["tiny", "small", "medium", "large"])
def test_our_training_files_are_of_the_published_content(size: str) -> None:
    ours = load_config(ROOT / "configs" / f"pico-decoder-{size}.yaml")
    assert ours == load_config(PUBLISHED / "training" / f"pico-decoder-{size}.yaml")


def test_there_are_five_published_files_of_each_kind() -> None:
    assert len(files(PUBLISHED / "training")) == len(files(PUBLISHED / "analysis")) == 5
