"""Checkpoints that are not what they claim to be, found by ``verify`` and marked by an analysis."""

import doctest
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from pico_analyze import analyze
from pico_analyze.checkpoint import integrity
from pico_analyze.checkpoint.format import seal
from pico_analyze.cli import main

GOLDEN = Path(__file__).parents[1] / "contract" / "golden" / "v1.0" / "run"
STEPS = (0, 1, 2, 4, 8, 16)
SIMPLE = {"component_name": "simple", "data_type": "weights", "layer_suffixes": "swiglu.w_2"}
GINI = {"metric_name": "gini", "components": [SIMPLE]}
ACTIVATIONS = {"metric_name": "gini", "data_split": "val", "components": [SIMPLE | {"data_type": "activations"}]}


@pytest.fixture
def learning(make_run):
    """A run whose weights move a little further at every step, with what ``change`` does to it."""

    def make(change=None, steps=STEPS, **options):
        start = {}

        def learn(step, tensors):
            for key in [key for key in tensors if key[0] == "weights"]:
                towards = tensors[key].clone()
                start.setdefault(key, towards)
                tensors[key] = start[key] * (1 + 0.01 * step) + 0.001 * step**0.5 * towards
            if change is not None:
                change(step, tensors)

        return make_run(steps=steps, change=learn, **options)

    return make


def verify(*words, code):
    result = CliRunner().invoke(main, ["verify", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.stdout.splitlines()


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest | {"sha256": seal(manifest)}))


def copy_step(run, source, target):
    """Put another step's checkpoint into the place of ``target``, its manifest faked to say so."""
    folder = run / "checkpoints" / f"step_{target}"
    shutil.rmtree(folder)
    shutil.copytree(run / "checkpoints" / f"step_{source}", folder)
    edit_manifest(folder, lambda manifest: manifest.update(step=target))


def set_rates(run, rates):
    """Write a training log in which ``rates`` says what each update was."""
    log = [
        {"step": step, "loss": 1.0, "val_loss": None} | rates.get(step, {"lr": 0.1, "updated": True})
        for step in range(17)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))


def statuses(run, *metrics):
    frame = analyze(run, {"metrics": list(metrics or [GINI])})
    frame = frame[frame["kind"] != "training"]
    return dict(
        zip(
            zip(frame["step"], frame["layer"], strict=True),
            zip(frame["status"], frame["reason"], strict=True),
            strict=True,
        )
    )


# ---- nothing wrong


def test_a_sound_run(learning):
    assert verify(learning(), code=0) == ["run demo: 6 checkpoints, no fault"]


def test_the_golden_run():
    assert verify(GOLDEN, code=0)[-1].endswith(": 1 checkpoint, no fault")


@pytest.mark.parametrize(
    "still", [{"lr": 0.0, "updated": True}, {"lr": 0.1, "updated": False}], ids=["rate 0", "skipped"]
)
def test_steps_between_which_nothing_was_learnt_are_the_same(learning, still):
    run = learning()
    copy_step(run, 0, 1)
    copy_step(run, 0, 2)
    set_rates(run, {0: still, 1: still})
    assert verify(run, code=0) == ["run demo: 6 checkpoints, no fault"]
    assert {status for status, _ in statuses(run).values()} == {"ok"}
    set_rates(run, {0: still})  # the second update moved the weights, so steps 1 and 2 cannot be the same
    lines = verify(run, code=1)
    assert "step_2" in lines[2]
    assert "same content as in step 0" in lines[2]
    assert lines[-1].endswith("3 faults")
    assert statuses(run)[1, 0] == ("flagged", "the same content as step 2")


# ---- each fault, with its file


def test_duplicated(learning):
    run = learning()
    copy_step(run, 8, 2)
    lines = verify(run, code=1)
    for line, (step, other) in zip(lines, ((2, 8), (8, 2)), strict=False):
        path = run / f"checkpoints/step_{step}/model.safetensors"
        assert line == f"{path}: all weights have the same content as in step {other}, although updates lie between"
    assert lines[2:] == ["run demo: 6 checkpoints, 2 faults"]
    found = statuses(run)
    assert found[2, 0] == ("flagged", "the same content as step 8")
    assert found[8, 1] == ("flagged", "the same content as step 2")
    assert {found[step, 0][0] for step in (0, 1, 4, 16)} == {"ok"}


