"""Checkpoints spread over processes: the same table, whatever happens to a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from click.testing import CliRunner

from pico_analyze import analyze, results
from pico_analyze.cli import main

SIMPLE = {"component_name": "simple", "data_type": "weights", "layer_suffixes": "swiglu.w_2"}
ACTIVATIONS = SIMPLE | {"data_type": "activations"}
CIRCUIT = {
    "component_name": "ov_circuit",
    "data_type": "gradients",
    "layer_suffixes": {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"},
}
METRICS = [
    {"metric_name": "per", "data_split": "train", "components": [SIMPLE, CIRCUIT]},
    {"metric_name": "gini", "components": [SIMPLE]},
    {"metric_name": "cka", "data_split": "val", "target_checkpoint": "last", "components": [ACTIVATIONS]},
]
# A metric that harms its own process: `HARM` runs where a file of that name holds the hash of the entries.
HARMFUL = """
import os, signal, time
from pathlib import Path
from pico_analyze.metrics import Metric

def measure(entries):
    total = f"{float(entries.double().sum()):.12f}"
    HARM
    return 1.0

METRICS = {"harmful": Metric(f"{__name__}:measure", "entries", "", "", "")}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("harmful", None)


@pytest.fixture
def analysis(tmp_path):
    def write(metrics=METRICS, **keys):
        raw = {"analysis_name": "mine", "runs": ["runs/*"], "metrics": metrics} | keys
        Path("analysis.yaml").write_text(yaml.safe_dump(raw))
        return "analysis.yaml"

    return write


def call(*words, code=0):
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def harmful(harm):
    Path("harmful.py").write_text(HARMFUL.replace("HARM", harm))
    return {"metrics": [{"metric_name": "harmful", "components": [SIMPLE]}], "plugins": ["harmful.py"]}


def sums(run):
    """The sum that stands for a checkpoint in ``HARM``, by step: of layer 1."""
    from pico_analyze import open_run

    opened = open_run(run)
    found = {}
    for step in opened.steps:
        checkpoint = opened.checkpoint(step)
        (row,) = checkpoint.select("weights", layer=1, module="swiglu.w_2")
        found[step] = f"{float(checkpoint.tensor(row).double().sum()):.12f}"
    return found


def test_the_same_bytes_as_one_process(make_run, make_shape, analysis):
    make_run("small", steps=(0, 1, 2, 5))
    make_run("large", steps=(0, 1, 5), shape=make_shape(32))
    call("run", analysis())
    one = {name: Path("analysis_results/mine", name).read_bytes() for name in ("results.csv", "results.parquet")}
    output = call("run", "analysis.yaml", "analysis_name=two", "--jobs", 2)
    for name, content in one.items():
        assert Path("analysis_results/two", name).read_bytes() == content
    assert "7 of 7 checkpoints: " in output.stderr
    names = {f"{run} step {step}" for run, steps in (("small", (0, 1, 2, 5)), ("large", (0, 1, 5))) for step in steps}
    assert all(f"checkpoints: {name}" in output.stderr for name in names)


def test_what_is_missing_and_what_was_kept(run_folder, analysis, flip_byte):
    from pico_analyze import open_run

    checkpoint = open_run(run_folder).checkpoint(1)
    (row,) = checkpoint.select("weights", layer=1, module="swiglu.w_2")
    flip_byte(checkpoint.folder, row)
    call("run", analysis(), "steps=[0]")
    output = call("run", "analysis.yaml", "--jobs", 2, "steps=[0, 1, 2, 3]")
    assert "kept from before" in output.stdout
    assert "w_2.weight (run demo, step 1) does not have the content" in output.stderr  # logged in a process
    alone = analyze("runs/demo", {"metrics": METRICS, "steps": [0, 1, 2, 3]})
    pd.testing.assert_frame_equal(results.read(Path("analysis_results/mine")), alone)


