"""The demo's files through the commands: three sizes trained, analysed, drawn."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result
from scipy.stats import entropy
from transformers import AutoModelForCausalLM

from pico_analyze.cli import main as pico_analyze
from pico_train.cli import main as pico_train

ROOT = Path(__file__).parents[1]
SIZES = ("demo-tiny", "demo-small", "demo-medium")


def invoke(command: Callable[..., object], *words: object) -> Result:
    result = CliRunner().invoke(command, [str(word) for word in words])  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo of 12 steps in a folder: runs, table, pictures."""
    out = tmp_path_factory.mktemp("demo")
    train = ("run", "--config", ROOT / "configs" / "demo.yaml", "training.max_steps=12")
    places = (f"checkpointing.runs_dir={out / 'runs'}", f"data.cache_dir={out / 'caches'}")
    trained = invoke(pico_train, *train, *places)
    assert all(f"{size} writes:" in trained.stdout for size in SIZES)
    analysis = ("--run-path", out / "runs" / "demo", f"monitoring.output_dir={out / 'analysis'}")
    invoke(pico_analyze, "run", "--config", ROOT / "analysis_configs" / "demo.yaml", *analysis)
    return out


@pytest.fixture(scope="module")
def table(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / "analysis" / "demo" / "results.parquet")


def test_every_size_and_step_is_in_the_table(table: pd.DataFrame) -> None:
    assert set(table["run"]) == set(SIZES)
    assert sorted(table["step"].unique()) == [0, 1, 2, 4, 8, 12]
    assert table["status"].isin(["ok", "flagged", "undefined"]).all()
    assert {"gini", "hoyer", "per", "condition_number", "norm", "cka", "pwcca", "val_loss"} <= set(table["metric"])
    assert {"weights", "activations", "gradients", "training"} == set(table["kind"])


def test_a_number_of_the_table_is_that_of_the_stored_weights(out: Path, table: pd.DataFrame) -> None:
    """Frobenius norm and effective rank again, by numpy and scipy, from the file that transformers reads."""
    step = out / "runs" / "demo-small" / "checkpoints" / "step_12"
    weight = AutoModelForCausalLM.from_pretrained(step).model.layers[2].mlp.down_proj.weight
    spectrum = np.linalg.svd(weight.detach().double().numpy(), compute_uv=False)
    here = table[(table["run"] == "demo-small") & (table["step"] == 12) & (table["layer"] == 2)]
    here = here[(here["kind"] == "weights") & (here["component"] == "simple") & (here["module"] == "swiglu.w_2")]
    values = {(row.metric, row.parameters): row.value for row in here.itertuples()}
    assert values["per", "{}"] == pytest.approx(np.exp(entropy(spectrum)) / len(spectrum), rel=1e-9)
    frobenius = json.dumps({"norm_type": "frobenius"})
    assert values["norm", frobenius] == pytest.approx(np.sqrt((spectrum**2).sum()), rel=1e-9)


def test_all_sizes_saw_the_same_text(out: Path) -> None:
    shown = {
        invoke(pico_train, "data", "at", "--run", out / "runs" / size, "--step", 5, "--json").stdout for size in SIZES
    }
    assert len(shown) == 1


def test_a_rerun_computes_nothing(out: Path) -> None:
    analysis = ("--run-path", out / "runs" / "demo", f"monitoring.output_dir={out / 'analysis'}")
    before = (out / "analysis" / "demo" / "results.csv").read_bytes()
    again = invoke(pico_analyze, "run", ROOT / "analysis_configs" / "demo.yaml", *analysis)
    assert "0 values computed" in again.output
    assert (out / "analysis" / "demo" / "results.csv").read_bytes() == before


def test_the_pictures_are_drawn_from_the_table_alone(out: Path, tmp_path: Path) -> None:
    for name in ("results.parquet", "results.csv"):
        (tmp_path / name).write_bytes((out / "analysis" / "demo" / name).read_bytes())
    invoke(pico_analyze, "plot", tmp_path, "--format", "svg", "--metric", "per")
    names = {path.name for path in tmp_path.rglob("*.svg")}
    assert {"overview.svg"} < names
    for size in ("0.19M", "0.51M", "1.5M"):
        assert size in next(tmp_path.rglob("overview.svg")).read_text(encoding="utf-8")