def test_one_tensor_of_another_step(learning):
    foreign = {}

    def change(step, tensors):
        key = ("weights", None, "layers.1.swiglu.w_2")
        if step == 2:
            tensors[key] = foreign[key]
        foreign[key] = tensors[key]  # that of step 1

    run = learning(change)
    lines = verify(run, code=1)
    assert (
        "step_2/model.safetensors: 1 of 9 weights, layers.1.swiglu.w_2, have the same content as in step 1" in lines[1]
    )
    assert [key for key, (status, _) in statuses(run).items() if status == "flagged"] == [(1, 1), (2, 1)]


def test_weights_that_belong_to_another_step(learning):
    """Nearly those of step 16, as after a change of dtype and back, so that no hash gives them away."""
    at = {}

    def change(step, tensors):
        if step == 16:
            tensors |= {key: value.bfloat16().float() for key, value in at.items()}

    def remember(step, tensors):
        if step == 1:
            at.update({key: value for key, value in tensors.items() if key[0] == "weights"})
        change(step, tensors)

    run = learning(remember, steps=(0, 1, 2, 4, 8, 16, 32))
    lines = verify(run, code=1)
    for line, (step, other) in zip(lines, ((1, 16), (16, 1)), strict=False):
        assert line.startswith(f"{run}/checkpoints/step_{step}/model.safetensors: embedding_proj, ")
        assert f"nearer to step {other} than to the steps beside, so one of the two holds foreign weights" in line
    assert len(lines) == 3
    found = statuses(run)
    assert found[16, 0] == ("flagged", "its weights are nearer to step 1 than to the steps beside it")
    assert {found[step, 0][0] for step in (0, 2, 4, 8, 32)} == {"ok"}
    assert {status for status, _ in statuses(run, ACTIVATIONS).values()} == {"ok"}  # they are the true ones
    raw = {"metrics": [GINI]}
    again = analyze(run, raw, previous=analyze(run, raw))
    assert again.attrs["computed"] == 0
    assert again.equals(analyze(run, raw))


def test_what_was_stored_with_the_weights_and_says_another_step(learning):
    """Late neighbours are too much alike for a distance; what came with them counts and hashes."""

    def with_count(step, tensors):
        tensors["optimizer", "step", "layers.0.swiglu.w_2"] = torch.tensor(8.0 if step == 16 else float(step))

    run = learning(with_count)
    state = run / "checkpoints/step_8/training_state/state.json"
    state.write_text('{"step": 4}')
    hashes = {}
    for step in (2, 4):
        rows = json.loads((run / f"checkpoints/step_{step}/manifest.json").read_text())["tensors"]
        weights = "\n".join(row["sha256"] for row in rows if row["kind"] == "weights")
        hashes[step] = hashlib.sha256(weights.encode()).hexdigest()
        (run / f"evaluations/step_{step}").mkdir(parents=True)
    for step, other in ((2, 2), (4, 2)):
        evaluation = {"step": step, "weights_sha256": hashes[other]}
        (run / f"evaluations/step_{step}/held_out.json").write_text(json.dumps(evaluation))
    assert verify(run, code=1) == [
        f"{run}/evaluations/step_4/held_out.json: has another weights_sha256 than step 4: it belongs to other weights",
        f"{state}: has another step than step 8: it belongs to other weights",
        f"{run}/checkpoints/step_16/training_state/optimizer.safetensors: the optimizer counts 8 updates where "
        "manifest.json says 16: it belongs to another step",
        "run demo: 6 checkpoints, 3 faults",
    ]


def test_exchanged_folders(learning):
    """The step is in the sealed manifest, and the hash of the manifest in the next one."""
    run = learning()
    first, second, aside = (run / "checkpoints" / name for name in ("step_8", "step_16", "aside"))
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    lines = verify(run, code=1)
    assert [line.rpartition("/")[2] for line in lines[:-1]] == [
        "step_8 holds step 16, by its manifest",
        "step_16 holds step 8, by its manifest",
    ]
    for folder, step in ((first, 8), (second, 16)):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"step": step}))
    assert all("does not have the SHA-256 that it states of itself" in line for line in verify(run, code=1)[:-1])


