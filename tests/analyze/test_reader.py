import json
import logging
import random

import pandas as pd
import pytest
import torch

from pico_analyze.checkpoint.format import MANIFEST, CheckpointError
from pico_analyze.checkpoint.reader import find_runs, open_run


def test_a_run_knows_what_it_is(run_folder):
    run = open_run(run_folder)
    assert (run.name, run.identity.run_id, run.identity.suite) == ("demo", "id-demo", None)
    assert run.steps == (0, 1, 2, 10)
    assert run.config == {"model": {"d_model": 16}}
    assert run.n_parameters == 16_000
    assert run.checkpoint(10).tokens == 10 * 4 * 8


def test_steps_are_numbers(make_run):
    assert open_run(make_run(steps=(1000, 200, 9000, 50, 10000))).steps == (50, 200, 1000, 9000, 10000)


def test_a_tensor_is_what_was_stored(make_run):
    stored = {}
    run = open_run(make_run(change=lambda step, tensors: stored.update({step: dict(tensors)})))
    checkpoint = run.checkpoint(2)
    for row in checkpoint.manifest.tensors:
        tensor = checkpoint.tensor(row)
        assert torch.equal(tensor, stored[2][row.kind, row.split, row.module])
        assert tensor.dtype == stored[2][row.kind, row.split, row.module].dtype  # activations are bfloat16
    assert {row.dtype for row in checkpoint.select("activations")} == {"BF16"}


def test_select(run_folder):
    checkpoint = open_run(run_folder).checkpoint(0)
    assert [row.module for row in checkpoint.select("activations", "val", layer=1)] == [
        "layers.1.attention.v_proj",
        "layers.1.attention.o_proj",
        "layers.1.swiglu.w_2",
    ]
    assert [row.module for row in checkpoint.select("weights", role="v")] == [
        "layers.0.attention.v_proj",
        "layers.1.attention.v_proj",
    ]
    assert len(checkpoint.select("gradients", module="v_proj")) == 4  # 2 layers, 2 splits
    assert checkpoint.select("weights", module="proj") == []  # a suffix ends at a dot


def test_layers_1_10_and_11_are_not_confused(make_run, make_shape):
    checkpoint = open_run(make_run(steps=(0,), shape=make_shape(n_layers=12))).checkpoint(0)
    assert [row.module for row in checkpoint.select("weights", layer=1, module="swiglu.w_2")] == ["layers.1.swiglu.w_2"]


def test_a_step_that_does_not_exist(run_folder):
    with pytest.raises(CheckpointError, match="run demo has no step 3; it has the steps 0, 1, 2, 10"):
        open_run(run_folder).checkpoint(3)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: (step / MANIFEST).unlink(), "not written to its end"),
        (lambda step: (step / "model.safetensors").unlink(), "model.safetensors is missing"),
        (
            lambda step: (step / "model.safetensors").write_bytes(b"0" * 100),
            "model.safetensors has 100 bytes",
        ),
        (lambda step: (step / MANIFEST).write_text("{"), "cannot be read"),
        (lambda step: step.rename(step.with_name("step_7")), "holds step 1, by its manifest"),
    ],
)
def test_an_unusable_step_is_skipped_with_a_note(run_folder, caplog, damage, reason):
    damage(run_folder / "checkpoints" / "step_1")
    run = open_run(run_folder)
    assert run.steps == (0, 2, 10)
    (step,) = run.skipped
    assert reason in run.skipped[step]
    assert reason in caplog.text
    with pytest.raises(CheckpointError, match=f"step {step} of run demo cannot be used"):
        run.checkpoint(step)


def test_a_step_of_another_run_is_skipped(make_run):
    run, other = make_run("a"), make_run("b", steps=(0, 3))
    (other / "checkpoints" / "step_3").rename(run / "checkpoints" / "step_3")
    assert "belongs to another run (b, id-b)" in open_run(run).skipped[3]


def test_other_names_are_not_checkpoints(run_folder, caplog):
    for name in ("latest", "step_final", "step_12.tmp", "step_007"):
        (run_folder / "checkpoints" / name).mkdir()
    with caplog.at_level(logging.INFO):
        assert open_run(run_folder).steps == (0, 1, 2, 10)
    assert "step_12.tmp is not a checkpoint" in caplog.text


def test_one_flipped_byte_is_found_and_harms_nothing_else(run_folder, flip_byte):
    checkpoint = open_run(run_folder).checkpoint(1)
    bad, *good = checkpoint.select("weights")
    flip_byte(checkpoint.folder, bad)
    with pytest.raises(CheckpointError, match=r"model.safetensors: model.embedding_proj.weight \(run demo, step 1\)"):
        checkpoint.tensor(bad)
    assert all(checkpoint.tensor(row).shape == tuple(row.shape) for row in good)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": [16, 32]}, r"is F32 \[32, 16\] where the manifest says F32 \[16, 32\]"),
        ({"dtype": "BF16"}, "is F32 .* where the manifest says BF16"),
        ({"key": "absent"}, "cannot be read"),
        ({"file": "../../run.json"}, "in a file that the manifest does not list"),
        ({"sha256": "0" * 64}, "does not have the content"),
    ],
)
def test_a_manifest_that_disagrees_with_the_file(run_folder, change, reason):
    checkpoint = open_run(run_folder).checkpoint(0)
    row = checkpoint.select("weights", module="embedding_proj")[0].model_copy(update=change)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.tensor(row)


