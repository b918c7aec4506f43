"""Runs through the public door: what is trained, captured, stored, and what a stopped run ends with."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import pico_train
from pico_train import evaluation, loop
from pico_train.checkpoint.folder import RunFolderError
from pico_train.checkpoint.format import CheckpointError, read_manifest, seal, step_folders
from pico_train.checkpoint.lock import locked
from pico_train.checkpoint.verify import verify_run
from pico_train.config import RunConfig
from pico_train.data.batches import Batch
from pico_train.errors import UserError
from pico_train.loop import NonFiniteError
from pico_train.metrics_log import MetricsLog, Row, read_rows
from pico_train.run import samples_at
from pico_train.state import TrainState
from pico_train.stopping import Stopped

Tiny = Callable[..., RunConfig]
LLAMA = {"v_proj": "self_attn.v_proj", "o_proj": "self_attn.o_proj", "w_2": "mlp.down_proj"}


def llama_module(module: str) -> str:
    _, layer, _, name = module.split(".")
    return f"model.layers.{layer}.{LLAMA[name]}"


def checkpoints(run: Path) -> dict[int, Path]:
    return step_folders(run / "checkpoints")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def rows_without_timings(run: Path) -> list[dict[str, object]]:
    timings = ("seconds", "data_seconds", "save_seconds", "tokens_per_s", "memory_bytes")
    return [
        {key: value for key, value in row.items() if key not in timings} for row in read_rows(run / "metrics.jsonl")
    ]


def assert_relative(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Close relative to the largest magnitude of the tensor."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def rederived(folder: Path, split: str) -> tuple[float, LlamaForCausalLM, dict[str, torch.Tensor]]:
    """Loss, model with gradients, and module outputs of transformers on a stored batch with the stored weights."""
    batch = load_file(folder / "learning_dynamics" / f"{split}_batch.safetensors")
    ids = batch["input_ids"].long()
    model = AutoModelForCausalLM.from_pretrained(folder)
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _a, out, name=name: outputs.update({name: out}))
    logits = model(ids[:, :-1]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item(), model, outputs


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_captured_numbers_are_those_of_the_stored_batch_at_the_stored_weights(tiny: Tiny, accumulation: int) -> None:
    config = tiny(f"training.optimization.gradient_accumulation_steps={accumulation}", "training.max_steps=4")
    [result] = pico_train.train(config)
    losses = {row["step"]: row["loss"] for row in read_rows(result.path / "metrics.jsonl")}
    assert list(checkpoints(result.path)) == [0, 1, 2, 4]
    for step, folder in checkpoints(result.path).items():
        for split in ("train", "val"):
            loss, model, outputs = rederived(folder, split)
            if split == "train":
                assert losses[step] == pytest.approx(loss, rel=1e-6)
            gradients = load_file(folder / "learning_dynamics" / f"{split}_gradients.safetensors")
            activations = load_file(folder / "learning_dynamics" / f"{split}_activations.safetensors")
            assert gradients.keys() == activations.keys()
            assert len(gradients) == 2 * 3
            for module, gradient in gradients.items():
                expected = model.get_submodule(llama_module(module)).weight.grad
                assert_relative(gradient, expected)
                assert_relative(activations[module], outputs[llama_module(module)][:, -1])


@pytest.mark.parametrize("rule", ["position", "mean", "all", "sample"])
def test_activations_of_every_token_rule_equal_a_plain_forward(tiny: Tiny, rule: str) -> None:
    idx = ["checkpointing.learning_dynamics.sequence_idx=3"] if rule == "position" else []
    section = "checkpointing.learning_dynamics"
    config = tiny("training.max_steps=1", f"{section}.rule={rule}", f"{section}.tokens_per_sequence=5", *idx)
    [result] = pico_train.train(config)
    folder = checkpoints(result.path)[1]
    for split in ("train", "val"):
        _, _, outputs = rederived(folder, split)
        stored = load_file(folder / "learning_dynamics" / f"{split}_batch.safetensors")
        for module, rows in load_file(folder / "learning_dynamics" / f"{split}_activations.safetensors").items():
            plain = outputs[llama_module(module)]  # (B, T, F)
            expected = {
                "position": lambda x: x[:, 3],
                "mean": lambda x: x.mean(1),
                "all": lambda x: x.flatten(0, 1),
                "sample": lambda x: torch.cat(
                    [x[i, p] for i, p in enumerate(stored["positions"].long())]  # noqa: B023
                ),
            }[rule](plain)
            assert_relative(rows, expected)
        manifest = read_manifest(folder)
        assert manifest.capture is not None
        assert (manifest.capture.rule, manifest.capture.rows[split]) == (rule, len(rows))


def test_looking_does_not_disturb(tiny: Tiny) -> None:
    ends = []
    for name, suffixes in (("looked", "[v_proj, w_2]"), ("blind", "null")):
        config = tiny(
            f"checkpointing.run_name={name}",
            f"checkpointing.learning_dynamics.layer_suffixes={suffixes}",
            "model.dropout=0.1",
        )
        [result] = pico_train.train(config)
        ends.append(result.path)
    assert same(*(weights(checkpoints(run)[6]) for run in ends))
    assert rows_without_timings(ends[0]) == rows_without_timings(ends[1])
    assert read_manifest(checkpoints(ends[1])[6]).capture is None


def test_neither_accumulation_nor_batches_change_the_stream(tiny: Tiny) -> None:
    streams = []
    for batch, steps, accumulation in ((8, 4, 1), (8, 4, 2), (8, 4, 4), (4, 8, 1)):
        config = tiny(
            f"checkpointing.run_name=b{batch}a{accumulation}",
            f"data.dataloader.batch_size={batch}",
            f"training.max_steps={steps}",
            f"training.optimization.gradient_accumulation_steps={accumulation}",
            "checkpointing.save_every_n_steps=1",
            "evaluation.metrics=null",
        )
        [result] = pico_train.train(config)
        batches = [
            load_file(folder / "learning_dynamics" / "train_batch.safetensors")
            for step, folder in checkpoints(result.path).items()
            if step < steps  # the last pass only looks
        ]
        streams.append({key: torch.cat([b[key] for b in batches]) for key in ("sample_ids", "input_ids")})
    for other in streams[1:]:
        assert same(streams[0], other)


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Make training stop as by Ctrl-C right before the row of a step is logged."""
    append = MetricsLog.append

    def stop(at: int | None) -> None:
        def append_or_stop(self: MetricsLog, row: Row) -> None:
            if row.step == at:
                raise KeyboardInterrupt
            append(self, row)

        monkeypatch.setattr(MetricsLog, "append", append_or_stop)

    return stop


