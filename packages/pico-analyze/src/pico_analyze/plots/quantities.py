"""What there is to draw: the results table sorted into quantities and series, and their summaries.

A *quantity* is one number that is comparable over steps, layers and sizes: a metric with its parameters, of
one kind of one module. A *series* is one entry of a legend: a run, or the runs of a suite that differ only in
their seeds. Nothing is drawn here.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pico_analyze.plots.comparisons import compared
from pico_analyze.results import ADDED, alike

Horizontal = Literal["step", "tokens"]

PERCENTILES = (10, 25, 50, 75, 90)
MEDIAN = PERCENTILES.index(50)


class PlotError(ValueError):
    """Results that cannot be drawn; the message says what is wrong and what there is."""


@dataclass(frozen=True)
class MetricWords:
    """How a metric is called in a picture; ``limits`` are its bounds, ``log`` asks for a logarithmic axis.

    ``signed`` says that both signs have a meaning and 0 lies between them, always or with that value of a parameter;
    None asks the values. An estimate of what is never negative, as CKA, is not signed, though noise takes it below 0.
    """

    words: str
    unit: str = ""
    limits: tuple[float, float] | None = None
    log: bool = False
    signed: bool | str | None = None


METRICS: dict[str, MetricWords] = {
    "val_loss": MetricWords("validation loss", unit="nats per token"),
    "train_loss": MetricWords("training loss", unit="nats per token"),
    "per": MetricWords("PER", limits=(0.0, 1.0)),
    "condition_number": MetricWords("condition number", log=True),
    "gini": MetricWords("Gini coefficient", limits=(0.0, 1.0)),
    "hoyer": MetricWords("Hoyer sparsity", limits=(0.0, 1.0)),
    "norm": MetricWords("norm"),
    "stable_rank": MetricWords("stable rank"),
    "effective_rank": MetricWords("effective rank"),
    "participation_ratio": MetricWords("participation ratio"),
    "spectral_entropy": MetricWords("spectral entropy", limits=(0.0, 1.0)),
    "alpha": MetricWords("power-law exponent"),
    "kurtosis": MetricWords("excess kurtosis", signed=True),
    "dead_units": MetricWords("share of dead units", limits=(0.0, 1.0)),
    "anisotropy": MetricWords("mean cosine", limits=(-1.0, 1.0), signed=True),
    "intrinsic_dimension": MetricWords("intrinsic dimension"),
    "eigenvalue_positivity": MetricWords("positivity of the eigenvalues", limits=(-1.0, 1.0), signed=True),
    "composition_score": MetricWords("composition score", signed="random"),
    "cka": MetricWords("CKA", limits=(0.0, 1.0)),
    "pwcca": MetricWords("PWCCA", limits=(0.0, 1.0)),
    "mean_cca": MetricWords("mean CCA", limits=(0.0, 1.0)),
    "svcca": MetricWords("SVCCA", limits=(0.0, 1.0)),
    "procrustes": MetricWords("Procrustes similarity", limits=(0.0, 1.0)),
    "rsa": MetricWords("representational similarity", limits=(-1.0, 1.0), signed=True),
    "mutual_knn": MetricWords("mutual nearest neighbours", limits=(0.0, 1.0)),
}
NORMS = {
    "frobenius": "Frobenius norm",
    "nuclear": "nuclear norm",
    "spectral": "spectral norm",
    "inf": "largest absolute entry",
    "inf_operator": "largest absolute row sum",
}
# What a metric is called by the value of one of its parameters.
NAMED_BY_PARAMETER = {
    "norm": NORMS,
    "alpha": {"alpha": "power-law exponent", "ks_distance": "distance of the power-law fit"},
    "composition_score": {"none": "composition score", "random": "composition score above chance"},
}
COMPONENTS = {"ov_circuit": "OV circuit", "qk_circuit": "QK circuit", "full_ov_circuit": "full OV circuit"}
COMPONENTS |= {f"{letter}_composition": f"{letter.upper()}-composition" for letter in "qkv"}
LOSSES = ("val_loss", "train_loss")  # the loss that stands for both comes first

SEEDS = ["weights_seed", "data_seed", "dropout_seed"]
KEYS = ["metric", "parameters", "kind", "component", "module", "split", "reference", "view", "per"]
SETTINGS = {"permutation_null": "null", "bootstrap": "interval"}  # parameters that change no value, in file names


@dataclass(frozen=True)
class Series:
    """A run, or ``n_runs`` runs that differ only in their seeds; ``scale`` in parameters, inf if unknown."""

    label: str
    scale: float
    n_runs: int


@dataclass(frozen=True, eq=False)
class Quantity:
    """One number to draw; ``rows`` are its rows of the prepared table, ``name`` that of its folder."""

    name: str
    metric: str
    title: str
    subject: str
    unit: str
    limits: tuple[float, float] | None
    log: bool
    signed: bool
    rows: pd.DataFrame

    @property
    def label(self) -> str:
        """The quantity in words, for an axis."""
        unit = f" ({self.unit})" if self.unit else ""
        return (f"{self.title} of {self.subject}" if self.subject else self.title) + unit

    def has_values(self, members: "pd.Series[int] | None" = None) -> bool:
        """Whether it has a value, in these runs or in any."""
        rows = self.rows if members is None else self.rows[self.rows["member"].isin(members)]
        return bool(rows["y"].notna().any())

    @property
    def view(self) -> str:
        """Over training (empty), or one side of a comparison by the other: steps, layers."""
        return str(self.rows["view"].iloc[0])

    def has(self, column: str) -> bool:
        """Whether there is a null or an interval."""
        return bool(self.rows[column].notna().any())

    def calibrated(self) -> "Quantity":
        """The values against their null, in the place of the values."""
        bare = self.bare()
        rows = bare.rows.assign(y=self.rows["calibrated"])
        return replace(bare, title=f"calibrated {self.title}", limits=(0.0, 1.0), log=False, signed=False, rows=rows)

    def bare(self) -> "Quantity":
        """The values alone, without null and interval."""
        return replace(self, rows=self.rows.assign(**dict.fromkeys(ADDED, np.nan)))

    @property
    def per(self) -> str:
        """What there is a value for in each layer: head, pair of heads, or (empty) the layer alone."""
        return str(self.rows["per"].iloc[0])

    @property
    def several(self) -> str:
        """`per` in the plural."""
        return {"head": "heads", "pair of heads": "pairs of heads"}.get(self.per, "")

    @property
    def in_layers(self) -> bool:
        """Whether its values belong to blocks of the model."""
        return bool(self.rows["layer"].notna().any())


@dataclass(frozen=True)
class Summary:
    """Percentiles over all that shares an x.

    ``levels`` is len(PERCENTILES) x len(x), nan where there is no value.
    ``hollow`` marks the x where a value is flagged, or where some of the values are missing.
    """

    x: NDArray[np.float64]
    levels: NDArray[np.float64]
    hollow: NDArray[np.bool_]

    @property
    def median(self) -> NDArray[np.float64]:
        """The middle line."""
        median: NDArray[np.float64] = self.levels[MEDIAN]
        return median


def summarise(rows: pd.DataFrame) -> Summary:
    """The percentiles of the values at each x, over the values that are defined."""
    rows = rows.sort_values("x", kind="stable")
    xs, first = np.unique(rows["x"].to_numpy(), return_index=True)
    values = np.split(rows["y"].to_numpy(), first[1:])
    plain = np.split((rows["status"] == "ok").to_numpy(dtype=bool), first[1:])
    levels = np.full((len(PERCENTILES), len(xs)), np.nan)
    for column, cell in enumerate(values[: len(xs)]):
        if (defined := cell[~np.isnan(cell)]).size:
            levels[:, column] = np.percentile(defined, PERCENTILES)
    return Summary(xs, levels, np.array([not cell.all() for cell in plain[: len(xs)]], dtype=bool))


def prepare(table: pd.DataFrame, x: Horizontal) -> tuple[pd.DataFrame, list[Series]]:
    """The table with what drawing needs beside its own columns, and the series, smallest model first.

    Adds ``member`` (number of the run), ``series`` (index of its series), ``x`` and ``y`` (floats; y is nan
    where there is no value), ``per`` (as `Quantity.per`), and by `comparisons.compared` ``reference`` (in words) and
    ``view``, with ``reference_x``, the x of the reference. Rows without an x are dropped.
    """
    rows = table.copy()
    rows["member"] = rows.groupby(["run", "run_id"], dropna=False, sort=True).ngroup()
    rows["x"] = _tokens(rows) if x == "tokens" else rows["step"].to_numpy(dtype=float)
    rows["y"] = rows["value"].to_numpy(dtype=float, na_value=np.nan)
    rows["per"] = np.select(
        [rows["reference_head"].notna(), rows["head"].notna()], ["pair of heads", "head"], default=""
    )
    for name in ADDED:
        rows[name] = rows[name].to_numpy(dtype=float, na_value=np.nan)
    rows["reference_x"] = (
        _tokens_of_reference(rows) if x == "tokens" else rows["reference_step"].to_numpy(float, na_value=np.nan)
    )
    rows = compared(rows)
    for key in ("parameters", "module", "split"):
        rows[key] = rows[key].fillna("")
    rows = rows[rows["x"].notna()]
    series, members = _series(rows)
    rows["series"] = rows["member"].map(members)
    return rows, series


def _tokens(rows: pd.DataFrame) -> NDArray[np.float64]:
    # A missing checkpoint has no token count; tokens are proportional to steps, so its gap still has a place.
    tokens, steps = (rows[name].to_numpy(dtype=float, na_value=np.nan) for name in ("tokens", "step"))
    known = pd.DataFrame({"member": rows["member"], "tokens": tokens, "step": steps}).dropna()
    last = known.groupby("member").max()
    per_step = rows["member"].map(last["tokens"] / last["step"].replace(0, np.nan)).to_numpy(dtype=float)
    filled: NDArray[np.float64] = np.where(np.isnan(tokens), steps * per_step, tokens)
    return filled


def _tokens_of_reference(rows: pd.DataFrame) -> NDArray[np.float64]:
    """Those of the same step of the reference's run; where the table has no row of that run, of any run."""
    by_run = rows.drop_duplicates(["run", "step"]).set_index(["run", "step"])["x"]
    by_step = rows.drop_duplicates("step").set_index("step")["x"]
    exact = by_run.reindex(pd.MultiIndex.from_frame(rows[["reference_run", "reference_step"]])).to_numpy(dtype=float)
    near = by_step.reindex(rows["reference_step"]).to_numpy(dtype=float)
    tokens: NDArray[np.float64] = np.where(np.isnan(exact), near, exact)
    return tokens


