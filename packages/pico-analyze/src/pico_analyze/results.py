"""The tidy table of results: its columns, its files, and the table of runs beside it.

Comes in: rows from ``analysis.py``. Goes out: a pandas table with fixed columns and dtypes, Parquet and CSV,
each written at once or not at all, and on request the JSON files of the published pico-analyze. No torch.
"""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd

from pico_analyze.checkpoint.reader import Run, matches_suffix
from pico_analyze.config import ComponentEntry, MetricEntry
from pico_analyze.metrics import METRICS, Metric, get_metric

# Column to dtype, in the order of the files. A missing value is NA, and NaN in ``value``; on disk it is null.
COLUMNS: dict[str, str] = {
    "run": "string",
    "run_id": "string",
    "suite": "string",
    "scale": "Int64",  # number of parameters
    "weights_seed": "Int64",
    "data_seed": "Int64",
    "dropout_seed": "Int64",
    "step": "Int64",
    "tokens": "Int64",
    "split": "string",  # null for weights
    "kind": "string",  # weights | activations | gradients | training
    "component": "string",
    "module": "string",
    "layer": "Int64",
    "head": "Int64",
    "metric": "string",
    "parameters": "string",  # JSON object: those of the metric and of the component
    "reference_run": "string",
    "reference_step": "Int64",
    "reference_layer": "Int64",
    "reference_head": "Int64",  # of reference_layer
    "value": "float64",
    "low": "float64",  # where an interval was asked for (bootstrap): its ends
    "high": "float64",
    "null_mean": "float64",  # where a permutation null was asked for: the mean and a quantile of it,
    "null_quantile": "float64",
    "calibrated": "float64",  # the value less the mean, 1 for sides that agree entirely, 0 on average for unrelated ones
    "p_value": "float64",  # how often unrelated sides come as near
    "n": "Int64",  # rows of the matrix; samples where it holds activations
    "d": "Int64",  # columns of the matrix
    "dtype": "string",  # as stored
    "status": "string",  # ok | flagged | undefined | missing
    "reason": "string",  # why the status is not ok
    "content_hash": "string",
    "reference_hash": "string",
}

# What tables of the first version do not have.
ADDED = ("low", "high", "null_mean", "null_quantile", "calibrated", "p_value")

# The store of everything that was ever computed has one column more.
STORE_COLUMNS: dict[str, str] = COLUMNS | {
    "code_hash": "string",  # of the plugins that computed the value, null for what is ours
}

RUN_COLUMNS: dict[str, str] = {
    "run": "string",
    "run_id": "string",
    "suite": "string",
    "path": "string",
    "n_parameters": "Int64",
    "n_parameters_without_embeddings": "Int64",
    "family": "string",
    "d_model": "Int64",
    "n_layers": "Int64",
    "n_heads": "Int64",
    "n_kv_heads": "Int64",
    "head_dim": "Int64",
    "hidden_dim": "Int64",
    "vocab_size": "Int64",
    "seq_len": "Int64",
    "tied_embeddings": "boolean",
    "weights_seed": "Int64",
    "data_seed": "Int64",
    "dropout_seed": "Int64",
    "data_fingerprint": "string",
    "probe_hash": "string",
    "config_hash": "string",
    "steps": "string",  # JSON list
}


TABLES = {"results": COLUMNS, "runs": RUN_COLUMNS, "computed": STORE_COLUMNS}


def canonical(parameters: Mapping[str, Any]) -> str:
    """Parameters as JSON text that is the same whatever the order in which they were given."""
    return json.dumps(parameters, sort_keys=True, allow_nan=False)


def row_parameters(entry: MetricEntry, component: ComponentEntry, known: Mapping[str, Metric] = METRICS) -> str:
    """The column ``parameters``: the metric's, defaults spelled out, the component's, and those of null and interval where given.

    ``known`` is the table of metrics, with those of plugins.
    """
    order = {} if component.order is None else {"order": component.order}
    return canonical(get_metric(entry.metric_name, known).resolve(entry.parameters) | order | entry.uncertainty)


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str] = COLUMNS) -> pd.DataFrame:
    """Rows as a table with exactly these columns and dtypes; a key that a row lacks is null."""
    rows = list(rows)
    return pd.DataFrame(
        {name: pd.Series([row.get(name) for row in rows], dtype=dtype) for name, dtype in columns.items()}
    )


