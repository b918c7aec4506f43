"""What the compared rows of a table are compared with, in words, so that the rows of one picture share them.

A table says for each row the run, step and layer of its reference, not the rule that chose them. Here the rule is read off the
pairs: each step with each, the previous step, one fixed step, the step beside it in another run, each layer with each. A
row may belong to several pictures: a triangle of all pairs of steps holds the distance to the previous step too.
"""

from collections.abc import Iterator
from typing import Literal

import pandas as pd

View = Literal["", "steps", "layers"]  # over training, step x step, layer x layer

Pair = tuple[int, int]  # step, reference_step


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, each once for every picture that it belongs to, with ``reference`` (in words) and ``view``."""
    plain = rows[rows["reference_step"].isna()].assign(reference="", view="")
    pairs = rows[rows["reference_step"].notna()]
    if pairs.empty:
        return plain
    last = rows.groupby("member")["step"].transform("max").loc[pairs.index]
    across = pairs["reference_layer"].ne(pairs["layer"]).fillna(False).astype(bool)
    crossed = across.groupby(_keys(pairs, "member", "reference_run", "step", "reference_step"), dropna=False).transform(
        "any"
    )
    found, fixed = [plain], []
    if crossed.any():
        found += _each_layer(pairs[crossed])
    own_run = pairs["reference_run"].eq(pairs["run"]).fillna(False).astype(bool)
    within = pairs[
        ~across & (own_run | ~crossed)
    ]  # of its own run each layer with each holds each layer with itself too
    for _, group in within.groupby(_keys(within, "member", "reference_run"), dropna=False, sort=False):
        own = bool(group["reference_run"].eq(group["run"]).all())
        steps = list(zip(group["step"].astype(int), group["reference_step"].astype(int), strict=True))
        other = group["reference_run"].iloc[0]
        for view, words, chosen in _pictures(set(steps), own=own):
            part = group[[pair in chosen for pair in steps]]
            if words is None:
                fixed.append(part)
            else:
                found.append(part.assign(reference=words if own else words + f"run {other}", view=view))
    if fixed:
        whole = pd.concat(fixed)
        found.append(whole.assign(reference=_fixed(whole, last.loc[whole.index]), view=""))
    return pd.concat([part for part in found if len(part)], ignore_index=True)


def _keys(rows: pd.DataFrame, *more: str) -> list["pd.Series[str]"]:
    return [rows[key] for key in ("metric", "parameters", "kind", "component", "module", "split", *more)]


def _each_layer(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Layer x layer: the same step of the run, or a step, or another run."""
    own = rows["reference_run"].eq(rows["run"])
    beside = own & rows["reference_step"].eq(rows["step"])
    yield rows[beside].assign(reference="each layer", view="layers")
    rest = rows[~beside]
    for (run, of_own), group in rest.groupby([rest["reference_run"], own[~beside]], sort=False):
        if not of_own:
            yield group.assign(reference=f"each layer of run {run}", view="layers")
            continue
        for step, part in group.groupby("reference_step", sort=False):
            yield part.assign(reference=f"each layer at step {step}", view="layers")


def _pictures(pairs: set[Pair], *, own: bool) -> Iterator[tuple[View, str | None, set[Pair]]]:
    """The pictures that pairs of steps make: view, words (None: the reference is a fixed step), and which pairs.

    >>> triangle = {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}
    >>> [(view, words, len(chosen)) for view, words, chosen in _pictures(triangle, own=True)]
    [('steps', 'each step', 6), ('', 'the previous step', 2), ('', None, 3)]
    >>> [(words, sorted(chosen)) for _, words, chosen in _pictures({(0, 0), (1, 1), (2, 2)}, own=False)]
    [('', [(0, 0), (1, 1), (2, 2)])]
    """
    steps = sorted({step for step, _ in pairs})
    references = sorted({reference for _, reference in pairs})
    constant = [reference for reference in references if all((step, reference) in pairs for step in steps)]
    left = pairs - {(step, reference) for step in steps for reference in constant}
    if own:
        triangle = {(step, reference) for step in steps for reference in steps if reference <= step}
        if len(steps) > 2 and triangle <= pairs:
            yield "steps", "each step", triangle
            left -= triangle
        times = sorted({*steps, *references})
        neighbours = set(zip(times[1:], times, strict=False))
        if len(steps) > 1 and neighbours <= pairs:
            yield "", "the previous step", neighbours
            left -= neighbours
        left -= {(step, step) for step in steps}  # of each layer with each
    elif len(steps) > 2 and len(references) > 2 and len(constant) == len(references):
        yield "steps", "each step of ", pairs
        return
    elif left:
        yield "", "", left
        left = set()
    if fixed := {(step, reference) for step in steps for reference in constant} | left:
        yield "", None, fixed


def _fixed(rows: pd.DataFrame, last_step: "pd.Series[int]") -> "pd.Series[str]":
    """A fixed step in words.

    The run is left out where every run is compared with itself, and so is the step where each run is compared
    with its last one and these differ.
    """
    keys = _keys(rows)
    steps = rows["reference_step"].map(lambda step: f"step {step}", na_action="ignore").astype(object)
    last = rows["reference_step"].eq(last_step).fillna(False)
    n_last = rows["reference_step"].where(last).groupby(keys, dropna=False).transform("nunique")
    steps = steps.mask(last & (n_last > 1), "the last step")
    other = rows["reference_run"].notna() & rows["reference_run"].ne(rows["run"])
    elsewhere = other.groupby([*keys, rows["reference_step"]], dropna=False).transform("any")
    runs = "run " + rows["reference_run"].astype(object)
    named = runs.where(steps.isna(), runs + " at " + steps)
    return steps.where(~elsewhere, named).fillna("")