def _series(rows: pd.DataFrame) -> tuple[list[Series], dict[int, int]]:
    """The series in order of size, and the series that each run belongs to."""
    runs = rows.groupby("member")[["run", "suite", "scale", *SEEDS]].first()
    found: list[tuple[float, str, list[int]]] = []
    for _, group in runs.groupby(["suite", "scale"], dropna=False):
        scale = float(group["scale"].iloc[0]) if group["scale"].notna().all() else math.inf
        replicates = group[["suite", "scale", *SEEDS]].notna().all(axis=None) and not group[SEEDS].duplicated().any()
        if replicates and len(group) > 1:
            found.append((scale, str(group["suite"].iloc[0]), list(group.index)))
        else:
            found += [(scale, str(run), [int(str(member))]) for member, run in group["run"].items()]
    found.sort(key=lambda entry: (entry[0], entry[1], entry[2]))
    sizes = [size_label(scale) if math.isfinite(scale) else name for scale, name, _ in found]
    series = [
        Series(
            label=(f"{size} {name}" if sizes.count(size) > 1 and size != name else size)
            + (f" (n = {len(members)})" if len(members) > 1 else ""),
            scale=scale,
            n_runs=len(members),
        )
        for size, (scale, name, members) in zip(sizes, found, strict=True)
    ]
    return series, {member: index for index, (_, _, members) in enumerate(found) for member in members}


