"""A run under Muon from both sides: what is stored, that it goes on bit for bit, and what the analysis finds."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import pico_analyze
from pico_analyze.plan import AnalysisError
from pico_train.checkpoint.format import read_manifest
from pico_train.cli import main
from pico_train.config import load_config
from pico_train.estimate import estimate
from pico_train.metrics_log import read_rows

MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}
RUN = """
data:
  dataset: {{name: text, path: {folder}/story.txt, document_bytes: 400}}
  tokenizer: {{name: byte-level-bpe, vocab_size: 270}}
  dataloader: {{batch_size: 4}}
  cache_dir: {folder}/cache
model: {{d_model: 64, n_layers: 2, vocab_size: 270, max_seq_len: 8, attention_n_heads: 4, attention_n_kv_heads: 2,
  activation_hidden_dim: 128, dropout: 0.1}}
training:
  max_steps: 4
  optimization: {{optimizer: muon, lr: 0.003, muon: {{lr: 0.01}}, lr_scheduler: constant, lr_warmup_steps: 2,
    gradient_accumulation_steps: 2}}
  fabric: {{accelerator: cpu, precision: 32-true}}
evaluation: {{metrics: [held_out]}}
checkpointing:
  runs_dir: {folder}/runs
  run_name: whole
  save_every_n_steps: 1
  learning_dynamics: {{eval_data: held_out, probe_windows: 2}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon")
    (folder / "story.txt").write_text("".join(f"Sentence {n} says {n * 7} and no more.\n" for n in range(200)))
    (folder / "muon.yaml").write_text(RUN.format(folder=folder))
    assert train(folder).exit_code == 0
    return folder


def train(folder: Path, *overrides: str) -> Result:
    return CliRunner().invoke(main, ["run", str(folder / "muon.yaml"), *overrides])


def test_a_run_that_was_interrupted_ends_where_it_would_have_ended(folder: Path) -> None:
    for steps in (1, 3, 4):
        done = train(folder, "checkpointing.run_name=parts", f"training.max_steps={steps}")
        assert done.exit_code == 0, done.output
    whole, parts = (folder / "runs" / name for name in ("whole", "parts"))
    assert [row["loss"] for row in read_rows(parts / "metrics.jsonl")] == [
        row["loss"] for row in read_rows(whole / "metrics.jsonl")
    ]
    for step in (0, 1, 2, 3, 4):
        manifests = [read_manifest(run / "checkpoints" / f"step_{step}") for run in (whole, parts)]
        hashes = [[(row.module, row.role, row.sha256) for row in manifest.tensors] for manifest in manifests]
        assert hashes[0] == hashes[1]


def test_the_manifest_says_which_moments_there_are(folder: Path) -> None:
    manifest = read_manifest(folder / "runs" / "whole" / "checkpoints" / "step_4")
    roles = {row.module: row.role for row in manifest.tensors if row.kind == "weights"}
    moments: dict[str, set[str | None]] = {}
    for row in manifest.tensors:
        if row.kind == "optimizer":
            moments.setdefault(row.module, set()).add(row.role)
    assert moments.keys() == roles.keys()
    for module, found in moments.items():
        assert found == ({"momentum_buffer"} if roles[module] in MATRICES else {"exp_avg", "exp_avg_sq", "step"})


def test_the_stated_disk_is_what_it_takes(folder: Path) -> None:
    stored = sum(path.stat().st_size for path in (folder / "runs" / "whole").rglob("*.safetensors"))
    assert estimate(load_config(folder / "muon.yaml")).disk_bytes == pytest.approx(stored, rel=0.05)


def look(folder: Path, moment: str) -> pd.DataFrame:
    component = {"component_name": "simple", "data_type": "optimizer", "layer_suffixes": f"swiglu.w_2.{moment}"}
    entry = {"metric_name": "norm", "norm_type": "frobenius", "components": [component | {"layers": "all"}]}
    (folder / "look.yaml").write_text(json.dumps({"analysis_name": "look", "metrics": [entry]}))
    return pico_analyze.analyze([folder / "runs" / "whole"], pico_analyze.load_config(folder / "look.yaml"))


def test_the_analysis_finds_the_moments_by_name(folder: Path) -> None:
    table = look(folder, "momentum_buffer")
    measured = table[(table["step"] == 4) & (table["metric"] == "norm")]
    stored = load_file(
        folder / "runs" / "whole" / "checkpoints" / "step_4" / "training_state" / "optimizer.safetensors"
    )
    assert len(measured) == 2
    for row in measured.itertuples():
        buffer = stored[f"layers.{row.layer}.swiglu.w_2.weight.momentum_buffer"]
        assert row.value == pytest.approx(float(torch.linalg.matrix_norm(buffer.double())), rel=1e-6)
    with pytest.raises(
        AnalysisError,
        match=r"no module ends in 'swiglu.w_2.exp_avg'; optimizer there are of .*swiglu.w_2.momentum_buffer",
    ):
        look(folder, "exp_avg")