def test_mislabelled(learning):
    run = learning()
    edit_manifest(run / "checkpoints/step_2", lambda manifest: manifest.update(step=3))
    edit_manifest(run / "checkpoints/step_4", lambda manifest: manifest["run"].update(id="another", name="other"))
    lines = verify(run, code=1)
    assert lines[0].endswith("step_2 holds step 3, by its manifest")
    assert lines[1].endswith("step_4 belongs to another run (other, another)")
    assert lines[2:] == ["run demo: 4 checkpoints, 2 faults"]


def test_truncated_and_unfinished(learning):
    run = learning()
    cut = run / "checkpoints/step_2/learning_dynamics/val_activations.safetensors"
    cut.write_bytes(cut.read_bytes()[:-7])
    (run / "checkpoints/step_4/manifest.json").unlink()
    (run / "checkpoints/step_8/model.safetensors").unlink()
    lines = verify(run, code=1)
    assert len(lines) == 4
    for line, words in zip(
        lines, (f"{cut} has", "step_4 has no manifest.json", "model.safetensors is missing"), strict=False
    ):
        assert words in line


def test_tampered(learning, flip_byte):
    from pico_analyze import open_run

    run = learning()
    checkpoint = open_run(run).checkpoint(4)
    (row,) = checkpoint.select("gradients", "train", layer=1, role="down")
    flip_byte(checkpoint.folder, row)
    path = checkpoint.folder / row.file
    assert verify(run, code=1)[0] == f"{path}: was changed or damaged: its SHA-256 is not that of manifest.json"

    def fake(manifest):  # the file is as the manifest says now, the tensor is not
        (file,) = [file for file in manifest["files"] if file["path"] == row.file]
        file["sha256"] = integrity.file_hash(path)

    edit_manifest(checkpoint.folder, fake)
    (line, _) = verify(run, code=1)
    assert line.startswith(f"{path}: layers.1.swiglu.w_2 (run demo, step 4) does not have the content")


def test_missing(learning):
    run = learning()
    schedule = {"first": True, "last": True, "log2_until": 8, "also": []}
    config = {"training": {"max_steps": 32}, "checkpointing": {"save_every_n_steps": 10, "schedule": schedule}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert verify(run, code=1) == [
        f"{run}/checkpoints/step_10: is missing",
        "run demo: 6 checkpoints, 1 fault",
    ]
    shutil.rmtree(run / "checkpoints/step_1")
    (run / "checkpoints/step_10.tmp").mkdir()  # left by a kill: a later step is complete
    assert [line.rpartition("/")[2] for line in verify(run, code=1)[:-1]] == [
        "step_1: is missing",
        "step_10: is missing",
    ]
    log = run / "metrics.jsonl"
    log.write_text(log.read_text() + "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(17, 25)))
    (run / "checkpoints/step_20.tmp").mkdir()  # being written beside the training
    assert len(verify(run, code=1)) == 3
    log.write_text(log.read_text() + "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(25, 33)))
    assert [line.rpartition("/")[2] for line in verify(run, code=1)[2:-1]] == [
        "step_30: is missing",
        "step_32: is missing",
    ]


def test_files_of_the_run_that_cannot_be_read(learning):
    run = learning()
    (run / "metrics.jsonl").write_text("{}\n{}\n")
    (run / "config.yaml").write_text("[1\n")
    lines = verify(run, code=1)
    assert "metrics.jsonl, line 1: not an object with a step" in lines[0]
    assert "config.yaml cannot be read: " in lines[-2]


def test_several_runs_and_none(make_run, learning, tmp_path):
    learning()
    make_run("other")
    lines = verify(tmp_path / "runs", code=0)
    assert [line.partition(":")[0] for line in lines] == ["run demo", "run other"]
    verify(tmp_path / "nothing", code=2)


def test_examples_in_docstrings():
    outcome = doctest.testmod(integrity)
    assert outcome.attempted > 0
    assert outcome.failed == 0
