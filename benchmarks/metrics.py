"""How fast the metrics are, beside the plain way of computing the same numbers, and how far from float64.

    OMP_NUM_THREADS=1 python benchmarks/metrics.py [--sizes tiny small medium large] [--groups weights gini ...]

Synthetic tensors of the four published shapes (12 heads, 4 kv heads; d_model 96, 384, 768, 1536; feed-forward 4 d_model), so
nothing is read. A group is a number of metrics of one layer; ours is what an analysis calls, its yardstick the plain way:

    weights        PER, condition number, nuclear norm of swiglu.w_2     three dense float32 SVDs of the same matrix
    ov             the same of the OV circuits, 12 heads and all          three dense float32 SVDs of each
    ov_gradients   the same of O dV + dO V                               three dense float32 SVDs of each
    ov_cka         plug-in CKA of the OV activations of a step with      dense activations compared in feature space, float32
                   those of another, whose matrices are kept
    gini           Gini coefficient of swiglu.w_2                        a float32 torch sort with index arithmetic

Both run in turn, on one thread; the table has the median of the processor time of each, times the number of layers, and the
largest relative error of ours against the same definition in float64 on dense matrices, which takes as long as the yardstick.
A line takes minutes at large, so with --quick the yardstick is timed once and on a part: one of the three SVDs, of one of the
heads and of all side by side, counted as often as they are many; and one of the heads is checked, with all side by side.
Peak memory is that of a fresh process that runs ours alone, Python and torch included.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import scipy.linalg
import torch
from torch import Tensor

from pico_analyze.components.circuits import OVCircuit
from pico_analyze.components.matrix import Matrix
from pico_analyze.metrics import METRICS

SIZES = {"tiny": 96, "small": 384, "medium": 768, "large": 1536}
N_LAYERS, H, K = 12, 12, 4
SPECTRAL = (("per", {}), ("condition_number", {}), ("norm", {"norm_type": "nuclear"}))

Values = list[float]


@dataclass(frozen=True)
class Group:
    """A line of the table: three ways to the same numbers, and how many times faster ours has to be at large.

    ``plain`` is in parts, each with how often it counts. ``exact`` has None for what is not checked.
    """

    ours: Callable[[], Values]
    plain: list[tuple[int, Callable[[], object]]]
    exact: Callable[[], list[float | None]]
    target: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = ["weights", "ov", "ov_gradients", "ov_cka", "gini"]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--samples", type=int, default=1024, help="rows of the activations (default: 1024)")
    parser.add_argument("--repeats", type=int, default=3, help="of each way (default: 3)")
    parser.add_argument("--quick", action="store_true", help="time and check a part of the yardstick, once")
    parser.add_argument(
        "--ours-only", action="store_true", help="print the peak memory of ours in MiB, and nothing else"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.ours_only:
        for size in arguments.sizes:
            for group in layer(SIZES[size], arguments.groups, arguments.samples, quick=True).values():
                group.ours()
        print(peak_mib())
        return
    print("| size | group | ours, s | plain, s | times faster | needed at large | largest relative error | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        for name, group in layer(SIZES[size], arguments.groups, arguments.samples, arguments.quick).items():
            ours, plain = [], []
            group.ours()  # the first call of all loads libraries
            for repeat in range(arguments.repeats):
                ours.append(seconds(group.ours))
                if repeat == 0 or not arguments.quick:
                    plain.append(sum(times * seconds(part) for times, part in group.plain))
            fast, slow = (N_LAYERS * statistics.median(times) for times in (ours, plain))
            pairs = zip(group.ours(), group.exact(), strict=True)
            error = max(abs(a / b - 1) for a, b in pairs if b is not None)
            alone = [sys.executable, __file__, "--ours-only", "--sizes", size, "--groups", name]
            alone += ["--samples", str(arguments.samples)]
            memory = subprocess.run(alone, capture_output=True, text=True, check=True).stdout.strip()
            print(
                f"| {size} | {name} | {fast:.3f} | {slow:.2f} | {slow / fast:.1f} | {group.target} | {error:.0e} | {memory} |",
                flush=True,
            )


def peak_mib() -> int:
    """The most that this process has held (Linux); the kernel's ru_maxrss would count what its parent held too."""
    [size] = [
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")
    ]
    return int(size) // 1024