@pytest.mark.parametrize("stops", [[0], [3], [4, 5], [6]])
def test_a_stopped_run_ends_where_it_would_have_ended(
    tiny: Tiny, stop_at: Callable[[int | None], None], stops: list[int]
) -> None:
    [whole] = pico_train.train(tiny("checkpointing.run_name=whole", "model.dropout=0.1"))
    config = tiny("checkpointing.run_name=stopped", "model.dropout=0.1")
    for step in stops:
        stop_at(step)
        with pytest.raises(KeyboardInterrupt):
            pico_train.train(config)
    stop_at(None)
    [stopped] = pico_train.train(config)
    assert rows_without_timings(stopped.path) == rows_without_timings(whole.path)
    for step, folder in checkpoints(whole.path).items():
        a, b = read_manifest(folder), read_manifest(checkpoints(stopped.path)[step])
        assert [row.sha256 for row in a.tensors] == [row.sha256 for row in b.tensors]


def test_a_finished_run_says_so(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    [first] = pico_train.train(tiny())
    written = {path: path.stat().st_mtime_ns for path in first.path.rglob("*.safetensors")}
    with caplog.at_level("INFO", logger="pico_train"):
        [second] = pico_train.train(tiny())
    assert "tiny is finished: 6 steps" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*.safetensors")} == written
    assert (second.loss, second.val_loss) == (first.loss, first.val_loss)


def test_a_folder_of_another_configuration_is_refused_with_the_keys(tiny: Tiny) -> None:
    pico_train.train(tiny("training.max_steps=1"))
    with pytest.raises(RunFolderError, match=r"model\.d_model: 16 before, 32 now\n.*run_name"):
        pico_train.train(tiny("training.max_steps=1", "model.d_model=32"))
    pico_train.train(tiny("training.max_steps=1", "monitoring.logging.log_every_n_steps=1"))  # changes no number


def test_a_folder_that_is_no_run_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match="holds no run"):
        pico_train.train(tiny())
    assert [p.name for p in (tmp_path / "runs" / "tiny").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100]),
        lambda folder: flip_a_byte(folder / "training_state" / "optimizer.safetensors"),
    ],
    ids=["half-written", "truncated", "tampered"],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(
    tiny: Tiny,
    stop_at: Callable[[int | None], None],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
) -> None:
    [whole] = pico_train.train(tiny("checkpointing.run_name=whole"))
    config = tiny()
    stop_at(5)
    with pytest.raises(KeyboardInterrupt):
        pico_train.train(config)
    stop_at(None)
    run = whole.path.with_name("tiny")
    damage(checkpoints(run)[4])
    with caplog.at_level("WARNING", logger="pico_train"):
        pico_train.train(config)
    assert "step_4" in caplog.text
    assert "step_4.damaged" in caplog.text
    assert (run / "checkpoints" / "step_4.damaged").is_dir()
    assert rows_without_timings(run) == rows_without_timings(whole.path)
    assert same(weights(checkpoints(run)[6]), weights(checkpoints(whole.path)[6]))


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_every_checkpoint_opens_in_transformers(tiny: Tiny) -> None:
    [result] = pico_train.train(
        tiny(
            "model.tie_embeddings=true",
            "evaluation.metrics=[held_out, sample]",
            "evaluation.sample.max_new_tokens=8",
        )
    )
    for step, folder in checkpoints(result.path).items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode("abc def.")) == "abc def."
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert isinstance(model, LlamaForCausalLM)
        assert "lm_head.weight" not in weights(folder)
        stored = json.loads((result.path / "evaluations" / f"step_{step}" / "held_out.json").read_text())
        assert stored["loss"] > 0
    sample = json.loads((result.path / "evaluations" / "step_6" / "sample.json").read_text())
    assert sample["text"].startswith("def ")


