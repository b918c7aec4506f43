"""A text and a tiny run over it, for the tests that train."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pico_train.cli import main
from pico_train.config import RunConfig, load_config

TINY_RUN = """
data:
  dataset: {{name: text, path: {text}, document_bytes: 400, held_out_fraction: 0.1}}
  tokenizer: {{name: byte-level-bpe, vocab_size: 300}}
  dataloader: {{batch_size: 8}}
  cache_dir: {cache}
model:
  d_model: 16
  n_layers: 2
  vocab_size: 300
  max_seq_len: 16
  attention_n_heads: 4
  attention_n_kv_heads: 2
  activation_hidden_dim: 32
training:
  max_steps: 6
  optimization: {{lr: 0.01, lr_scheduler: cosine, lr_warmup_steps: 2, gradient_accumulation_steps: 2}}
  fabric: {{accelerator: cpu, precision: 32-true}}
evaluation:
  metrics: [held_out]
  held_out: {{max_windows: 8}}
monitoring: {{logging: {{log_every_n_steps: 2}}}}
checkpointing:
  run_name: tiny
  runs_dir: {runs}
  save_every_n_steps: 2
  schedule: {{log2_until: 2}}
  learning_dynamics: {{eval_data: held_out, probe_windows: 4, batch_size: 2}}
"""


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 24 kB of made-up sentences, the same in every session."""
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefghij", k=words.randint(2, 7))) for _ in range(200)]
    lines = [" ".join(words.choices(vocabulary, k=10)) + "." for _ in range(450)]
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token cache for all tests of a session."""
    return tmp_path_factory.mktemp("token_caches")


@pytest.fixture(scope="session")
def tiny_yaml_in(text_file: Path, cache_dir: Path) -> Callable[[Path], Path]:
    """Writes the YAML of a run of six steps over ``text_file`` into a folder, where it will also be."""

    def write(folder: Path) -> Path:
        path = folder / "tiny.yaml"
        path.write_text(TINY_RUN.format(text=text_file, cache=cache_dir, runs=folder / "runs"), encoding="utf-8")
        return path

    return write


@pytest.fixture
def tiny_yaml(tiny_yaml_in: Callable[[Path], Path], tmp_path: Path) -> Path:
    """That YAML in ``tmp_path``."""
    return tiny_yaml_in(tmp_path)


@pytest.fixture
def pico() -> Callable[..., Result]:
    """``pico("run", path, ...)``: the command as a user types it."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def tiny(tiny_yaml: Path) -> Callable[..., RunConfig]:
    """``tiny("seeds.data=1", ...)``: the tiny run with overrides."""
    return lambda *overrides: load_config(tiny_yaml, overrides)