def seconds(work: Callable[[], object]) -> float:
    """Processor time, which on one thread is the time that an idle core would take."""
    began = time.process_time()
    work()
    return time.process_time() - began


def layer(d: int, groups: list[str], samples: int, quick: bool = False) -> dict[str, Group]:
    """The groups asked for, on the tensors of one layer of width d."""
    random = torch.Generator().manual_seed(d)
    made = {
        "weights": lambda: of_weights(weight(d, 4 * d, random)),
        "ov": lambda: of_circuits("weights", [weight(d // H * K, d, random), weight(d, d, random)], quick),
        "ov_gradients": lambda: of_circuits(
            "gradients",
            [make(rows, d, random) for make in (weight, gradient) for rows in (d // H * K, d)],
            quick,
        ),
        "ov_cka": lambda: of_activations(d, samples, random),
        "gini": lambda: of_entries(weight(d, 4 * d, random)),
    }
    return {name: make() for name, make in made.items() if name in groups}


# ---- tensors that look like those of a trained model


def power_law(rows: int, columns: int, rank: int, decay: float, random: torch.Generator) -> Tensor:
    """Low rank, singular values about k^-decay."""
    scales = torch.arange(1, rank + 1) ** -decay
    left = torch.randn(rows, rank, generator=random) / math.sqrt(rows)
    return (left * scales) @ torch.randn(rank, columns, generator=random) / math.sqrt(columns)


def weight(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """A uniform initialisation, and what training added to it."""
    bound = 1 / math.sqrt(columns)
    start = bound * (2 * torch.rand(rows, columns, generator=random) - 1)
    return start + power_law(rows, columns, max(8, rows // 4), 0.7, random)


def gradient(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """A few strong directions above a floor of noise."""
    noise = torch.randn(rows, columns, generator=random) / math.sqrt(columns)
    return 1e-2 * power_law(rows, columns, min(256, rows), 1.0, random) + 1e-6 * noise


def activations(d: int, samples: int, random: torch.Generator) -> Tensor:
    """Values of the kv heads, (n, K E): features of unequal variance about a common mean."""
    hidden = torch.randn(samples, d, generator=random) * torch.arange(1, d + 1) ** -0.4
    return (hidden + 0.05 * torch.randn(1, d, generator=random)) @ weight(d // H * K, d, random).T


# ---- the groups


def spectral(matrix: Matrix) -> Values:
    """The three numbers of one spectrum."""
    return [METRICS[name].compute(matrix, **parameters) for name, parameters in SPECTRAL]


def spectral_exact(x: Tensor, n_values: int) -> Values:
    """By float64 LAPACK on the dense matrix, without the structural zeros."""
    sigma = torch.from_numpy(scipy.linalg.svdvals(x.double().numpy(), check_finite=False))[:n_values]
    p = sigma / sigma.sum()
    return [float(torch.special.entr(p).sum().exp()) / n_values, float(sigma[0] / sigma[-1]), float(sigma.sum())]


def three_svds(matrices: list[Tensor]) -> None:
    """One dense float32 SVD per metric."""
    for x in matrices:
        for _ in SPECTRAL:
            torch.linalg.svdvals(x)


def of_weights(w: Tensor) -> Group:
    return Group(
        ours=lambda: spectral(Matrix.dense(w)),
        plain=[(1, lambda: three_svds([w]))],
        exact=lambda: list(spectral_exact(w, min(w.shape))),
        target=20,
    )


def dense_circuits(parts: list[Tensor]) -> list[Tensor]:
    """O_h V_k, or O_h dV_k + dO_h V_k, of each head and, last, side by side, multiplied out."""

    def heads(v: Tensor, o: Tensor) -> list[Tensor]:
        values = v.chunk(K, dim=0)
        return [o_h @ values[h * K // H] for h, o_h in enumerate(o.chunk(H, dim=1))]

    each = heads(*parts[:2])
    if len(parts) == 4:
        v, o, dv, do = parts
        each = [a + b for a, b in zip(heads(dv, o), heads(v, do), strict=True)]
    return [*each, torch.cat(each, dim=1)]


def of_circuits(kind: str, parts: list[Tensor], quick: bool) -> Group:
    component = OVCircuit(kind, None, "all", None)
    d, n_values = parts[1].shape[0], parts[1].shape[0] // H * (len(parts) // 2)

    def exact() -> list[float | None]:
        *heads, side_by_side = dense_circuits([part.double() for part in parts])
        checked = heads[:1] if quick else heads
        found: list[float | None] = [value for x in checked for value in spectral_exact(x, n_values)]
        found += [None] * (len(SPECTRAL) * (len(heads) - len(checked)))
        return [*found, *spectral_exact(side_by_side, d)]

    dense = cache(lambda: dense_circuits(parts))
    every: list[tuple[int, Callable[[], object]]] = [(1, lambda: three_svds(dense_circuits(parts)))]
    some: list[tuple[int, Callable[[], object]]] = [
        (1, dense),
        (len(SPECTRAL) * H, lambda: torch.linalg.svdvals(dense()[0])),
        (len(SPECTRAL), lambda: torch.linalg.svdvals(dense()[-1])),
    ]
    return Group(
        ours=lambda: [value for matrix in component.matrices(parts, H, K) for value in spectral(matrix)],
        plain=some if quick else every,
        exact=exact,
        target=140 if kind == "gradients" else 70,
    )


def of_activations(d: int, samples: int, random: torch.Generator) -> Group:
    steps = [[activations(d, samples, random), weight(d, d, random)] for _ in range(2)]
    component = OVCircuit("activations", "val", "all", None)
    reference = list(component.matrices(steps[1], H, K))  # kept from one checkpoint to the next, as in an analysis

    def ours() -> Values:
        pairs = zip(component.matrices(steps[0], H, K), reference, strict=True)
        return [METRICS["cka"].compute(x, y, estimator="plug_in") for x, y in pairs]

    def dense(dtype: torch.dtype) -> Values:
        """CKA in feature space: |x^T y|^2 of each pair of heads; all of them together are that of the heads side by side."""
        sides = []
        for x, o in steps:
            values = x.to(dtype).chunk(K, dim=1)
            rows = torch.cat([values[h * K // H] @ o_h.T for h, o_h in enumerate(o.to(dtype).chunk(H, dim=1))], dim=1)
            sides.append((rows - rows.mean(0)).chunk(H, dim=1))

        def squares(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
            return torch.tensor([[float((s.T @ t).square().sum()) for t in b] for s in a], dtype=torch.float64)

        xy, xx, yy = squares(*sides), squares(sides[0], sides[0]), squares(sides[1], sides[1])
        heads = xy.diagonal() / (xx.diagonal() * yy.diagonal()).sqrt()
        return [*heads.tolist(), float(xy.sum() / (xx.sum() * yy.sum()).sqrt())]

    plain = [(1, lambda: dense(torch.float32))]
    return Group(ours=ours, plain=plain, exact=lambda: list(dense(torch.float64)), target=80)


def of_entries(w: Tensor) -> Group:
    def by_index(dtype: torch.dtype) -> Values:
        a = w.to(dtype).flatten().abs().sort().values
        n = a.numel()
        i = torch.arange(1, n + 1, dtype=dtype)
        return [float(((2 * i - n - 1) * a).sum() / (n * a.sum()))]

    return Group(
        ours=lambda: [METRICS["gini"].compute(Matrix.dense(w))],
        plain=[(1, lambda: by_index(torch.float32))],
        exact=lambda: list(by_index(torch.float64)),
        target=10,
    )


if __name__ == "__main__":
    main()
