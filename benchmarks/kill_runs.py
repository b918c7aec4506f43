"""Kill a hundred trainers and more, start each again, and print what became of the runs: the kill table.

    python benchmarks/kill_runs.py [--kills 100] [--seed 0]

First one run per named moment of ``tests/train/kills.py``, then runs whose starts are killed at random moments, uniform over the length
of a whole run, until there are enough kills. Each run is compared with one that nobody stopped: tensors, files, log, evaluations,
lineage. Exit code 1 if any differs.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "train"))

import kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many at least (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        kills.preload()
        n_kills = n_runs = n_broken = 0
        print("| moment | kills | where the run then stood | result |\n|---|---|---|---|")
        for moment, stood, found in survivals(Path(folder), arguments.seed):
            n_runs, n_kills, n_broken = n_runs + 1, n_kills + len(stood), n_broken + bool(found)
            result = "identical" if not found else f"**differs**: {found[0]}"
            print(f"| {moment} | {len(stood)} | {'; '.join(stood)} | {result} |", flush=True)
            if n_kills >= arguments.kills and moment.startswith("random"):
                break
        seconds = time.perf_counter() - began
        print(
            f"\n{n_kills} kills of {n_runs} runs in {seconds:.0f} s: {n_runs - n_broken} identical, {n_broken} differ"
        )
    sys.exit(n_broken > 0)


def survivals(folder: Path, seed: int) -> Iterator[tuple[str, list[str], list[str]]]:
    """Per run: the moment, where it stood after each kill, and what differs at the end. Without end."""
    whole = kills.History(folder / "whole")
    whole.finish()  # the first start also waits for the imports
    began = time.perf_counter()
    kills.History(folder / "timed").finish()
    whole_s = time.perf_counter() - began
    for number, name in enumerate(kills.MOMENTS):
        killed = kills.History(folder / f"named-{number}")
        yield name, *outcome(whole, killed, kills.plan(name))
    for number in itertools.count():
        killed = kills.History(folder / f"random-{number}")
        yield f"random {number}", *outcome(whole, killed, kills.delays(20, whole_s, seed + number))


def outcome(
    whole: kills.History, killed: kills.History, when: list[kills.Moment] | list[float]
) -> tuple[list[str], list[str]]:
    """Where a run stood after each kill, and what differs at the end."""
    try:
        stood = killed.survive(when)
    except AssertionError as error:
        return ["-"], [str(error).strip().splitlines()[-1]]
    return stood, kills.differences(whole, killed)


if __name__ == "__main__":
    main()
