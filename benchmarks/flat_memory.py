"""Whether an analysis of many checkpoints holds one of them at a time.

    OMP_NUM_THREADS=1 python benchmarks/flat_memory.py [--checkpoints 100] [--d-model 256]

Writes a synthetic run into a temporary folder (4 MB a checkpoint at d_model 256), analyses it in this process with entries,
spectra, circuits, compositions and similarities to the first step, and prints the resident memory after each ten
checkpoints. The tail of the table is flat where nothing is kept but the rows of the table and what steps are compared with.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import torch

from pico_analyze import analyze

sys.path.append(str(Path(__file__).parents[1] / "tests" / "analyze"))
from conftest import model_shape, write_run

SIMPLE = {"component_name": "simple", "layer_suffixes": "swiglu.w_2"}
WEIGHTS = [
    SIMPLE | {"data_type": "weights"},
    {"component_name": "ov_circuit", "data_type": "weights"},
    {"component_name": "ov_circuit", "data_type": "gradients"},
]
ACTIVATIONS = [SIMPLE | {"data_type": "activations"}, {"component_name": "ov_circuit", "data_type": "activations"}]
METRICS = [
    {"metric_name": "per", "data_split": "val", "components": WEIGHTS},
    {"metric_name": "gini", "components": WEIGHTS[:1]},
    {"metric_name": "composition_score", "components": [{"component_name": "v_composition", "data_type": "weights"}]},
    {"metric_name": "cka", "data_split": "val", "target_checkpoint": 0, "components": ACTIVATIONS},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--d-model", type=int, default=256, help="a multiple of 4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("pico_analyze").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        steps = tuple(range(arguments.checkpoints))
        run = write_run(Path(folder) / "long", steps=steps, splits=("val",), shape=model_shape(arguments.d_model))
        print("| checkpoints | resident, MiB |")
        print("|---|---|")

        def on_checkpoint(name: str, n_done: int, n_all: int, rows: object) -> None:
            if n_done == 1 or n_done % 10 == 0:
                print(f"| {n_done} | {resident_mib():.0f} |", flush=True)

        analyze(run, {"metrics": METRICS}, on_checkpoint=on_checkpoint)


def resident_mib() -> float:
    """What the process holds in memory now, without the pages of files that are mapped (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [size] = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(size) / 1024


if __name__ == "__main__":
    main()
