"""What pico-train writes, pico-analyze reads: the same models, the same hashes, the same numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pico_analyze
import pico_train
from pico_analyze.checkpoint import format as read_side
from pico_train.checkpoint import format as write_side
from pico_train.checkpoint.verify import verify_run
from pico_train.suite import load

GOLDEN = Path(__file__).parent / "golden"


def test_both_sides_have_the_same_models() -> None:
    assert read_side.Manifest.model_json_schema() == write_side.Manifest.model_json_schema()
    assert (read_side.FORMAT, read_side.FORMAT_VERSION) == (write_side.FORMAT, write_side.FORMAT_VERSION)
    assert read_side.content_hash("F32", [1, 2], b"12345678") == write_side.content_hash("F32", [1, 2], b"12345678")


def test_the_page_names_every_field_of_the_manifest() -> None:
    page = (Path(__file__).parents[2] / "packages" / "CHECKPOINT_FORMAT.md").read_text(encoding="utf-8")

    def fields(schema: dict[str, object]) -> set[str]:
        definitions = [schema, *schema["$defs"].values()]  # type: ignore[attr-defined]
        return {name for definition in definitions for name in definition["properties"]}

    missing = {name for name in fields(write_side.Manifest.model_json_schema()) if name not in page}
    assert missing == set()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract")
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"Document {number} says {number * 7} and no more. " * 5)
    (folder / "tiny.yaml").write_text(
        json.dumps(
            {
                "data": {
                    "dataset": {"name": "text", "path": str(folder / "text")},
                    "tokenizer": {"name": "byte-level-bpe", "vocab_size": 270},
                    "dataloader": {"batch_size": 4},
                    "cache_dir": str(folder / "cache"),
                },
                "model": {
                    "d_model": 8,
                    "n_layers": 2,
                    "vocab_size": 270,
                    "max_seq_len": 8,
                    "attention_n_heads": 4,
                    "attention_n_kv_heads": 2,
                    "activation_hidden_dim": 12,
                },
                "training": {
                    "max_steps": 3,
                    "optimization": {"gradient_accumulation_steps": 1, "lr_warmup_steps": 0},
                    "fabric": {"accelerator": "cpu"},
                },
                "evaluation": {"metrics": ["held_out"]},
                "checkpointing": {
                    "runs_dir": str(folder / "runs"),
                    "save_every_n_steps": 1,
                    "learning_dynamics": {
                        "eval_data": "held_out",
                        "rule": "sample",
                        "tokens_per_sequence": 2,
                    },
                },
            }
        )
    )
    [result] = pico_train.train(load(folder / "tiny.yaml"))
    return result.path


def test_every_tensor_arrives(run: Path) -> None:
    opened = pico_analyze.open_run(run)
    assert list(opened.steps) == [0, 1, 2, 3]
    for step in opened.steps:
        checkpoint = opened.checkpoint(step)
        rows = checkpoint.select()
        assert {row.kind for row in rows} >= {"weights", "activations", "gradients", "batch"}
        folder = run / "checkpoints" / f"step_{step}"
        for row in rows:
            assert torch.equal(checkpoint.tensor(row), load_file(folder / row.file)[row.key])


def test_the_log_arrives(run: Path) -> None:
    log = pico_analyze.open_run(run).training_log()
    assert list(log["step"]) == [0, 1, 2, 3]
    assert log["val_loss"].notna().all()


def test_the_trail_verifies_until_a_byte_changes(run: Path, tmp_path: Path) -> None:
    assert verify_run(run) == (4, [])
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "checkpoints" / "step_2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    n_checkpoints, [fault] = verify_run(copy)
    assert n_checkpoints == 4
    assert "step_2" in fault
    assert "model.safetensors" in fault


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_checkpoint_of_every_released_version_stays_readable(version: str) -> None:
    """The numbers are those printed when the checkpoint was made."""
    expected = json.loads((GOLDEN / version / "expected.json").read_text())
    run = pico_analyze.open_run(GOLDEN / version / "run")
    assert list(run.steps) == expected["steps"]
    checkpoint = run.checkpoint(expected["steps"][-1])
    for row in checkpoint.select():
        tensor = checkpoint.tensor(row)
        assert tensor.double().sum().item() == pytest.approx(
            expected["sums"][f"{row.file}:{row.key}"], rel=1e-12, abs=1e-12
        )
    assert len(checkpoint.select()) == len(expected["sums"])
    assert verify_run(GOLDEN / version / "run")[1] == []


def test_there_is_a_golden_checkpoint_of_this_version() -> None:
    assert (GOLDEN / f"v{write_side.FORMAT_VERSION}").is_dir()
