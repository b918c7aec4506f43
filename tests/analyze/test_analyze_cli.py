import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner

import pico_analyze
from pico_analyze import results
from pico_analyze.cli import main
from pico_analyze.components import COMPONENTS
from pico_analyze.config import AnalysisConfig, load_config
from pico_analyze.metrics import METRICS, Metric
from pico_analyze.run import run_analysis

PUBLISHED = Path(__file__).parents[1] / "fixtures" / "published" / "analysis"
OURS = Path(__file__).parents[2] / "analysis_configs"

WEIGHTS = {"component_name": "simple", "data_type": "weights", "layer_suffixes": "swiglu.w_2", "layers": "all"}
ACTIVATIONS = {**WEIGHTS, "data_type": "activations"}
GINI = {"metric_name": "gini", "components": [WEIGHTS]}  # 2 layers: 2 values a checkpoint
CKA = {"metric_name": "cka", "target_checkpoint": "last", "data_split": "val", "components": [ACTIVATIONS]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def analysis(tmp_path):
    """Write an analysis file; the name of it."""

    def write(*metrics, **keys):
        raw = {"analysis_name": "mine", "runs": ["runs/demo"], "metrics": list(metrics or [GINI])} | keys
        (tmp_path / "analysis.yaml").write_text(yaml.safe_dump(raw))
        return "analysis.yaml"

    return write


def call(*words, code=0):
    """The command line's output; its exit code must be ``code``."""
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def table(folder="analysis_results/mine"):
    return results.read(Path(folder))


# ---- quick to answer


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["run", "--help"],
        ["plot", "--help"],
        ["ls", "metrics"],
        ["ls", "components"],
        ["ls", "runs", "runs"],
        ["ls", "tensors", "runs/demo"],
        ["schema"],
        ["run", str(OURS / "demo.yaml"), "metrics=3"],
    ],
    ids=" ".join,
)
def test_answers_without_what_is_slow_to_import(words, run_folder):
    script = (
        "import sys\nfrom pico_analyze.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'pandas', 'scipy', 'matplotlib', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert len(done.stdout + done.stderr) > 100
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_gives_its_functions_lazily():
    script = (
        "import sys, pico_analyze\nassert 'torch' not in sys.modules\n"
        "for name in pico_analyze.__all__: assert callable(getattr(pico_analyze, name)), name\n"
        "try: pico_analyze.nothing\nexcept AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'pico_analyze' has no attribute 'nothing'\n"
    assert pico_analyze.load_config is load_config


# ---- ls and schema


def test_ls_metrics_has_range_and_meaning():
    output = " ".join(call("ls", "metrics").output.split())
    for name, metric in METRICS.items():
        assert f"{name}: {metric.summary} range {metric.range}" in output
        assert " ".join(metric.meaning.split()) in output
    assert "norm_type: frobenius, nuclear, spectral, inf, inf_operator (required)" in output
    assert "estimator: debiased, plug_in, minibatch (default debiased)" in output
    assert "batch: a whole number from 4 (default 256, with estimator minibatch)" in output


def test_ls_components():
    output = call("ls", "components").output
    assert all(f"{name}: {component.summary}" in output for name, component in COMPONENTS.items())
    assert "{value_layer: ..., output_layer: ...}" in output


def test_ls_runs(make_run, make_shape):
    make_run("demo-small", suite="demo", shape=make_shape(32))
    make_run("demo-tiny", suite="demo")
    lines = call("ls", "runs").output.splitlines()
    assert [re.split(r"  +", line) for line in lines] == [
        ["run", "suite", "parameters", "checkpoints", "steps", "folder"],
        ["demo-tiny", "demo", "16,000", "4", "0, 1, 2, 10", "runs/demo-tiny"],
        ["demo-small", "demo", "32,000", "4", "0, 1, 2, 10", "runs/demo-small"],
    ]
    assert len(call("ls", "runs", "runs/demo").output.splitlines()) == 3
    assert "runs holds the runs demo-small, demo-tiny" in call("ls", "runs", "runs/dem", code=2).stderr


def test_ls_tensors(run_folder):
    output = call("ls", "tensors", run_folder).output
    assert output.startswith("run demo, step 10, 320 tokens\n")
    assert re.search(r"^activations +val +swiglu\.w_2 +24 x 16 +BF16 +0, 1$", output, re.MULTILINE)
    assert re.search(r"^weights +embedding_proj +32 x 16 +F32$", output, re.MULTILINE)
    assert call("ls", "tensors", run_folder, "--step", 1).output.startswith("run demo, step 1,")
    assert (
        "run demo has no step 3; it has the steps 0, 1, 2, 10"
        in call("ls", "tensors", run_folder, "--step", 3, code=2).stderr
    )
    assert "is not a run" in call("ls", "tensors", "nothing", code=2).stderr


def test_schema():
    assert json.loads(call("schema").output) == AnalysisConfig.json_schema()


# ---- run


def test_run_writes_the_table_and_says_where(run_folder, analysis):
    result = call("run", analysis(GINI, CKA))
    folder = Path("analysis_results/mine")
    assert sorted(path.name for path in folder.iterdir()) == [
        "analysis.log",
        "computed.parquet",
        "config.yaml",
        "results.csv",
        "results.parquet",
        "runs.csv",
        "runs.parquet",
    ]
    assert result.stdout.splitlines() == [
        "16 values computed, 0 kept from before, in analysis_results/mine",
        "16 ok, 0 flagged, 0 undefined, 0 missing",
        "table    analysis_results/mine/results.parquet, analysis_results/mine/results.csv",
        "runs     analysis_results/mine/runs.parquet, analysis_results/mine/runs.csv",
        "pictures pico-analyze plot analysis_results/mine",
    ]
    assert "4 of 4 checkpoints: demo step 10" in result.stderr
    frame = table()
    assert set(frame["metric"]) == {"gini", "cka", "train_loss", "val_loss"}
    assert frame["value"].notna().all()
    assert list(results.read(folder, "runs")["run"]) == ["demo"]
    assert load_config(folder / "config.yaml") == load_config("analysis.yaml")
    assert "4 of 4 checkpoints: demo step 10" in (folder / "analysis.log").read_text()
    assert len(pd.read_csv(folder / "results.csv")) == len(frame)


def test_the_table_is_what_analyze_gives(run_folder, analysis):
    config = load_config(analysis(GINI, CKA))
    outcome = run_analysis(config)
    pd.testing.assert_frame_equal(table(), pico_analyze.analyze("runs/demo", config))
    pd.testing.assert_frame_equal(table(), outcome.table)
    assert (outcome.folder, outcome.n_computed, outcome.n_missing) == (Path("analysis_results/mine"), 16, 0)


def test_a_rerun_computes_only_what_is_missing(run_folder, analysis):
    call("run", analysis(GINI), "steps=[0, 1]")
    before = table()
    assert "0 values computed, 4 kept from before" in call("run", "analysis.yaml", "steps=[0, 1]").stdout
    pd.testing.assert_frame_equal(table(), before)
    assert "4 values computed, 4 kept from before" in call("run", "analysis.yaml").stdout
    narrower = call("run", "analysis.yaml", "steps=[10]")
    assert "0 values computed, 2 kept from before" in narrower.stdout
    assert "6 earlier values are not asked for now" in narrower.stderr
    assert set(table()["step"]) == {10}


def test_a_narrower_rerun_loses_nothing(run_folder, analysis):
    call("run", analysis(GINI, CKA))
    everything = table()
    call("run", analysis(CKA), "steps=[0]")
    assert set(table()["step"]) == {0}
    assert set(table()["metric"]) == {"cka", "train_loss", "val_loss"}
    assert len(pd.read_csv("analysis_results/mine/results.csv")) == len(table())
    assert "0 values computed, 16 kept from before" in call("run", analysis(GINI, CKA)).stdout
    pd.testing.assert_frame_equal(table(), everything)


def test_the_store_holds_each_value_once_and_nothing_that_is_missing(run_folder, analysis):
    for steps in ("[0, 5]", "[1]", "[0, 1, 5]"):
        call("run", analysis(), f"steps={steps}")
    store = results.read(Path("analysis_results/mine"), "computed")
    assert list(zip(store["step"], store["layer"], store["status"], strict=True)) == [
        (step, layer, "ok") for step in (0, 1) for layer in (0, 1)
    ]


def test_content_that_comes_back_is_taken_from_the_store(make_run, analysis):
    """The value of a tensor stays known while another stands in its place."""
    folder = make_run(steps=(0,))
    call("run", analysis())
    before = table()
    shutil.rmtree(folder)
    make_run(steps=(0,), seed=1)
    assert "2 values computed, 0 kept" in call("run", "analysis.yaml").stdout
    assert not table()["value"].equals(before["value"])
    shutil.rmtree(folder)
    make_run(steps=(0,))
    assert "0 values computed, 2 kept" in call("run", "analysis.yaml").stdout
    pd.testing.assert_frame_equal(table(), before)


def test_the_store_survives_a_kill_while_it_is_written(run_folder, analysis, monkeypatch):
    call("run", analysis(), "steps=[0]")
    to_parquet = pd.DataFrame.to_parquet

    def killed(frame, path, **options):
        to_parquet(frame, path, **options)
        path.write_bytes(path.read_bytes()[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", killed)
        call("run", "analysis.yaml", code=130)
    assert set(table()["step"]) == {0}
    assert "6 values computed, 2 kept" in call("run", "analysis.yaml").stdout


@pytest.mark.parametrize("option", ["--config", "--config_path", None])
def test_the_ways_to_name_the_file(run_folder, analysis, option):
    words = [analysis()] if option is None else [option, analysis()]
    assert "8 values computed" in call("run", *words).stdout
    assert "0 values computed, 2 kept" in call("run", *words, "steps=[1]").stdout


@pytest.mark.parametrize("option", ["--run-path", "--run_path"])
def test_run_path_replaces_the_runs_of_the_file(make_run, analysis, option):
    for name in ("a", "b", "c"):
        make_run(name, steps=(0,))
    call("run", analysis(), option, "runs/c", option, "runs/[a]")
    assert list(results.read(Path("analysis_results/mine"), "runs")["run"]) == ["a", "c"]
    assert load_config("analysis_results/mine/config.yaml").runs == ("runs/c", "runs/[a]")


def test_a_suite_gives_its_name(make_run, make_shape, analysis):
    make_run("demo-small", suite="demo", shape=make_shape(32), steps=(0,))
    make_run("demo-tiny", suite="demo", steps=(0,))
    make_run("other", steps=(0,))
    call("run", analysis(analysis_name=None))
    assert list(table("analysis_results/demo_analysis")["run"].unique()) == ["demo-tiny", "demo-small"]
    call("run", "analysis.yaml", "--run-path", "runs/other", "analysis_name=''")
    assert set(table("analysis_results/other_analysis")["run"]) == {"other"}
    error = call("run", "analysis.yaml", "--run-path", "runs/*", code=2).stderr
    assert "analysis_name: null takes the name of the run or suite, but these are several: " in error


def test_dry_run_writes_nothing(run_folder, analysis):
    output = call("run", analysis(GINI, CKA), "--dry-run", "steps=[0, 3]").stdout.splitlines()
    assert output == [
        "run demo: 4 checkpoints in runs/demo",
        "gini of simple weights swiglu.w_2, layers 0, 1: 2 checkpoints, 4 values, 2 of them missing",
        'cka {"estimator": "debiased", "kernel": "linear"} of simple activations swiglu.w_2 (val) against the last '
        "step, layers 0, 1: 2 checkpoints, 4 pairs, 4 values, 2 of them missing",
        "8 values, into analysis_results/mine",
    ]
    assert not Path("analysis_results").exists()


def test_missing_values_are_counted_with_their_reason(run_folder, analysis):
    (run_folder / "checkpoints/step_2/model.safetensors").unlink()
    result = call("run", analysis(), "steps=[0, 2, 5]")
    assert "2 ok, 0 flagged, 0 undefined, 4 missing" in result.stdout
    said = " ".join(result.stdout.split())
    assert "2 missing: there is no step 5" in said
    assert re.search(r"2 missing: \S+/step_2/model\.safetensors is missing", said)
    assert list(table().query("status == 'missing'")["step"]) == [2, 2, 5, 5]
    call("run", "analysis.yaml", "steps=[0, 2, 5]", "--strict", code=3)
    call("run", "analysis.yaml", "steps=[0]", "--strict")


def test_undefined_values_are_counted_with_their_reason(make_run, analysis):
    def zero(step, tensors):
        tensors["weights", None, "layers.1.swiglu.w_2"].zero_()

    make_run(steps=(0,), change=zero)
    output = call("run", analysis(), "--strict").stdout
    assert "1 ok, 0 flagged, 1 undefined, 0 missing" in output
    assert "1 undefined: all entries are zero" in output


def test_published_json_files_on_request(run_folder, analysis):
    call("run", analysis(GINI, write_json="pico_v0"), "steps=[1]")
    content = json.loads(Path("analysis_results/mine/step_1/gini.json").read_text())
    assert list(content) == ["layers.0.swiglu.w_2.weights", "layers.1.swiglu.w_2.weights"]
    assert list(content.values()) == list(table().query("metric == 'gini'")["value"])


@pytest.fixture
def breaks_at_step_2(monkeypatch):
    """Make the fifth value of the first start raise an error."""

    def breaks(error):
        seen = []
        compute = Metric.compute

        def breaking(self, *matrices, **parameters):
            seen.append(self)
            if len(seen) == 5:
                raise error
            return compute(self, *matrices, **parameters)

        monkeypatch.setattr(Metric, "compute", breaking)

    return breaks


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("no memory"), 1)])
def test_what_was_computed_is_kept(run_folder, analysis, breaks_at_step_2, error, code):
    breaks_at_step_2(error)
    stopped = call("run", analysis(), code=code).stderr
    assert "rows are kept in analysis_results/mine" in stopped
    assert ("the same command computes what is missing" if code == 130 else "RuntimeError: no memory") in stopped
    assert list(table().query("metric == 'gini'")["step"]) == [0, 0, 1, 1]
    assert "4 values computed, 4 kept from before" in call("run", "analysis.yaml").stdout


def test_an_interrupted_rerun_keeps_the_earlier_table_too(run_folder, analysis, breaks_at_step_2):
    call("run", analysis(), "steps=[10]")
    breaks_at_step_2(KeyboardInterrupt())
    call("run", "analysis.yaml", code=130)
    assert list(table().query("metric == 'gini'")["step"]) == [0, 0, 1, 1, 10, 10]


def test_work_is_written_now_and_then(run_folder, analysis, monkeypatch):
    monkeypatch.setattr("pico_analyze.run.WRITE_EVERY_S", -1.0)
    written = []
    write = results.write
    monkeypatch.setattr(results, "write", lambda frame, *more: written.append(len(frame)) or write(frame, *more))
    call("run", analysis())
    assert len(written) == 2 * 4 + 3  # the store and the table after each checkpoint; in the end the runs too
    assert written[:8:2] == [2, 4, 6, 8]
    assert written[1:8:2] == sorted(set(written[1:8:2]))


def test_logging_is_left_as_it_was(run_folder, analysis):
    logger = logging.getLogger("pico_analyze")
    before = (logger.level, list(logger.handlers))
    call("run", analysis())
    assert (logger.level, list(logger.handlers)) == before


# ---- what is wrong: one message, exit code 2, nothing written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.yaml"], "nothing.yaml:\n  no such file"),
        ([], "name the YAML of an analysis"),
        (["metrics.0.metric_name=gini"], "name the YAML of an analysis"),
        (
            ["analysis.yaml", "metrics.0.metric_nam=gini"],
            "command line:\n  metrics.0.metric_nam=gini: unknown key; did you mean metrics.0.metric_name?",
        ),
        (["analysis.yaml", "metrics.0.metric_name=ginni"], "did you mean 'gini'?"),
        (["analysis.yaml", "metrics.0.components.0.component_name=simpel"], "did you mean 'simple'?"),
        (["analysis.yaml", "metrics.0.components.0.layers=[1, 7]"], "layers [7] do not exist; there are 0 to 1"),
        (["analysis.yaml", "metrics.0.components.0.layer_suffixes=w_9"], "swiglu.w_2"),
        (
            ["analysis.yaml", "steps=[3, 4]"],
            "steps: none of those asked for exists; run demo has the steps 0, 1, 2, 10",
        ),
        (["analysis.yaml", "steps=[]"], "steps: [] selects no checkpoint"),
        (["analysis.yaml", "metrics=[]"], "metrics: the list is empty"),
        (["analysis.yaml", "runs=[]"], "runs: none is named"),
        (["analysis.yaml", "--run-path", "runs/dem"], "runs/dem: no run there; runs holds the runs demo"),
        (
            ["analysis.yaml", "metrics.0.metric_name=cka", "metrics.0.target_checkpoint=10"],
            "compares activations and does not fit weights",
        ),
        (
            ["analysis.yaml", "monitoring={save_to_wandb: true, wandb: {entity: a, project: b}}"],
            "not built yet; use monitoring.save_to_wandb=false",
        ),
        (["analysis.yaml", "analysis_name=../up"], 'analysis_name=../up: "../up" must consist of'),
        (["analysis.yaml", "monitoring.output_dir=full"], "full/mine holds files that are no analysis"),
        (["analysis.yaml", "monitoring.output_dir=full", "analysis_name=mine.txt"], "full/mine.txt is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(run_folder, analysis, words, message):
    Path("full/mine").mkdir(parents=True)
    Path("full/mine/thesis.txt").write_text("years of work")
    Path("full/mine.txt").write_text("more of it")
    analysis()
    error = call("run", *words, code=2).stderr
    assert error.startswith("error: ")
    assert message in error
    assert not Path("analysis_results").exists()


def test_several_errors_at_once(run_folder, analysis):
    error = call("run", analysis(), "step=3", "metrics.0.norm_type=inf", "monitoring.output_dir=3", code=2).stderr
    assert all(key in error for key in ("step=3: ", "metrics.0.norm_type=inf: ", "monitoring.output_dir=3: "))


def test_a_run_without_activations(make_run, analysis):
    make_run(splits=())
    error = call("run", analysis(CKA), code=2).stderr
    assert "no activations of split val were captured" in error


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.yaml")), ids=lambda path: path.stem)
def test_published_files_are_refused_with_the_override_to_use(path, run_folder):
    error = call("run", path, "--run-path", run_folder, code=2).stderr
    assert "monitoring.save_to_wandb=false" in error


def test_the_published_demo_runs_on_a_run_of_ours(make_run, make_shape):
    run = make_run(steps=(0, 50, 100), shape=make_shape(n_layers=12))
    output = call("run", PUBLISHED / "demo.yaml", "monitoring.save_to_wandb=false", "--run-path", run).stdout
    assert ", 0 missing" in output
    assert "pico-decoder-demo-1-analysis" in output


@pytest.mark.parametrize("path", sorted(OURS.glob("*.yaml")), ids=lambda path: path.stem)
def test_our_files_run(path, make_run):
    def with_queries_and_keys(_, tensors):
        for layer in (0, 1):
            for name, rows in (("q_proj", 16), ("k_proj", 8)):
                tensors["weights", None, f"layers.{layer}.attention.{name}"] = torch.ones(rows, 16)

    for name in ("demo-tiny", "demo-small"):
        make_run(name, suite="demo", steps=(0, 1), change=with_queries_and_keys)
    assert ", 0 missing" in call("run", path).stdout


def test_an_unreadable_table_is_named(run_folder, analysis):
    call("run", analysis())
    Path("analysis_results/mine/computed.parquet").write_bytes(b"PAR1")
    error = call("run", "analysis.yaml", code=2).stderr
    assert "analysis_results/mine/computed.parquet cannot be read" in error


def test_debug_shows_the_traceback(run_folder, analysis):
    result = CliRunner().invoke(main, ["run", analysis(), "steps=[]", "--debug"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("  steps: [] selects no checkpoint")


def test_a_closed_pipe_is_no_error():
    script = "from pico_analyze.cli import main; main(['ls', 'metrics'])"
    command = f'"{sys.executable}" -c "{script}" | head -c 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ, check=True)
    assert done.stderr == ""


# ---- plot


def test_plot(run_folder, analysis):
    call("run", analysis(GINI, CKA))
    result = call("plot", "analysis_results/mine", "--format", "png", "--metric", "gini", "--x", "tokens")
    output = result.stdout
    lines = result.stderr.splitlines()  # not a terminal: plain lines
    n_figures = int(lines[-1].split()[0])
    assert re.fullmatch(f"{n_figures} of {n_figures} figures: gini_.*/loss", lines[-1])
    assert len(lines) == -(-n_figures // 20)
    folder = Path("analysis_results/mine/plots")
    pictures = [path for path in folder.rglob("*") if path.is_file()]
    assert output == f"{len(pictures)} files in {folder}, overview.png first\n"
    assert {path.suffix for path in pictures} == {".png"}
    assert sorted(path.name for path in folder.iterdir()) == ["gini_simple-swiglu.w_2_weights", "overview.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing: no such folder"),
        (["runs"], "runs/results.parquet does not exist"),
        (["analysis_results/mine", "--format", "gif"], "'gif' is none of png, svg, pdf"),
        (["analysis_results/mine", "--metric", "ginni"], "there is no 'ginni' in these results"),
    ],
)
def test_plot_of_what_is_not_there(run_folder, analysis, words, message):
    call("run", analysis())
    error = call("plot", *words, code=2).stderr
    assert message in error
    assert not Path("analysis_results/mine/plots").exists()