def runs_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per run: its identity, shape, seeds, data, and complete steps."""
    rows = []
    for run in runs:
        row = {
            "run": run.name,
            "run_id": run.identity.run_id,
            "suite": run.identity.suite,
            "path": str(run.path),
            "config_hash": run.identity.config_hash,
            "steps": json.dumps(run.steps),
        }
        if run.steps:
            manifest = run.manifests[run.steps[0]]
            row |= manifest.model.model_dump()
            row |= {f"{name}_seed": seed for name, seed in manifest.seeds.model_dump().items()}
            row |= {"data_fingerprint": manifest.data.fingerprint, "probe_hash": manifest.probe_hash}
        rows.append(row)
    return table(rows, RUN_COLUMNS)


def write(frame: pd.DataFrame, folder: Path, name: str = "results") -> None:
    """Write ``<name>.parquet`` and ``<name>.csv`` into ``folder``: each appears complete or stays as it was.

    The store, ``computed``, is for rerunning, not for reading: it has no CSV.

    A missing value is null in the Parquet file and an empty field in the CSV file, which never holds ``nan``.
    """
    assert not any(math.isinf(value) for value in frame.get("value", ())), "an infinite value"
    frame = frame.copy(deep=False)
    frame.attrs = {}  # pandas would store them in the Parquet file
    _replace(folder / f"{name}.parquet", lambda path: frame.to_parquet(path, index=False))
    if name != "computed":
        _replace(folder / f"{name}.csv", lambda path: frame.to_csv(path, index=False, lineterminator="\n"))


def _replace(path: Path, write_to: Callable[[Path], object]) -> None:
    """Write a file beside ``path``, then let it take the place of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.tmp")
    write_to(staged)
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    staged.replace(path)


_NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\w)")


