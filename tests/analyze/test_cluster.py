"""Checkpoints on the workers of a real Dask scheduler: the same table, though a worker is killed; clear words otherwise."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pico_analyze import cluster
from pico_analyze.cli import main

SIMPLE = {"component_name": "simple", "data_type": "weights", "layer_suffixes": "swiglu.w_2"}
ACTIVATIONS = SIMPLE | {"data_type": "activations"}
METRICS = [
    {"metric_name": "per", "components": [SIMPLE]},
    {"metric_name": "cka", "data_split": "val", "target_checkpoint": "last", "components": [ACTIVATIONS]},
    {"metric_name": "harmful", "components": [SIMPLE]},
]
# Notes who measures which checkpoint; the first to measure step 3 kills its process.
HARMFUL = """
import os, signal, time
from pathlib import Path
from pico_analyze.metrics import Metric

def measure(entries):
    total = f"{float(entries.double().sum()):.12f}"
    with open("measured.txt", "a") as file:
        file.write(f"{os.getpid()} {total}\\n")
    if total == "FATAL" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(entries.double().mean())

METRICS = {"harmful": Metric(f"{__name__}:measure", "entries", "", "", "")}
"""
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of distributed's sockets at the end


def dask(*words, **environment):
    command = [sys.executable, "-m", "dask", *map(str, words)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=os.environ | environment, **quiet)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """The file of a scheduler without workers."""
    file = tmp_path_factory.mktemp("dask") / "scheduler.json"
    process = dask("scheduler", "--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", file)
    deadline = time.monotonic() + 30
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    yield file
    process.terminate()
    process.wait(timeout=20)


@pytest.fixture(scope="module")
def workers(scheduler):
    """Two worker processes at the scheduler; a packages folder of their own holds another version of one package."""
    from distributed import Client

    packages = scheduler.parent / "packages"
    make_package(packages, "twofold", "1.0")
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    words = ("--scheduler-file", scheduler, "--nthreads", 1, "--no-dashboard", "--local-directory", scheduler.parent)
    processes = [dask("worker", *words, PYTHONPATH=path, OMP_NUM_THREADS="1") for _ in range(2)]
    with Client(scheduler_file=str(scheduler), set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    yield scheduler
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(timeout=20)


def make_package(folder, name, version):
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def analysis(make_run, tmp_path, monkeypatch):
    """``analysis.yaml`` in the working directory, about a run of five steps."""
    monkeypatch.chdir(tmp_path)
    folder = make_run(steps=(0, 1, 2, 3, 4))
    Path("harmful.py").write_text(HARMFUL.replace("FATAL", sum_of_step_3(folder)))
    raw = {"analysis_name": "mine", "runs": ["runs/*"], "metrics": METRICS, "plugins": ["harmful.py"]}
    Path("analysis.yaml").write_text(yaml.safe_dump(raw))
    yield "analysis.yaml"
    sys.modules.pop("harmful", None)


def sum_of_step_3(folder):
    """The sum that stands for step 3: of layer 1."""
    from pico_analyze import open_run

    checkpoint = open_run(folder).checkpoint(3)
    (row,) = checkpoint.select("weights", layer=1, module="swiglu.w_2")
    return f"{float(checkpoint.tensor(row).double().sum()):.12f}"


def call(*words, code=0):
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def test_a_scheduler_without_workers(scheduler, analysis):
    output = call("run", analysis, "--dask", scheduler, code=2)
    assert "dask: the scheduler has no workers; start some with `dask worker ADDRESS --nthreads 1`" in output.stderr


def test_when_all_workers_are_gone_what_they_gave_is_kept(scheduler, analysis, monkeypatch):
    monkeypatch.setattr(cluster, "WITHOUT_WORKERS_S", 0.5)
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.2)
    Path("harmful.py").write_text(Path("harmful.py").read_text().replace("os.kill(", "time.sleep(2); os.kill("))
    words = ("--scheduler-file", scheduler, "--nthreads", 1, "--no-dashboard", "--no-nanny")
    worker = dask("worker", *words, "--local-directory", scheduler.parent, OMP_NUM_THREADS="1")
    from distributed import Client

    with Client(scheduler_file=str(scheduler), set_as_default=False) as client:
        client.wait_for_workers(1, timeout=60)
    began = time.monotonic()
    output = call("run", analysis, "--dask", scheduler, code=1).stderr
    assert time.monotonic() - began < 30
    assert worker.wait(timeout=20)
    assert "warning: dask: all workers are gone; waiting 0.5 seconds for others" in output
    assert output.endswith(
        "error: dask: all workers are gone, for 0.5 seconds now; start some, and the same command computes what is missing\n"
    )
    assert (
        "stopped: 22 rows are kept in analysis_results/mine" in output
    )  # six values of each of three steps, and losses
    assert "12 values computed, 18 kept from before" in call("run", analysis).stdout


def test_nothing_is_missing_and_nothing_twice_though_a_worker_is_killed(workers, analysis):
    output = call("run", analysis, "--dask", workers)
    assert Path("killed").exists()
    assert "5 of 5 checkpoints: " in output.stderr
    measured = [line.split() for line in Path("measured.txt").read_text().splitlines()]
    assert str(os.getpid()) not in {pid for pid, _ in measured}
    assert len({pid for pid, _ in measured}) >= 2
    # Two layers of five steps, and what the killed one had in hand once more.
    assert len({total for _, total in measured}) == 10
    assert "30 ok, 0 flagged, 0 undefined, 0 missing" in output.stdout
    call("run", analysis, "analysis_name=alone")
    for name in ("results.csv", "results.parquet"):
        there, here = (Path("analysis_results", folder, name).read_bytes() for folder in ("mine", "alone"))
        assert there == here
    assert "0 values computed, 30 kept" in call("run", analysis, "--dask", workers).stdout


def test_workers_with_other_packages(workers, analysis, tmp_path, monkeypatch):
    make_package(tmp_path / "here", "twofold", "2.0")
    make_package(tmp_path / "here", "lonely", "1.0")
    monkeypatch.syspath_prepend(tmp_path / "here")
    monkeypatch.setattr(cluster, "COMPARED", ("pico-analyze", "twofold", "lonely"))
    output = call("run", analysis, "--dask", workers, code=2)
    assert "dask: the workers cannot do this analysis:" in output.stderr
    assert "has twofold 1.0, and here it is 2.0" in output.stderr
    assert "has no package lonely" in output.stderr
    assert "pico-analyze" not in output.stderr.split("cannot do this analysis:")[1]


def test_a_device_that_the_workers_lack(workers, analysis):
    output = call("run", analysis, "--dask", workers, "--device", "cuda", code=2)
    assert "cannot be used: device: cuda cannot be used: torch" in output.stderr


@pytest.mark.parametrize(
    ("names", "folder", "message"),
    [
        (("/nowhere/mine.py",), ".", r"cannot be used: plugins: /nowhere/mine\.py: there is no such file"),
        ((), "/nowhere/at/all", "does not see the folder /nowhere/at/all: runs have to be on a file system"),
    ],
)
def test_what_a_worker_does_not_see(names, folder, message, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert re.search(message, cluster._problem_of_worker(names, folder, "cpu"))


def test_a_worker_of_several_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "start it with OMP_NUM_THREADS=1" in cluster._problem_of_worker((), ".", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cluster._problem_of_worker((), ".", "cpu") is None


@pytest.mark.parametrize(
    ("address", "message", "limit_s"),
    [
        ("tcp://127.0.0.1:9", "dask: no scheduler answers at tcp://127.0.0.1:9", 10),
        (
            "http://127.0.0.1:8787",
            "dask: http://127.0.0.1:8787 is no address of a scheduler; one begins with tcp://",
            3,
        ),
        ("nonsense://x", "dask: nonsense://x is no address of a scheduler", 3),
        ("nowhere.json", "dask: there is no scheduler file nowhere.json", 3),
    ],
)
def test_a_scheduler_that_is_not_there(analysis, address, message, limit_s):
    began = time.monotonic()
    (line,) = [line for line in call("run", analysis, "--dask", address, code=2).stderr.splitlines() if "error" in line]
    assert time.monotonic() - began < limit_s
    assert message in line


def test_without_the_package(analysis, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    output = call("run", analysis, "--dask", "tcp://127.0.0.1:9", code=2)
    assert "--dask needs the package distributed" in output.stderr
    assert "pip install 'pico-analyze[dask]'" in output.stderr


def test_one_way_to_share(analysis):
    output = call("run", analysis, "--dask", "tcp://127.0.0.1:9", "--jobs", 2, code=2)
    assert "--jobs and --dask are two ways to share the checkpoints" in output.stderr
