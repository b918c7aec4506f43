"""Make the golden checkpoint of this format version: run once per version, then never again.

python tests/contract/make_golden.py
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file

import pico_train
from pico_train.checkpoint.format import FORMAT_VERSION

TARGET = Path(__file__).resolve().parent / "golden" / f"v{FORMAT_VERSION}"

CONFIG = """
data:
  dataset: {name: text, path: text, held_out_fraction: 0.1}
  tokenizer: {name: byte-level-bpe, vocab_size: 257}
  dataloader: {batch_size: 2}
model:
  d_model: 4
  n_layers: 1
  vocab_size: 257
  max_seq_len: 8
  attention_n_heads: 2
  attention_n_kv_heads: 1
  activation_hidden_dim: 6
  tie_embeddings: true
training:
  max_steps: 1
  optimization: {lr: 0.01, lr_warmup_steps: 0, gradient_accumulation_steps: 1}
  fabric: {accelerator: cpu}
evaluation: {metrics: [held_out]}
checkpointing:
  run_name: run
  schedule: {first: false}
  learning_dynamics: {eval_data: held_out, rule: sample, tokens_per_sequence: 2, probe_windows: 2}
"""


def main() -> None:
    """Train one step on made-up text in a folder of its own, and keep the run with the sums of its tensors."""
    TARGET.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("text").mkdir()
        for number in range(40):
            text = f"Document {number} says {number * 7} and no more, but it says so {number % 5} times.\n"
            Path("text", f"{number}.txt").write_text(text, encoding="utf-8")
        Path("golden.yaml").write_text(CONFIG, encoding="utf-8")
        [result] = pico_train.train("golden.yaml")
        shutil.copytree(result.path, TARGET / "run")
    folders = (TARGET / "run" / "checkpoints").iterdir()
    sums = {
        f"{path.relative_to(step).as_posix()}:{key}": tensor.double().sum().item()
        for step in folders
        for path in sorted(step.rglob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }
    expected = {"steps": [1], "sums": sums}
    (TARGET / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