def size_label(n_parameters: float) -> str:
    """A number of parameters as it is spoken of.

    >>> [size_label(n) for n in (512, 508_000, 1_530_000, 11_282_784, 27_000_000, 569_800_000, 6_900_000_000)]
    ['512', '0.51M', '1.5M', '11.3M', '27M', '570M', '6.9B']
    """
    if n_parameters < 10_000:
        return f"{n_parameters:.0f}"
    unit, letter = (1e9, "B") if n_parameters >= 999.5e6 else (1e6, "M")
    size = n_parameters / unit
    return f"{size:.{2 if size < 10 else 3}g}{letter}"


def quantities_of(rows: pd.DataFrame) -> list[Quantity]:
    """The quantities in a prepared table, in the order of METRICS."""
    own = pd.Series([json.dumps(_parameters({"parameters": text})) for text in rows["parameters"]], index=rows.index)
    several = own.groupby(rows["metric"]).nunique() > 1
    modules = rows.groupby("component")["module"].nunique()
    found: list[Quantity] = []
    for key, group in rows.groupby(KEYS, sort=True):
        of: dict[str, Any] = dict(zip(KEYS, key, strict=True))
        look = METRICS.get(of["metric"], MetricWords(of["metric"].replace("_", " ")))
        values = group["y"].dropna()
        wide = look.limits is None and len(values) and values.min() > 0 and values.max() > 50 * values.min()
        signed = _signed(look, of, values)
        found.append(
            Quantity(
                name=_file_name(of, {quantity.name.lower() for quantity in found}),
                metric=of["metric"],
                title=_title(look.words, of, show_parameters=bool(several[of["metric"]])),
                subject="" if of["component"] == "loss" else _subject(of, several_modules=modules[of["component"]] > 1),
                unit=look.unit,
                limits=look.limits,
                log=bool(look.log or wide) and bool((values > 0).all()) and not signed,
                signed=signed,
                rows=group,
            )
        )
    order = {metric: place for place, metric in enumerate(METRICS)}
    return sorted(found, key=lambda quantity: (order.get(quantity.metric, len(order)), quantity.metric))


