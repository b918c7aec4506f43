"""What looking costs: passes that save against passes that do not, in one run, and memory while writing.

    python benchmarks/save_cost.py [--steps 48] [--threads 1]

Trains a decoder of 7M parameters (2,048 tokens a step) on made-up text, saving every 8th pass, once with capture and probe, once
with capture alone and once with neither. Every pass is timed by the trainer itself (metrics.jsonl); what is printed are medians
over the passes of one kind.
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch

import pico_train
from pico_train.metrics_log import read_rows

CONFIG = {
    "model": {
        "d_model": 256,
        "n_layers": 6,
        "vocab_size": 4096,
        "max_seq_len": 256,
        "attention_n_heads": 8,
        "attention_n_kv_heads": 4,
        "activation_hidden_dim": 1024,
    },
    "evaluation": {"metrics": None},
}
KINDS = {
    "no capture": {"layer_suffixes": None},
    "capture": {"eval_data": None},
    "capture and probe": {"eval_data": "held_out", "probe_windows": 8, "batch_size": 8},
}


def run(folder: Path, name: str, learning_dynamics: dict[str, object], steps: int) -> list[dict[str, float]]:
    """The rows of one run."""
    data = {
        "dataset": {"name": "text", "path": str(folder / "text.txt")},
        "tokenizer": {"name": "byte-level-bpe", "vocab_size": 4096},
        "dataloader": {"batch_size": 8},
        "cache_dir": str(folder / "cache"),
    }
    training = {
        "max_steps": steps,
        "optimization": {"gradient_accumulation_steps": 1},
        "fabric": {"accelerator": "cpu"},
    }
    checkpointing = {
        "run_name": name.replace(" ", "-"),
        "runs_dir": str(folder / "runs"),
        "save_every_n_steps": 8,
        "learning_dynamics": learning_dynamics,
    }
    config = CONFIG | {"data": data, "training": training, "checkpointing": checkpointing}
    [result] = pico_train.train(config)
    return read_rows(result.path / "metrics.jsonl")[4:-1]  # without warming up, and without the pass that only looks


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=words.randint(2, 9))) for _ in range(5000)]
    print(f"{'':20}{'plain pass':>12}{'saving pass':>13}{'save itself':>13}{'saves cost':>12}{'peak memory':>13}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text("\n".join(" ".join(words.choices(vocabulary, k=12)) for _ in range(40_000)))
        for name, learning_dynamics in KINDS.items():
            rows = run(folder, name, learning_dynamics, options.steps)
            saving = [row for row in rows if row["step"] % 8 == 0]
            plain = [row for row in rows if row["step"] % 8]
            pass_s = statistics.median(row["seconds"] for row in plain)
            saving_s = statistics.median(row["seconds"] for row in saving)
            save_s = statistics.median(row["save_seconds"] for row in saving)
            print(
                f"{name:20}{pass_s * 1e3:9.1f} ms{saving_s * 1e3:10.1f} ms{save_s * 1e3:10.1f} ms"
                f"{saving_s / pass_s - 1:8.2f} steps{rows[-1]['memory_bytes'] / 1e6:10.0f} MB"
            )


if __name__ == "__main__":
    main()