def alike(reasons: Iterable[str]) -> list[tuple[str, int]]:
    """Reasons with how often they occur, the most frequent first; those that differ only in numbers are one.

    >>> alike(["only 9 of 12 left", "all zeros", "only 7 of 12 left"])
    [('only 7 to 9 of 12 left', 2), ('all zeros', 1)]
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        groups[_NUMBER.sub("#", reason)].append(reason)
    return sorted(((_in_one(group), len(group)) for group in groups.values()), key=lambda one: (-one[1], one[0]))


def _in_one(reasons: Sequence[str]) -> str:
    """One text for reasons that differ only in numbers, with the smallest and the largest of each."""
    places = zip(*map(_NUMBER.findall, dict.fromkeys(reasons)), strict=True)
    ordered = (sorted(set(place), key=lambda number: float(number.replace(",", ""))) for place in places)
    ranges = iter([" to ".join(dict.fromkeys((place[0], place[-1]))) for place in ordered])
    return _NUMBER.sub(lambda _: next(ranges), reasons[0])


class ResultsError(ValueError):
    """A table of results that cannot be read; the message names the file and what to do."""


def read(folder: Path, name: str = "results") -> pd.DataFrame:
    """The table that `write` left in ``folder``.

    Raises:
        ResultsError: there is none, it cannot be read, or it lacks columns.
    """
    path = folder / f"{name}.parquet"
    columns = TABLES[name]
    if not path.is_file():
        raise ResultsError(f"{path} does not exist; pico-analyze run writes it")
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); remove it and run the analysis again") from None
    if "reference_step" in frame and "reference_layer" not in frame:  # of before layers were compared with each other
        frame["reference_layer"] = frame["layer"].where(frame["reference_step"].notna())
    for column in [column for column in ("reference_head", *ADDED) if column in columns and column not in frame]:
        frame[column] = pd.Series(index=frame.index, dtype=columns[column])
    lacking = [column for column in columns if column not in frame]
    if lacking:
        raise ResultsError(f"{path} lacks the columns {', '.join(lacking)}; remove it and run the analysis again")
    return frame[list(columns)].astype(columns)


# ---- the store of everything that was ever computed

# What tells a row of results from all others, whatever its content.
IDENTITY = (
    "run_id",
    "step",
    "split",
    "kind",
    "component",
    "module",
    "layer",
    "metric",
    "parameters",
    "reference_run",
    "reference_step",
    "reference_layer",
)
CONTENT = ("dtype", "content_hash", "reference_hash")


def extended(store: pd.DataFrame | None, frame: pd.DataFrame, code: Mapping[tuple[str, str], str]) -> pd.DataFrame:
    """The store with the measured values of ``frame`` added; of the same value by the same code the newer stays.

    ``code`` is the hash behind a (metric, component) of plugins.
    """
    measured = frame[frame["kind"].ne("training") & frame["status"].isin(["ok", "flagged", "undefined"])]
    hashes = [code.get(pair) for pair in zip(measured["metric"], measured["component"], strict=True)]
    measured = measured.assign(code_hash=pd.array(hashes, dtype="string"))
    if store is not None and len(store):
        measured = pd.concat([store, measured], ignore_index=True)
    return measured.drop_duplicates(
        [*IDENTITY, "head", "reference_head", *CONTENT, "code_hash"], keep="last", ignore_index=True
    )


def still_valid(store: pd.DataFrame, code: Mapping[tuple[str, str], str]) -> pd.DataFrame:
    """The rows of the store that the code of now would compute again."""
    pairs = zip(store["metric"], store["component"], strict=True)
    now = pd.Series([code.get(pair, "") for pair in pairs], index=store.index, dtype="string")
    return store[store["code_hash"].fillna("").eq(now)]


# ---- the files of the published pico-analyze


def write_pico_v0(
    frame: pd.DataFrame, folder: Path, metrics: Sequence[MetricEntry], known: Mapping[str, Metric] = METRICS
) -> None:
    """Write ``step_<N>/<metric>_<split>.json`` for each step and metric entry: a flat object, key to number.

    Undefined values are null, missing ones are left out. Each run has its own folder if there are several.
    Where the published code would overwrite the file of another entry, ours is called
    ``<metric>-<norm or target>_<split>.json``, with a number where that is taken too.
    """
    several = frame["run_id"].nunique() > 1
    taken: set[str] = set()
    files: dict[Path, dict[str, float | None]] = defaultdict(dict)
    for entry in metrics:
        names = _pico_v0_names(entry)
        name = ""
        owners: dict[tuple[str, int, str], Any] = {}  # which row of the table a key of the file holds
        for component in entry.components:
            rows = {(row.run, row.step, _pico_v0_key(row)): row for row in _rows_of(frame, entry, component, known)}
            # The same component in another form has the same keys: that needs a file of its own.
            if not name or any(owners.get(place, row.Index) != row.Index for place, row in rows.items()):
                name, owners = next(name for name in names if name not in taken), {}
                taken.add(name)
            for (run, step, key), row in rows.items():
                owners[run, step, key] = row.Index
                path = (folder / run if several else folder) / f"step_{step}" / name
                files[path][key] = None if math.isnan(row.value) else row.value
    for path, content in files.items():
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        _replace(path, partial(Path.write_text, data=text, encoding="utf-8"))


def _pico_v0_names(entry: MetricEntry) -> Iterator[str]:
    """File names for the entry, the published one first."""
    split = "" if entry.data_split is None else f"_{entry.data_split}"
    tag = entry.norm_type if entry.target_checkpoint is None else entry.target_checkpoint
    tagged = entry.metric_name if tag is None else f"{entry.metric_name}-{tag}"
    yield f"{entry.metric_name}{split}.json"
    yield f"{tagged}{split}.json"
    yield from (f"{tagged}-{number}{split}.json" for number in count(2))


def _pico_v0_key(row: Any) -> str:
    """``layers.<i>.<module or component>.<kind>``, for one head with ``.heads.<h>``."""
    block = "" if pd.isna(row.layer) else f"layers.{row.layer}."
    head = "" if pd.isna(row.head) else f".heads.{row.head}"
    head += "" if pd.isna(row.reference_head) else f".of.layers.{row.reference_layer}.heads.{row.reference_head}"
    return f"{block}{row.module if row.component == 'simple' else row.component}.{row.kind}{head}"


def _rows_of(
    frame: pd.DataFrame, entry: MetricEntry, component: ComponentEntry, known: Mapping[str, Metric]
) -> list[Any]:
    """The rows that a metric entry asks for on one of its components, as named tuples; no missing ones."""
    chosen = frame[
        frame["metric"].eq(entry.metric_name)
        & frame["parameters"].eq(row_parameters(entry, component, known))
        & frame["component"].eq(component.component_name)
        & frame["kind"].eq(component.data_type)
        & frame["status"].ne("missing")
    ]
    if component.data_type not in ("weights", "optimizer"):
        chosen = chosen[chosen["split"] == entry.data_split]
    if component.layers != "all":
        chosen = chosen[chosen["layer"].isin(component.layers)]
    if isinstance(component.layer_suffixes, str):
        fits = [
            matches_suffix(module if pd.isna(layer) else f"layers.{layer}.{module}", component.layer_suffixes)
            for module, layer in zip(chosen["module"], chosen["layer"], strict=True)
        ]
        chosen = chosen[fits]
    if entry.target_checkpoint is not None:
        within = chosen["reference_run"].eq(chosen["run"]) & chosen["reference_layer"].fillna(-1).eq(
            chosen["layer"].fillna(-1)
        )
        chosen = chosen[within]
        last = chosen.groupby("run_id")["reference_step"].transform("max")
        target = last if entry.target_checkpoint == "last" else entry.target_checkpoint
        chosen = chosen[chosen["reference_step"] == target]
    return list(chosen.itertuples())
