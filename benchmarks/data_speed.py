"""Whether data keeps up: tokens/s of building a cache and of reading batches, and the share of training time spent waiting for them.

    python benchmarks/data_speed.py [--megabytes 64] [--steps 12] [--threads 1]

The text is made up. Building trains the tokenizer, encodes and writes; encoding alone is what a second tokenizer-less build costs. Batches
are read in shuffled order from the memory-mapped cache. The shares are those of the trainer itself (data_seconds and seconds of
metrics.jsonl), the median over the passes of two runs: the published tiny decoder, and the one of the demo's kind at a larger width.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import pico_train
from pico_train.config import DataConfig
from pico_train.data.batches import Batches
from pico_train.data.cache import TokenCache, open_cache
from pico_train.metrics_log import read_rows

SHAPES: dict[str, dict[str, int]] = {  # d_model, blocks, heads, kv heads, width, vocabulary, sequence; batch
    "A": {"d": 96, "n": 12, "h": 12, "k": 4, "m": 384, "v": 50304, "t": 512, "b": 2},
    "B": {"d": 256, "n": 6, "h": 8, "k": 4, "m": 1024, "v": 4096, "t": 256, "b": 8},
}


def write_text(path: Path, megabytes: int) -> None:
    """Lines of made-up words, the frequent ones far more frequent than the rest, as in a natural text."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(50_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    with path.open("w", encoding="ascii") as file:
        while file.tell() < megabytes * 1_000_000:
            drawn = rng.choices(words, weights, k=12_000)
            file.writelines(" ".join(drawn[i : i + 12]) + ".\n" for i in range(0, len(drawn), 12))


def data_section(folder: Path, tokenizer: dict[str, Any]) -> dict[str, Any]:
    return {
        "dataset": {"name": "text", "path": str(folder / "text.txt")},
        "tokenizer": tokenizer,
        "cache_dir": str(folder / "cache"),
    }


def build(section: dict[str, Any], label: str) -> TokenCache:
    began = time.perf_counter()
    cache = open_cache(DataConfig(**section), model_vocab_size=50304)
    seconds = time.perf_counter() - began
    tokens = cache.ledger.train.tokens + cache.ledger.held_out.tokens
    size = cache.ledger.train.text_bytes + cache.ledger.held_out.text_bytes
    print(
        f"{label}: {tokens:,} tokens in {seconds:.1f} s = {tokens / seconds / 1e6:.2f}M tokens/s, {size / seconds / 1e6:.1f} MB/s"
    )
    return cache


def read(cache: TokenCache, name: str) -> None:
    """Tokens/s of ``Batches.at`` over 2000 steps."""
    shape = SHAPES[name]
    batches = Batches(cache, batch_size=shape["b"], seq_len=shape["t"], seed=0, shuffle=True)
    began = time.perf_counter()
    for step in range(2000):
        batches.at(step)
    seconds = (time.perf_counter() - began) / 2000
    tokens = shape["b"] * shape["t"]
    print(f"reading batches of {name}: {seconds * 1e6:.0f} us each = {tokens / seconds / 1e6:.1f}M tokens/s")


def waiting(folder: Path, section: dict[str, Any], name: str, steps: int) -> None:
    """The share of a training pass that waits for its batch."""
    shape = SHAPES[name]
    config = {
        "data": section | {"dataloader": {"batch_size": shape["b"]}},
        "model": {
            "d_model": shape["d"],
            "n_layers": shape["n"],
            "attention_n_heads": shape["h"],
            "attention_n_kv_heads": shape["k"],
            "activation_hidden_dim": shape["m"],
            "vocab_size": shape["v"],
            "max_seq_len": shape["t"],
        },
        "training": {
            "max_steps": steps,
            "optimization": {"gradient_accumulation_steps": 1},
            "fabric": {"accelerator": "cpu"},
        },
        "evaluation": {"metrics": None},
        "checkpointing": {
            "run_name": name,
            "runs_dir": str(folder / "runs"),
            "save_every_n_steps": steps,
            "learning_dynamics": {"layer_suffixes": None},
        },
    }
    [result] = pico_train.train(config)
    rows = read_rows(result.path / "metrics.jsonl")[3:-1]
    share = statistics.median(row["data_seconds"] / row["seconds"] for row in rows)
    speed = statistics.median(row["tokens_per_s"] for row in rows)
    print(f"training {name}: {speed:,.0f} tokens/s, {share:.3%} of a pass spent waiting for its batch")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="size of the text (default: 64)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each training run (default: 12)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder / "text.txt", options.megabytes)
        trained = data_section(folder, {"name": "byte-level-bpe", "vocab_size": 4096})
        cache = build(trained, "building, with the tokenizer's training")
        cache = build(data_section(folder, {"name": str(cache.path)}), "building with that tokenizer")
        for name in SHAPES:
            read(cache, name)
        for name in SHAPES:
            waiting(folder, trained, name, options.steps)


if __name__ == "__main__":
    main()
