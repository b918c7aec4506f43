"""The command line as a user meets it: what it prints, and its exit codes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pico_train.checkpoint.lock import locked

Pico = Callable[..., Result]


def test_a_run_from_start_to_end(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    result = pico("run", tiny_yaml, "evaluation.metrics=[held_out,sample]", "evaluation.sample.max_new_tokens=5")
    assert result.exit_code == 0, result.output
    assert "tiny writes:\n  | def " in result.stdout
    header, row = result.stdout.splitlines()[-2:]
    assert header.split()[:2] == ["run", "parameters"]
    assert row.split()[:3] == ["tiny", "14,288", "768"]
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step_6" / "manifest.json").exists()

    again = pico(
        "run", "--config", tiny_yaml, "evaluation.metrics=[held_out,sample]", "evaluation.sample.max_new_tokens=5"
    )
    assert again.exit_code == 0
    assert "tiny is finished: 6 steps" in again.stderr
    assert again.stdout.splitlines()[-1].split()[:6] == row.split()[:6]

    listed = pico("ls", tmp_path / "runs")
    assert listed.exit_code == 0
    assert "6 of 6" in listed.stdout
    assert "5: 0, 1, 2 ... 6" in listed.stdout

    verified = pico("verify", tmp_path / "runs" / "tiny")
    assert (verified.exit_code, "5 checkpoints, 0 faults" in verified.stdout) == (0, True)
    (tmp_path / "runs" / "tiny" / "checkpoints" / "step_1" / "config.json").unlink()
    verified = pico("verify", tmp_path / "runs" / "tiny")
    assert verified.exit_code == 1
    assert "step_1/config.json is missing" in verified.stderr


def test_a_dry_run_says_what_it_needs_and_starts_nothing(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    result = pico("run", tiny_yaml, "--dry-run")
    assert result.exit_code == 0
    assert "tiny: 14,288 parameters, 6 steps, 768 tokens, disk " in result.stdout
    assert "5 checkpoints: 0, 1, 2, 4, 6" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_what_this_machine_would_refuse(pico: Pico, tiny_yaml: Path) -> None:
    planned = pico("run", tiny_yaml, "--dry-run", "training.fabric.precision=16-mixed")
    assert planned.exit_code == 0
    assert (
        "would be refused on this machine: training.fabric.precision: '16-mixed' needs a CUDA device" in planned.stdout
    )


def test_a_dry_run_says_what_is_too_large_for_this_machine(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    said = pico("run", tiny_yaml, "--dry-run", "model.d_model=65536", "model.n_layers=100").stdout
    assert "would be refused on this machine: tiny needs about " in said
    assert "would be refused on this machine: the trail of tiny needs " in said
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_finds_the_data(pico: Pico, tiny_yaml: Path, tmp_path: Path, text_file: Path) -> None:
    said = pico("run", tiny_yaml, "--dry-run").stdout
    assert "data: 1 file, " in said
    assert "the data was not read" in said
    refused = pico("run", tiny_yaml, "--dry-run", "data.dataset.path=nowhere.txt")
    assert refused.exit_code == 2
    assert "data.dataset.path: nowhere.txt does not exist" in refused.output


def test_the_disk_that_a_dry_run_states_is_what_the_trail_takes(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    from pico_train.config import load_config
    from pico_train.estimate import estimate

    overrides = ["model.d_model=128", "model.activation_hidden_dim=512", "training.max_steps=2"]
    assert pico("run", tiny_yaml, *overrides).exit_code == 0
    stored = sum(p.stat().st_size for p in (tmp_path / "runs").rglob("*.safetensors"))
    assert estimate(load_config(tiny_yaml, overrides)).disk_bytes == pytest.approx(stored, rel=0.02)


def test_the_batch_of_a_step_can_be_read(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    assert pico("run", tiny_yaml, "training.max_steps=1").exit_code == 0
    run = tmp_path / "runs" / "tiny"
    shown = pico("data", "at", "--run", run, "--step", 1)
    assert shown.exit_code == 0
    assert shown.stdout.count("--- sample ") == 8
    lines = [json.loads(line) for line in pico("data", "at", "--run", run, "--step", 1, "--json").stdout.splitlines()]
    stored = load_file(run / "checkpoints" / "step_1" / "learning_dynamics" / "train_batch.safetensors")
    assert [line["sample_id"] for line in lines] == stored["sample_ids"].tolist()
    assert [line["token_ids"] for line in lines] == stored["input_ids"].tolist()
    late = pico("data", "at", "--run", run, "--step", 2)
    assert late.exit_code == 2
    assert "has the steps 0 to 1" in late.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "name the YAML of a run or a suite"),
        (["run", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "{yaml}", "training.optimization.lr=fast"], "training.optimization.lr"),
        (["run", "{yaml}", "weigth_decay=1"], "training.optimization.weight_decay"),
        (
            ["run", "{yaml}", "checkpointing.save_to_hf=true", "checkpointing.hf_checkpoint.repo_id=a/b"],
            "save_to_hf=false",
        ),
        (["run", "{yaml}", "data.dataset.path=nowhere.txt"], "nowhere.txt"),
        (["run", "{yaml}", "model.max_seq_len=20000"], "20,001"),
        (["run", "{yaml}", "checkpointing.learning_dynamics.layer_suffixes=[attn.o_projj]"], "attention.o_proj"),
        (["run", "{yaml}", "training.fabric.accelerator=cuda"], "there is: cpu"),
        (["run", "{yaml}", "training.fabric.precision=16-mixed"], "needs a CUDA device"),
        (["run", "{yaml}", "training.fabric.num_devices=3"], "nearest numbers of devices: 2 or 4"),
        (
            ["run", "{yaml}", "training.compile=fast"],
            'training.compile: "fast" is not allowed; allowed: "auto" or true or false',
        ),
        (["ls", "nowhere"], "nowhere"),
        (["verify", "{dir}"], "run.json"),
        (["data", "at", "--run", "{dir}", "--step", "1"], "run.json"),
    ],
)
def test_what_the_user_wrote_wrong_is_named_with_exit_code_2(
    pico: Pico, tiny_yaml: Path, words: list[str], message: str
) -> None:
    result = pico(*[word.format(yaml=tiny_yaml, dir=tiny_yaml.parent) for word in words])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.output


def test_one_run_of_a_suite_per_process(pico: Pico, tiny_yaml: Path, tmp_path: Path) -> None:
    base = "\n".join(f"  {line}" for line in tiny_yaml.read_text().splitlines() if "run_name" not in line)
    suite = tmp_path / "seeds.yaml"
    suite.write_text(f"base:\n{base}\nvary:\n" + "".join(f"  - {{name: s{i}, seeds.weights: {i}}}\n" for i in range(3)))
    for task, runs in ((2, ["seeds-s1"]), (1, ["seeds-s0", "seeds-s2"])):
        result = pico("run", suite, "training.max_steps=1", "--shard", f"{task}/2")
        assert result.exit_code == 0, result.output
        assert [line.split()[0] for line in result.stdout.splitlines()[3:]] == runs
    again = pico("run", suite, "training.max_steps=1", "--only", "s1", "--only", "s2")
    assert again.exit_code == 0
    assert "seeds-s1 is finished" in again.stderr
    assert "seeds-s0" not in again.output
    nothing = pico("run", suite, "training.max_steps=1", "--shard", "4/4")
    assert (nothing.exit_code, "nothing to do: shard 4/4" in nothing.stdout) == (0, True)
    nothing = pico("run", suite, "training.max_steps=1", "--shard", "4/4", "--dry-run")
    assert (nothing.exit_code, "nothing to do: shard 4/4" in nothing.stdout) == (0, True)
    assert [pico("run", suite, *words).exit_code for words in (("--only", "s9"), ("--shard", "0/2"))] == [2, 2]
    planned = pico("run", suite, "--dry-run", "--shard", "2/2")
    assert ("seeds-s1: " in planned.stdout, "\n1 run, disk " in planned.stdout) == (True, True)


def test_two_processes_that_start_the_same_run(tiny_yaml: Path, tmp_path: Path) -> None:
    """One trains, the other is told who does; its changed setting leaves no trace; a lock outlives no process."""
    words = [sys.executable, "-m", "pico_train.cli", "run", str(tiny_yaml), "training.max_steps=3000"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        next(line for line in first.stderr if "step 20/" in line)
        run = tmp_path / "runs" / "tiny"
        before = (run / "config.yaml").read_text(), (run / "run.json").read_text()
        second = subprocess.run(
            [*words, "training.fabric.num_threads=1"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        first.kill()
        first.communicate()
    assert second.returncode == 2
    owner = rf"in use by process {first.pid} on {socket.gethostname()} since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\+00:00"
    assert re.search(owner, second.stderr), second.stderr
    assert ((run / "config.yaml").read_text(), (run / "run.json").read_text()) == before
    with locked(run):
        assert (run / "run.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_schemas_are_json(pico: Pico) -> None:
    assert "data" in json.loads(pico("schema").stdout)["properties"]
    assert "vary" in json.loads(pico("schema", "--suite").stdout)["properties"]


def test_interrupted_by_ctrl_c_and_started_again(tiny_yaml: Path, tmp_path: Path) -> None:
    """A real process, its real signal; what it leaves is what the next start goes on from."""
    words = [
        sys.executable,
        "-m",
        "pico_train.cli",
        "run",
        str(tiny_yaml),
        "training.max_steps=3000",
        "model.dropout=0.1",
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step 20/" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 75
    assert "the same command goes on" in rest
    assert "Traceback" not in rest
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").glob("step_*"))


def test_a_signal_that_an_import_swallows_stops_the_run_all_the_same(tiny_yaml: Path) -> None:
    """Libraries try imports and go on where one fails, whatever with."""
    code = f"""
import os, signal, sys
import pico_train.cli
class Importing:
    def find_spec(self, name, *rest):
        if name == "pico_train.run":
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception:
                pass
sys.meta_path.insert(0, Importing())
pico_train.cli.main(["run", {str(tiny_yaml)!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert "tiny stopped by SIGTERM at step 0; the same command goes on there" in done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_during_the_imports_ends_with_one_sentence(tiny_yaml: Path, name: str) -> None:
    code = f"""
import os, signal, sys
import pico_train.cli
class Importing:
    def find_spec(self, name, *rest):
        if name == "pico_train.run":
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Importing())
pico_train.cli.main(["run", {str(tiny_yaml)!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert (
        done.stderr
        == f"stopped by {name} before the first pass; the same command starts again, or goes on from what is saved\n"
    )
