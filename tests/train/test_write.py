import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pico_train.checkpoint import write
from pico_train.checkpoint.format import (
    CheckpointError,
    DataIdentity,
    MadeBy,
    Manifest,
    ModelShape,
    RunIdentity,
    Seeds,
    read_manifest,
    seal,
    step_folders,
)
from pico_train.checkpoint.write import StoredTensor, write_checkpoint

MANIFEST = Manifest(
    run=RunIdentity(id="0" * 32, name="r", suite=None, config_hash="0" * 64),
    made_by=MadeBy(
        command=[],
        versions={},
        git_commit=None,
        device="cpu",
        precision="32-true",
        n_threads=1,
        created_at="",
    ),
    step=3,
    tokens=48,
    skipped_updates=0,
    seeds=Seeds(weights=0, data=0, dropout=0),
    data=DataIdentity(fingerprint="f", order_version=1, tokenizer_hash="t"),
    probe_hash=None,
    model=ModelShape(
        family="pico_decoder",
        d_model=2,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=2,
        hidden_dim=4,
        vocab_size=5,
        seq_len=8,
        tied_embeddings=False,
        n_parameters=1,
        n_parameters_without_embeddings=1,
    ),
    capture=None,
    parent=None,
    tensors=[],
    files=[],
)


def stored(value: torch.Tensor) -> StoredTensor:
    return StoredTensor(value, "weights", None, 0, "layers.0.m", "q", "model.safetensors", "k")


def publish(folder: Path, value: float = 1.0) -> Manifest:
    return write_checkpoint(
        folder, MANIFEST, [stored(torch.full((2, 3), value))], {"config.json": b"{}"}, ["empty.safetensors"]
    )


def test_a_published_checkpoint_reads_back(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    manifest = publish(folder)
    assert read_manifest(folder) == manifest
    assert [row.path for row in manifest.files] == ["config.json", "empty.safetensors", "model.safetensors"]
    assert load_file(folder / "empty.safetensors") == {}
    assert torch.equal(load_file(folder / "model.safetensors")["k"], torch.ones(2, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3"]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor([1.0, 2.0]), b"F32:2:\x00\x00\x80\x3f\x00\x00\x00\x40"),
        (torch.tensor([[7], [256]], dtype=torch.int32), b"I32:2,1:\x07\x00\x00\x00\x00\x01\x00\x00"),
        (torch.tensor(-1, dtype=torch.int64), b"I64::" + b"\xff" * 8),
        (torch.tensor([1.0], dtype=torch.bfloat16), b"BF16:1:\x80\x3f"),
    ],
)
def test_content_hash_is_what_the_format_says(tensor: torch.Tensor, text: bytes) -> None:
    assert stored(tensor).row().sha256 == hashlib.sha256(text).hexdigest()


def test_content_hash_sees_dtype_and_shape_but_not_strides() -> None:
    x = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert stored(x.T.contiguous().T).row() == stored(x).row()
    assert stored(x.view(3, 2)).row().sha256 != stored(x).row().sha256
    assert stored(x.to(torch.bfloat16)).row().dtype == "BF16"


def test_a_valid_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    first = publish(folder, 1.0)
    assert publish(folder, 2.0) == first
    assert load_file(folder / "model.safetensors")["k"][0, 0] == 1.0


def test_an_unfinished_folder_is_set_aside_not_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    folder.mkdir()
    (folder / "precious").write_text("x")
    publish(folder)
    assert (tmp_path / "step_3.damaged" / "precious").exists()
    assert list(step_folders(tmp_path)) == [3]


def test_leftover_staging_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step_3.tmp").mkdir()
    (tmp_path / "step_3.tmp" / "old").write_text("x")
    publish(tmp_path / "step_3")
    assert not (tmp_path / "step_3" / "old").exists()


def test_a_failing_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "step_2")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "save_file", full)
    with pytest.raises(CheckpointError, match=r"step_3 could not be written: No space left on device.*untouched"):
        publish(tmp_path / "step_3")
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    read_manifest(tmp_path / "step_2")


@pytest.mark.parametrize("moment", ["save_file", "_file_row", "manifest_text", "flush"])
def test_killed_while_writing_there_is_no_checkpoint(tmp_path: Path, moment: str) -> None:
    script = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_write
from pico_train.checkpoint import write
real = write.{moment}
def killed(*a, **k):
    real(*a, **k)
    os.kill(os.getpid(), 9)
write.{moment} = killed
test_write.publish(Path({str(tmp_path)!r}) / "step_3")
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -9
    assert not (tmp_path / "step_3").exists()
    publish(tmp_path / "step_3")
    read_manifest(tmp_path / "step_3")


def test_steps_are_numbers(tmp_path: Path) -> None:
    for name in (
        "step_50",
        "step_9000",
        "step_10000",
        "step_12.tmp",
        "step_final",
        "latest",
        "step_007",
        "step_0",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_1").write_text("a file")
    assert list(step_folders(tmp_path)) == [0, 50, 9000, 10000]


def test_manifest_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    publish(folder)
    path = folder / "manifest.json"
    good = json.loads(path.read_text())

    def message(content: object) -> str:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(CheckpointError) as caught:
            read_manifest(folder)
        return str(caught.value)

    assert "cannot be read" in message("{")
    assert "not a manifest" in message([])
    assert "version '2.0'" in message(good | {"format_version": "2.0"})
    assert "step" in message({key: value for key, value in good.items() if key != "step"})
    flipped = json.loads(json.dumps(good).replace("pico-train", "pico-trbin"))
    assert flipped != good
    assert "not what was written" in message(flipped)
    assert "not what was written" in message({key: value for key, value in good.items() if key != "sha256"})
    outside = good | {"files": [good["files"][0] | {"path": "../other"}]}
    assert "outside its own folder" in message(outside | {"sha256": seal(outside)})
    newer = good | {"format_version": "1.7", "new_field": 1}
    path.write_text(json.dumps(newer | {"sha256": seal(newer)}))
    assert read_manifest(folder).step == 3
    os.truncate(folder / "model.safetensors", 10)
    assert "has 10 bytes" in message(good)
    (folder / "model.safetensors").unlink()
    assert "is missing" in message(good)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        read_manifest(folder)