def _signed(look: MetricWords, of: dict[str, Any], values: "pd.Series[float]") -> bool:
    if look.signed is None:
        return look.limits is None and bool((values < 0).any())
    return look.signed is True or look.signed in _parameters(of).values()


def _title(words: str, of: dict[str, Any], *, show_parameters: bool) -> str:
    parameters = _parameters(of)
    named = NAMED_BY_PARAMETER.get(of["metric"], {})
    for name in [name for name in parameters if parameters[name] in named]:
        words = named[parameters.pop(name)]
    if not (show_parameters and parameters):
        return words
    return f"{words} ({', '.join(f'{name} {value}' for name, value in parameters.items())})"


def _parameters(of: dict[str, Any]) -> dict[str, Any]:
    """Those that a value depends on."""
    parameters: dict[str, Any] = json.loads(of["parameters"] or "{}")
    return {name: value for name, value in parameters.items() if name not in SETTINGS}


def _subject(of: dict[str, Any], *, several_modules: bool) -> str:
    if of["component"] == "simple":
        thing = of["module"]
    elif of["component"] == "delta":
        thing = f"the change of {of['module']}"
    else:
        thing = COMPONENTS.get(of["component"], of["component"].replace("_", " "))
        thing += f" {of['module']}" if several_modules and of["module"] else ""
    split = f" ({of['split']})" if of["split"] and of["kind"] != "weights" else ""  # a weight has no split
    head = f", per {of['per']}" if of["per"] else ""
    reference = f", against {of['reference']}" if of["reference"] else ""
    return f"{thing} {of['kind']}{split}{head}{reference}"


def _file_name(of: dict[str, Any], taken: set[str]) -> str:
    """``<metric>[-<param>]_<component>[-<module>]_<kind>[-<split>]``, safe on any file system.

    A name that is too long, or in lower case is one of ``taken``, ends in a hash.
    """
    first: list[str] = [of["metric"]]
    for name, value in _parameters(of).items():
        first.append(str(value) if isinstance(value, str) else f"{name}-{json.dumps(value)}")
    first += [word for name, word in SETTINGS.items() if name in json.loads(of["parameters"] or "{}")]
    if of["reference"]:
        first.append(f"vs-{of['reference']}")
    second = [of["component"], of["module"], "heads" if of["per"] else ""]
    parts = (first, second, [of["kind"], of["split"]])
    name = "_".join("-".join(_slug(word) for word in part if word) for part in parts)
    if len(name) > 120 or name.lower() in taken:
        full = json.dumps([str(of[key]) for key in KEYS])
        name = f"{name[:110]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    return name


def _slug(word: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-.")


def remarks(rows: pd.DataFrame) -> str:
    """What a reader must know about values that are missing or flagged; empty when there are none.

    For example ``3 of 240 values undefined: numerically singular.``
    """
    absent, flagged = rows[rows["y"].isna()], rows[rows["y"].notna() & rows["status"].eq("flagged")]
    parts = []
    if len(absent):
        states = " or ".join(sorted(absent["status"].unique(), reverse=True))
        parts.append(f"{len(absent)} of {len(rows)} values {states}{_reasons(absent['reason'])}.")
    if len(flagged):
        parts.append(f"{len(flagged)} flagged{_reasons(flagged['reason'])}.")
    return " ".join(parts)


def _reasons(reasons: "pd.Series[str]") -> str:
    counts = alike(reasons.dropna())
    if not counts:
        return ""
    shown = [
        shorten(reason, 90, placeholder=" ...") + (f" ({n})" if len(counts) > 1 else "") for reason, n in counts[:2]
    ]
    return ": " + ", ".join(shown) + (f", other reasons ({sum(n for _, n in counts[2:])})" if len(counts) > 2 else "")