def test_the_held_out_loss_is_that_of_transformers(tiny: Tiny) -> None:
    overrides = ("checkpointing.learning_dynamics.probe_windows=8", "training.max_steps=2")
    [result] = pico_train.train(tiny(*overrides))
    loss, _, _ = rederived(checkpoints(result.path)[2], "val")  # the probe: the same 8 windows
    assert result.val_loss == pytest.approx(loss, rel=1e-6)
    [other] = pico_train.train(tiny(*overrides, "checkpointing.run_name=b", "evaluation.held_out.batch_size=3"))
    assert other.val_loss == pytest.approx(result.val_loss, rel=1e-6)


def test_the_probe_is_the_same_for_all_seeds_and_sizes(tiny: Tiny) -> None:
    hashes = set()
    for name, *overrides in (("a", "seeds.data=1"), ("b", "seeds.weights=1"), ("c", "model.d_model=32")):
        [result] = pico_train.train(tiny(f"checkpointing.run_name={name}", "training.max_steps=1", *overrides))
        for folder in checkpoints(result.path).values():
            manifest = read_manifest(folder)
            [row] = [r for r in manifest.tensors if (r.kind, r.split, r.module) == ("batch", "val", "input_ids")]
            hashes |= {manifest.probe_hash, row.sha256}
    assert len(hashes) == 1