def test_one_thread_each(run_folder):
    harm = "import torch; return float(torch.get_num_threads() + 10 * int(os.environ.get('OMP_NUM_THREADS', 0)))"
    frame = analyze("runs/demo", harmful(harm), jobs=2)
    assert set(frame.query("metric == 'harmful'")["value"]) == {11.0}


def test_references_are_loaded_in_the_process_that_needs_them_once(run_folder, tmp_path):
    Path("harmful.py").write_text(
        """
import os
from pathlib import Path
from pico_analyze.components import ComponentInfo
from pico_analyze.components.single import Simple

class Seen(Simple):
    def pieces(self, checkpoint, selection):
        with open("seen.txt", "a") as file:
            file.write(f"{os.getpid()} {checkpoint.step} {selection.layer}\\n")
        yield from super().pieces(checkpoint, selection)

COMPONENTS = {"seen": ComponentInfo(f"{__name__}:Seen", ("activations",), (), "")}
"""
    )
    entry = METRICS[2] | {"components": [ACTIVATIONS | {"component_name": "seen"}], "target_checkpoint": 0}
    frame = analyze("runs/demo", {"metrics": [entry], "plugins": ["harmful.py"], "steps": [1, 2, 10]}, jobs=2)
    assert frame.query("metric == 'cka'")["value"].notna().all()
    lines = [line.split() for line in Path("seen.txt").read_text().splitlines()]
    assert str(os.getpid()) not in {pid for pid, _, _ in lines}
    assert len(lines) == 3 * 2 + len({pid for pid, _, _ in lines}) * 2  # two layers, and the reference in each process


def test_a_process_that_dies_costs_its_checkpoint_only(make_run, analysis):
    """Of two checkpoints that kill their process one does so each time, the other once, as when memory was short."""
    folder = make_run(steps=(0, 1, 2, 3, 4))
    total = sums(folder)
    harm = f"""if total == '{total[2]}':
        while not Path('killed').exists():
            time.sleep(0.01)
        os._exit(3)
    if total == '{total[3]}' and not Path('killed').exists():
        Path('killed').touch()
        os.kill(os.getpid(), signal.SIGKILL)"""
    output = call("run", analysis(**harmful(harm)), "--jobs", 2)
    assert Path("killed").exists()
    assert "demo step 3: a process died, perhaps of this checkpoint; it is tried alone" in output.stderr
    assert output.stderr.count("died again") == 1
    assert "demo step 2: the process that measured it died again; its values are missing" in output.stderr
    frame = results.read(Path("analysis_results/mine")).query("metric == 'harmful'")
    assert frame[frame["status"] == "missing"]["step"].to_list() == [2, 2]
    assert set(frame[frame["status"] == "missing"]["reason"]) == {
        "the process that measured this checkpoint died: out of memory, or a crash outside Python"
    }
    assert frame[frame["status"] == "ok"]["step"].to_list() == [0, 0, 1, 1, 3, 3, 4, 4]


def test_ctrl_c_leaves_a_valid_table(make_run, analysis):
    folder = make_run(steps=(0, 1, 2, 3, 4))
    slow = f"if total == '{sums(folder)[3]}': time.sleep(60)"
    settings = harmful(slow)
    command = [
        sys.executable,
        "-c",
        "from pico_analyze.cli import main; main()",
        "run",
        analysis(**settings),
        "--jobs=2",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # tests that run in the background of a shell are deaf to Ctrl-C, and so is what they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if line.startswith("4 of 5 checkpoints"):
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted: the same command computes what is missing" in errors
    frame = results.read(Path("analysis_results/mine")).query("metric == 'harmful'")
    assert list(frame["step"]) == [0, 0, 1, 1, 2, 2, 4, 4]
    assert frame["value"].notna().all()
    harmful("pass")
    assert "10 ok, 0 flagged, 0 undefined, 0 missing" in call("run", "analysis.yaml").stdout


def test_jobs_must_be_positive(run_folder, analysis):
    assert "0 is not in the range x>=1" in call("run", analysis(), "--jobs", 0, code=2).stderr