def test_a_header_that_lies_never_shows_a_traceback(run_folder):
    """Any damage to the header ends in a CheckpointError, or in the true tensor where it did not matter."""
    path = run_folder / "checkpoints" / "step_0" / "model.safetensors"
    original = path.read_bytes()
    truth = {row.key: open_run(run_folder).checkpoint(0).tensor(row).clone() for row in _weights(run_folder)}
    header_bytes = 8 + int.from_bytes(original[:8], "little")
    rng = random.Random(0)
    n_refused = 0
    for _ in range(60):
        content = bytearray(original)
        content[rng.randrange(header_bytes)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        checkpoint = open_run(run_folder).checkpoint(0)
        for row in _weights(run_folder):
            try:
                assert torch.equal(checkpoint.tensor(row), truth[row.key])
            except CheckpointError:
                n_refused += 1
    assert n_refused > 60


def _weights(folder):
    return open_run(folder).checkpoint(0).select("weights")


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a run: it has no run\.json"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text('{"run": 3}')
    with pytest.raises(CheckpointError, match=r"run\.json is not valid: format"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json is not valid"):
        open_run(tmp_path)


def test_a_newer_major_version_is_refused(run_folder):
    content = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps(content | {"format_version": "2.0"}))
    with pytest.raises(CheckpointError, match=r"format version '2\.0'; this version reads up to 1\.2"):
        open_run(run_folder)


def test_the_training_log(run_folder, caplog):
    log = open_run(run_folder).training_log()
    assert list(log["step"]) == list(range(11))
    assert log["val_loss"].isna().sum() == 9
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    pd.testing.assert_frame_equal(open_run(run_folder).training_log(), log)
    assert "the last line is torn" in caplog.text


def test_a_training_log_with_a_broken_line(run_folder):
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for broken, message in {
        '{"step": 1, "loss": NaN}': "NaN is not JSON",
        '{"step": 1, "loss": -1e999}': "-1e999 is not a finite number",
        '{"loss": 1.0}': "not an object with a step",
        "3": "not an object with a step",
    }.items():
        path.write_text("\n".join([lines[0], broken, *lines[2:]]))
        with pytest.raises(CheckpointError, match=rf"metrics\.jsonl, line 2: {message}"):
            open_run(run_folder).training_log()


def test_no_training_log(run_folder):
    (run_folder / "metrics.jsonl").unlink()
    assert open_run(run_folder).training_log().empty


@pytest.fixture
def runs_folder(make_run, make_shape):
    """Three sizes of the suite ``sizes``, whose names do not sort by size, and a run of no suite."""
    for name, d_model in {"sizes-large": 32, "sizes-medium": 16, "sizes-small": 8}.items():
        folder = make_run(name, steps=(0,), suite="sizes", shape=make_shape(d_model=d_model))
    return make_run("alone", steps=(0,), suite=None, shape=make_shape(d_model=24)).parent if folder else None


def names(patterns):
    return [path.name for path in find_runs(patterns)]


def test_find_runs(runs_folder):
    by_size = ["sizes-small", "sizes-medium", "alone", "sizes-large"]
    assert names([runs_folder]) == by_size
    assert names([runs_folder / "alone"]) == ["alone"]
    assert names([f"{runs_folder}/sizes-*"]) == ["sizes-small", "sizes-medium", "sizes-large"]
    assert names([runs_folder / "sizes"]) == ["sizes-small", "sizes-medium", "sizes-large"]
    assert names([f"{runs_folder.parent}/*"]) == by_size  # a glob of folders that hold runs
    assert names([runs_folder / "sizes", runs_folder / "sizes-large"]) == names([runs_folder / "sizes"])


def test_find_runs_says_what_there_is(runs_folder):
    with pytest.raises(CheckpointError, match=r"holds the runs alone, sizes-large, .* and the suites sizes"):
        find_runs([runs_folder / "sizzes"])
    with pytest.raises(CheckpointError, match="no run there; there is none in"):
        find_runs([runs_folder.parent / "elsewhere" / "*"])


def test_a_run_without_a_checkpoint_comes_last(runs_folder, make_run):
    folder = make_run("aaa", steps=(0,))
    (folder / "checkpoints" / "step_0" / MANIFEST).unlink()
    assert names([runs_folder])[-1] == "aaa"
    assert open_run(folder).steps == ()
    with pytest.raises(CheckpointError, match="run aaa has no step 5; it has no complete step"):
        open_run(folder).checkpoint(5)