def test_tensor_rows_say_what_is_in_the_files(tiny: Tiny) -> None:
    [result] = pico_train.train(tiny("training.max_steps=2"))
    folder = checkpoints(result.path)[2]
    manifest = read_manifest(folder)
    found = {
        (str(path.relative_to(folder)), key): tensor
        for path in folder.rglob("*.safetensors")
        for key, tensor in load_file(path).items()
    }
    assert {(row.file, row.key) for row in manifest.tensors} == found.keys()
    for row in manifest.tensors:
        assert row.shape == list(found[row.file, row.key].shape)
    assert {(row.kind, row.role) for row in manifest.tensors if row.module == "layers.1.attention.v_proj"} == {
        ("weights", "v"),
        ("activations", "v"),
        ("gradients", "v"),
        ("optimizer", "exp_avg"),
        ("optimizer", "exp_avg_sq"),
        ("optimizer", "step"),
    }
    assert manifest.tokens == 2 * 8 * 16
    assert manifest.parent is not None
    assert manifest.parent.step == 1


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of pass 3 infinite."""
    import pico_train.run

    plain = pico_train.run.next_token

    def objective(model: nn.Module, batch: object, step: int) -> torch.Tensor:
        loss = plain(model, batch, step)  # type: ignore[arg-type]
        return loss * float("inf") if step == 3 else loss

    monkeypatch.setattr(pico_train.run, "next_token", objective)


@pytest.mark.usefixtures("poisoned")
def test_a_loss_that_is_not_finite_stops_before_anything_is_saved(tiny: Tiny) -> None:
    config = tiny("checkpointing.save_every_n_steps=1")
    with pytest.raises(
        NonFiniteError, match=r"pass 3: the loss is inf in micro-batch 0 of 2 and the gradient of embedding_proj.*lr"
    ):
        pico_train.train(config)
    run = Path(config.checkpointing.runs_dir) / "tiny"
    assert list(checkpoints(run)) == [0, 1, 2]
    assert read_rows(run / "metrics.jsonl")[-1]["step"] == 2


@pytest.mark.usefixtures("poisoned")
def test_under_skip_the_pass_counts_and_the_update_does_not(tiny: Tiny) -> None:
    config = tiny("checkpointing.save_every_n_steps=1", "training.non_finite=skip", "training.max_skips=1")
    [result] = pico_train.train(config)
    folders = checkpoints(result.path)
    assert same(weights(folders[3]), weights(folders[4]))
    assert not same(weights(folders[4]), weights(folders[5]))
    assert [read_manifest(folders[step]).skipped_updates for step in (2, 3, 4, 6)] == [0, 0, 1, 1]
    assert [row["updated"] for row in read_rows(result.path / "metrics.jsonl")] == [True] * 3 + [False] + [True] * 2 + [
        False
    ]
    assert read_rows(result.path / "metrics.jsonl")[3]["loss"] is None


def test_restart_points_come_by_steps_and_only_the_newest_are_kept(tiny: Tiny) -> None:
    section = "checkpointing.restart"
    config = tiny(
        f"{section}.every_n_steps=1", f"{section}.keep=2", "checkpointing.save_every_n_steps=0", "training.max_steps=12"
    )
    [result] = pico_train.train(config)
    assert list(checkpoints(result.path)) == [0, 1, 2, 12]
    assert list(step_folders(result.path / "restart")) == [10, 11]  # 0, 1 and 2 are milestones
    manifest = read_manifest(result.path / "restart" / "step_11")
    assert {row.kind for row in manifest.tensors} == {"weights", "optimizer"}
    assert manifest.capture is None


def test_a_run_goes_on_from_a_restart_point(tiny: Tiny, stop_at: Callable[[int | None], None]) -> None:
    overrides = ("checkpointing.save_every_n_steps=0", "training.max_steps=9", "checkpointing.optimizer_state=restart")
    [whole] = pico_train.train(tiny("checkpointing.run_name=whole", *overrides))
    assert "training_state/optimizer.safetensors" not in {
        row.path for row in read_manifest(checkpoints(whole.path)[9]).files
    }
    config = tiny("checkpointing.run_name=stopped", *overrides, "checkpointing.restart.every_n_steps=5")
    stop_at(7)
    with pytest.raises(KeyboardInterrupt):
        pico_train.train(config)
    stop_at(None)
    [stopped] = pico_train.train(config)
    assert rows_without_timings(stopped.path) == rows_without_timings(whole.path)
    for step, folder in checkpoints(whole.path).items():
        assert same(weights(folder), weights(checkpoints(stopped.path)[step]))


def test_a_signal_stops_after_the_pass_with_a_restart_point(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    [whole] = pico_train.train(tiny("checkpointing.run_name=whole"))
    append = MetricsLog.append

    def append_and_signal(self: MetricsLog, row: Row) -> None:
        append(self, row)
        if row.step == 3:
            for _ in range(2):  # a second one changes nothing
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLog, "append", append_and_signal)
    config = tiny()
    with pytest.raises(Stopped, match=r"tiny stopped by SIGTERM at step 4; the same command goes on there") as caught:
        pico_train.train(config)
    assert caught.value.exit_code == 75
    monkeypatch.undo()
    [stopped] = pico_train.train(config)
    assert rows_without_timings(stopped.path) == rows_without_timings(whole.path)
    assert same(weights(checkpoints(stopped.path)[6]), weights(checkpoints(whole.path)[6]))


def test_a_signal_does_not_wait_for_the_micro_batches_to_come(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass may take longer than a grace time: it is given up, and made again whole by the next start."""
    parts = "training.optimization.gradient_accumulation_steps=4"
    [whole] = pico_train.train(tiny(parts, "checkpointing.run_name=whole"))
    seeds, real = [], loop.pass_seed

    def signalled(dropout_seed: int, step: int, micro: int) -> int:
        seeds.append((step, micro))
        if (step, micro) == (3, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(dropout_seed, step, micro)

    monkeypatch.setattr(loop, "pass_seed", signalled)
    config = tiny(parts)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM at step 3; the same command goes on there"):
        pico_train.train(config)
    assert seeds[-1] == (3, 1)
    assert list(step_folders(Path(config.checkpointing.runs_dir) / "tiny" / "restart")) == [3]
    monkeypatch.undo()
    [stopped] = pico_train.train(config)
    assert rows_without_timings(stopped.path) == rows_without_timings(whole.path)
    assert same(weights(checkpoints(stopped.path)[6]), weights(checkpoints(whole.path)[6]))


def test_a_signal_does_not_wait_for_the_end_of_an_evaluation(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up between two of its batches, nothing of it is stored, and the next start makes it again whole."""
    sample = ("evaluation.metrics=[sample,held_out]", "evaluation.sample.max_new_tokens=2")
    parts = (*sample, "evaluation.held_out.batch_size=2")
    [whole] = pico_train.train(tiny(*parts, "checkpointing.run_name=whole"))
    seen = []

    class Signalled(Batch):
        def split(self, size: int) -> Iterator[Batch]:
            for number, part in enumerate(super().split(size)):
                seen.append(number)
                if len(seen) == 4 * 2 + 2:  # the second batch of the evaluation of step 2, the third
                    os.kill(os.getpid(), signal.SIGTERM)
                yield part

    windows = evaluation.probe
    monkeypatch.setattr(evaluation, "probe", lambda *what: Signalled(**vars(windows(*what))))
    config = tiny(*parts)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM at step 2; the same command goes on there"):
        pico_train.train(config)
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    run = Path(config.checkpointing.runs_dir) / "tiny"
    assert [path.name for path in (run / "evaluations" / "step_2").iterdir()] == ["sample.json"]
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [0, 1]
    monkeypatch.undo()
    [stopped] = pico_train.train(config)
    assert rows_without_timings(stopped.path) == rows_without_timings(whole.path)
    assert same(weights(checkpoints(stopped.path)[6]), weights(checkpoints(whole.path)[6]))


def test_a_signal_does_not_wait_for_the_end_of_the_probe(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = "seeds.dropout=7"  # the probe has no dropout, and always 0
    [whole] = pico_train.train(tiny(seed, "checkpointing.run_name=whole"))
    probed, real = [], loop.pass_seed

    def signalled(dropout_seed: int, step: int, micro: int) -> int:
        if dropout_seed == 0:
            probed.append((step, micro))
            if (step, micro) == (2, 0):
                os.kill(os.getpid(), signal.SIGTERM)
        return real(dropout_seed, step, micro)

    monkeypatch.setattr(loop, "pass_seed", signalled)
    config = tiny(seed)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM at step 2; the same command goes on there"):
        pico_train.train(config)
    assert probed == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    run = Path(config.checkpointing.runs_dir) / "tiny"
    assert (list(checkpoints(run)), list(step_folders(run / "restart"))) == ([0, 1], [2])
    monkeypatch.undo()
    [stopped] = pico_train.train(config)
    assert rows_without_timings(stopped.path) == rows_without_timings(whole.path)
    assert same(weights(checkpoints(stopped.path)[6]), weights(checkpoints(whole.path)[6]))


def test_the_time_limit_stops_like_a_signal(tiny: Tiny) -> None:
    """A limit shorter than the start still lets each start make one pass, so that the same command comes to an end."""
    config = tiny("training.max_minutes=1e-6")
    for step in (1, 2):
        with pytest.raises(Stopped, match=f"the time limit of 1e-06 minutes at step {step}"):
            pico_train.train(config)
        assert list(step_folders(Path(config.checkpointing.runs_dir) / "tiny" / "restart"))[-1] == step
    pico_train.train(tiny())


def test_max_steps_may_grow_where_the_learning_rate_does_not_notice(tiny: Tiny) -> None:
    constant = "training.optimization.lr_scheduler=constant"
    [whole] = pico_train.train(tiny("checkpointing.run_name=whole", constant, "training.max_steps=8"))
    pico_train.train(tiny(constant))
    [longer] = pico_train.train(tiny(constant, "training.max_steps=8"))
    assert same(weights(checkpoints(longer.path)[8]), weights(checkpoints(whole.path)[8]))
    assert rows_without_timings(longer.path)[:-1] == rows_without_timings(whole.path)[:-1]
    with pytest.raises(RunFolderError, match="6 now; the run is at step 8"):
        pico_train.train(tiny(constant, "training.max_steps=6"))


def test_max_steps_may_not_bend_a_curve_that_was_followed(tiny: Tiny) -> None:
    pico_train.train(tiny("training.max_steps=4"))
    with pytest.raises(
        RunFolderError, match=r"max_steps: 4 before, 8 now; under lr_scheduler: cosine update 3, which is made"
    ):
        pico_train.train(tiny("training.max_steps=8"))


@pytest.mark.parametrize(
    ("dropout", "effect"),
    [
        (0.0, "agree with those before up to rounding only"),
        (0.1, "differ from those of the old setting, for each micro-batch draws a dropout of its own"),
    ],
)
def test_what_only_changes_rounding_may_change_with_a_warning(
    tiny: Tiny, stop_at: Callable[[int | None], None], caplog: pytest.LogCaptureFixture, dropout: float, effect: str
) -> None:
    drops = f"model.dropout={dropout}"
    stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        pico_train.train(tiny(drops))
    stop_at(None)
    with caplog.at_level("WARNING", logger="pico_train"):
        pico_train.train(tiny(drops, "training.optimization.gradient_accumulation_steps=4"))
    assert f"from step 2 on the numbers {effect}: micro_batch_size 4 before, 2 now" in caplog.text


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("training.optimization.gradient_accumulation_steps", "auto", "1"),
        ("training.fabric.num_devices", "auto", "1"),
        ("training.fabric.accelerator", "auto", "cpu"),
        ("training.fabric.precision", "auto", "32-true"),
        ("training.fabric.num_threads", "null", str(torch.get_num_threads())),
        ("training.fabric.strategy", "auto", "ddp"),
        ("training.activation_checkpointing", "false", "true"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is something else there")
def test_a_setting_left_open_and_written_out_is_the_same(
    tiny: Tiny,
    stop_at: Callable[[int | None], None],
    caplog: pytest.LogCaptureFixture,
    key: str,
    one: str,
    other: str,
) -> None:
    small = ("model.n_layers=1", "evaluation.metrics=null", "training.max_steps=4")
    for step, value in ((2, one), (3, other), (None, one)):
        stop_at(step)
        with pytest.raises(KeyboardInterrupt) if step else nullcontext():
            pico_train.train(tiny(*small, f"{key}={value}"))
    assert "on the numbers" not in caplog.text


def test_a_precision_that_auto_did_not_come_to_is_refused(tiny: Tiny) -> None:
    constant = "training.optimization.lr_scheduler=constant"
    auto, other = ("bf16-mixed", "32-true") if torch.cuda.is_available() else ("32-true", "bf16-mixed")
    pico_train.train(tiny(constant, "training.max_steps=1", "training.fabric.precision=auto"))
    with pytest.raises(RunFolderError, match=rf'precision: "auto" before, "{other}" now'):
        pico_train.train(tiny(constant, "training.max_steps=2", f"training.fabric.precision={other}"))
    pico_train.train(tiny(constant, "training.max_steps=2", f"training.fabric.precision={auto}"))


def test_weights_that_are_not_finite_are_never_published(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import pico_train.loop

    update = pico_train.loop.update

    def poison(state: TrainState, *rest: object) -> None:
        update(state, *rest)  # type: ignore[arg-type]
        if state.step == 1:
            state.model.output_norm.weight.data[0] = float("nan")

    monkeypatch.setattr(pico_train.loop, "update", poison)
    config = tiny("training.non_finite=skip")
    with pytest.raises(CheckpointError, match="step 2: the weights of output_norm are not finite; nothing was saved"):
        pico_train.train(config)
    assert list(checkpoints(Path(config.checkpointing.runs_dir) / "tiny")) == [0, 1]


def test_a_disk_without_room_is_found_before_step_0(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    config = tiny()
    with pytest.raises(UserError, match=r"needs .* GB more .*checkpointing\.ignore_disk_space=true"):
        pico_train.train(config)
    assert not checkpoints(Path(config.checkpointing.runs_dir) / "tiny")
    pico_train.train(tiny("checkpointing.ignore_disk_space=true"))


def test_a_disk_that_fills_while_training_stops_it_with_all_before_whole(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pico_train.checkpoint.write as write

    save_file, n_calls = write.save_file, 0

    def full(*args: object, **kwargs: object) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls > 20:
            raise OSError(28, "No space left on device")
        save_file(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "save_file", full)
    config = tiny("checkpointing.save_every_n_steps=1")
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        pico_train.train(config)
    monkeypatch.undo()
    run = Path(config.checkpointing.runs_dir) / "tiny"
    assert list(checkpoints(run)) == [0, 1]
    assert not list(run.rglob("*.tmp"))
    [whole] = pico_train.train(tiny("checkpointing.save_every_n_steps=1", "checkpointing.run_name=whole"))
    pico_train.train(config)
    assert same(weights(checkpoints(run)[6]), weights(checkpoints(whole.path)[6]))


def test_gradient_norms_by_layer_and_noise_scale_are_measured_without_a_trace(tiny: Tiny) -> None:
    [plain] = pico_train.train(tiny("model.dropout=0.1"))
    measured = ("monitoring.gradient_norms=layers", "monitoring.gradient_noise_scale=true", "model.dropout=0.1")
    [watched] = pico_train.train(tiny("checkpointing.run_name=watched", *measured))
    assert same(weights(checkpoints(plain.path)[6]), weights(checkpoints(watched.path)[6]))
    for row in read_rows(watched.path / "metrics.jsonl"):
        assert list(row["grad_norms"]) == ["embedding_proj", "layers.0", "layers.1", "output_norm", "de_embedding_proj"]
        assert sum(norm**2 for norm in row["grad_norms"].values()) == pytest.approx(row["grad_norm"] ** 2, rel=1e-5)
    assert any(row["noise_scale"] for row in read_rows(watched.path / "metrics.jsonl"))


def test_the_noise_scale_is_that_of_the_stored_batch(tiny: Tiny) -> None:
    [result] = pico_train.train(tiny("monitoring.gradient_noise_scale=true", "training.max_steps=2"))
    folder = checkpoints(result.path)[2]
    ids = load_file(folder / "learning_dynamics" / "train_batch.safetensors")["input_ids"].long()
    squared = {}
    for name, part in (("a", ids[:4]), ("b", ids[4:]), ("whole", ids)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        logits = model(part[:, :-1]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
        squared[name] = sum(p.grad.double().square().sum().item() for p in model.parameters())
    small, big = (squared["a"] + squared["b"]) / 2, squared["whole"]
    expected = (small - big) / (1 / 4 - 1 / 8) / ((8 * big - 4 * small) / 4)
    assert read_rows(result.path / "metrics.jsonl")[2]["noise_scale"] == pytest.approx(expected, rel=1e-4)


def test_a_folder_that_cannot_be_written_is_named(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match=r"file/tiny cannot be written: Not a directory; .*runs_dir"):
        pico_train.train(tiny(f"checkpointing.runs_dir={tmp_path / 'file'}"))


def test_what_a_kill_at_the_very_first_start_leaves_is_no_obstacle(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "run.json.tmp").write_text("dat")
    assert pico_train.train(tiny("training.max_steps=1"))


def test_a_cache_that_is_rebuilt_from_other_text_is_refused(
    tiny: Tiny, tmp_path: Path, text_file: Path, stop_at: Callable[[int | None], None]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text(text_file.read_text())
    config = tiny(f"data.dataset.path={text}", f"data.cache_dir={tmp_path / 'cache'}")
    stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        pico_train.train(config)
    stop_at(None)
    text.write_text(text_file.read_text() + "And one sentence more.")
    with pytest.raises(RunFolderError, match="was trained on other data"):
        pico_train.train(config)
    text.write_text(text_file.read_text())
    shutil.rmtree(tmp_path / "cache")  # it is built again, to the same content
    pico_train.train(config)


@pytest.mark.parametrize(("sealed", "fault"), [(False, "is not what was written"), (True, "step_4 holds step 400")])
def test_a_manifest_edited_by_hand_is_never_trusted(
    sealed: bool, fault: str, tiny: Tiny, stop_at: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny()
    stop_at(5)
    with pytest.raises(KeyboardInterrupt):
        pico_train.train(config)
    stop_at(None)
    run = Path(config.checkpointing.runs_dir) / "tiny"
    path = checkpoints(run)[4] / "manifest.json"
    manifest = json.loads(path.read_text())
    edited = manifest | {"step": 400}
    path.write_text(json.dumps(edited | {"sha256": seal(edited)} if sealed else edited))
    pico_train.train(config)
    assert fault in caplog.text
    assert list(checkpoints(run)) == [0, 1, 2, 4, 6]
    assert read_manifest(checkpoints(run)[4]).step == 4


def test_a_first_start_that_failed_does_not_stand_in_the_way(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        pico_train.train(tiny("data.dataset.path=nowhere.txt"))
    assert pico_train.train(tiny("training.max_steps=1"))


def test_a_second_process_is_refused_and_named(tiny: Tiny) -> None:
    config = tiny("training.max_steps=1")
    pico_train.train(config)
    run = Path(config.checkpointing.runs_dir) / "tiny"
    with locked(run), pytest.raises(RunFolderError, match=rf"in use by process {os.getpid()} on "):
        pico_train.train(config)
    pico_train.train(config)


def test_a_checkpoint_of_another_run_is_refused(tiny: Tiny) -> None:
    constant = "training.optimization.lr_scheduler=constant"
    [other] = pico_train.train(
        tiny("checkpointing.run_name=other", "seeds.weights=1", constant, "training.max_steps=8")
    )
    [mine] = pico_train.train(tiny(constant))
    shutil.copytree(checkpoints(other.path)[8], mine.path / "checkpoints" / "step_8")
    with pytest.raises(RunFolderError, match=r"step_8 belongs to another run \(other, id "):
        pico_train.train(tiny(constant, "training.max_steps=10"))
    assert read_manifest(mine.path / "checkpoints" / "step_8").run.name == "other"


def test_missing_rows_of_the_log_are_noticed(tiny: Tiny) -> None:
    constant = "training.optimization.lr_scheduler=constant"
    [result] = pico_train.train(tiny(constant))
    log = result.path / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    assert "has not one row per pass: 3 rows, the last of step 2" in verify_run(result.path)[1][0]
    with pytest.raises(UserError, match="ends at step 2 although the run stands at step 6: rows are missing"):
        pico_train.train(tiny(constant, "training.max_steps=8"))


def test_a_damaged_restart_point_is_found(tiny: Tiny) -> None:
    [result] = pico_train.train(tiny("checkpointing.restart.every_n_steps=5"))
    assert verify_run(result.path)[1] == []
    weights = result.path / "restart" / "step_5" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    [fault] = verify_run(result.path)[1]
    assert fault.startswith(f"{weights} is not what was written")


def test_a_config_of_somebody_else_is_left_alone(tiny: Tiny) -> None:
    folder = Path(tiny().checkpointing.runs_dir) / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("precious: true\n")
    with pytest.raises(RunFolderError, match=r"holds no run: it has no run\.json, but config\.yaml"):
        pico_train.train(tiny())
    assert (folder / "config.yaml").read_text() == "precious: true\n"


def test_finished_means_that_the_last_checkpoint_is_there(tiny: Tiny) -> None:
    [result] = pico_train.train(tiny())
    before = weights(checkpoints(result.path)[6])
    shutil.rmtree(checkpoints(result.path)[6])
    pico_train.train(tiny())
    assert same(weights(checkpoints(result.path)[6]), before)


def test_a_smaller_probe_than_asked_for_is_said(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="pico_train"):
        pico_train.train(tiny("training.max_steps=1", "checkpointing.learning_dynamics.probe_windows=5000"))
    assert "windows, not the 5000 of checkpointing.learning_dynamics.probe_windows" in caplog.text


def test_text_that_was_changed_is_not_shown_as_what_the_model_saw(tiny: Tiny, tmp_path: Path, text_file: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text(text_file.read_text())
    [result] = pico_train.train(tiny("training.max_steps=1", f"data.dataset.path={text}"))
    assert len(samples_at(result.path, 1)) == 8
    text.write_text(text_file.read_text()[:-100])
    with pytest.raises(RunFolderError, match="was trained on other data"):
        samples_at(result.path, 1)
