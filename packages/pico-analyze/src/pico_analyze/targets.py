"""What the matrices of a run are compared with: which run, which step, which layer.

Comes in: the keys target_checkpoint, target_run and target_layers of a metric's entry. Goes out: the checkpoints that a
checkpoint is compared with, the layers that a layer is compared with, and what stands against it, from manifests alone.
Of what is symmetric each pair is taken once; then the reference is the earlier step, the lower layer, the run that comes
first (runs are ordered by size and name).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from pico_analyze.checkpoint.reader import Run, list_steps
from pico_analyze.components import Selection
from pico_analyze.config import MetricEntry

Analysed = Mapping[str, Sequence[int]]  # the steps that are analysed, ascending, by run id


@dataclass(frozen=True)
class Target:
    """The three keys of an entry, as they are given."""

    checkpoint: int | Literal["last", "previous", "same", "nearest_tokens", "all"]
    run: str | None
    layers: Literal["all"] | None

    @classmethod
    def of(cls, entry: MetricEntry) -> "Target | None":
        """What an entry compares with; None where it compares with nothing."""
        if entry.target_checkpoint is None:
            return None
        return cls(entry.target_checkpoint, entry.target_run, entry.target_layers)

    @property
    def _beside(self) -> bool:
        """Whether the reference is the counterpart of the step, so that within its run it would be the step itself."""
        return self.checkpoint in ("same", "nearest_tokens")

    def checkpoints(self, run: Run, step: int, runs: Sequence[Run], analysed: Analysed) -> Iterator[tuple[Run, int]]:
        """The checkpoints that ``step`` of ``run`` is compared with; one that does not exist may be among them."""
        for other in self.runs(run, runs):
            for reference_step in self._steps(run, step, other, analysed):
                yield other, reference_step

    def runs(self, run: Run, runs: Sequence[Run]) -> list[Run]:
        """The runs that ``run`` is compared with: its own, the named one, or of each pair of runs the one before."""
        if self.run is None:
            return [run]
        if self.run == "all":
            before = list(takewhile(lambda other: other is not run, runs))
            return before if self._beside or self.checkpoint == "all" else [other for other in runs if other is not run]
        trivial = self._beside and self.layers is None
        return [other for other in runs if other.name == self.run and not (trivial and other is run)]

    def _steps(self, run: Run, step: int, other: Run, analysed: Analysed) -> Sequence[int]:
        match self.checkpoint:
            case "last":
                return other.steps[-1:]
            case "previous":
                return [one for one in analysed[run.identity.run_id] if one < step][-1:]
            case "all":
                return [one for one in analysed[other.identity.run_id] if other is not run or one <= step]
            case "nearest_tokens" if step in run.manifests:
                tokens = run.manifests[step].tokens
                return [min(other.steps, key=lambda one: abs(other.manifests[one].tokens - tokens))]
            case "same" | "nearest_tokens":
                return [step]
        return [self.checkpoint]

    def counterparts(
        self, here: Selection, there: Sequence[Selection], *, same_checkpoint: bool
    ) -> Iterator[tuple[int | None, str]]:
        """Layer and module of those of ``there`` that ``here`` is compared with.

        The module is the one of the same name, or the only one of its layer, where another model calls it otherwise.
        """
        layers: list[int | None] = [here.layer]
        if self.layers is not None:
            blocks = sorted({selection.layer for selection in there if selection.layer is not None})
            layers = [
                layer for layer in blocks if not same_checkpoint or (here.layer is not None and layer <= here.layer)
            ]
        for layer in layers if self.layers is None or here.layer is not None else ():
            modules = [selection.module for selection in there if selection.layer == layer]
            if here.module in modules:
                yield layer, here.module
            elif len(modules) == 1 and not same_checkpoint:
                yield layer, modules[0]

    def words(self) -> str:
        """What the target is, for a line of a dry run."""
        step = {
            "last": "the last step",
            "previous": "the previous step",
            "same": "the same step",
            "nearest_tokens": "the step of nearest tokens",
            "all": "each step",
        }.get(str(self.checkpoint), f"step {self.checkpoint}")
        run = {None: "", "all": " of each other run"}.get(self.run, f" of run {self.run}")
        return f"{step}{run}{', each layer' if self.layers else ''}"


def problems(target: Target, runs: Sequence[Run]) -> list[str]:
    """Why these runs cannot be compared as asked, all of it; that a step is missing is said elsewhere."""
    if target.run is None:
        return []
    names = [run.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if target.run == "all" and len(runs) < 2:
        return [
            f"target_run: all needs two runs or more, and there is only {', '.join(names)}; name more with --run-path, or take "
            "the entries with target_run out"
        ]
    if target.run != "all" and target.run not in names:
        return [f"target_run: there is no run {target.run}; there are {', '.join(names)}"]
    if twice and target.run in ("all", *twice):
        return [
            f"target_run: several runs are called {', '.join(twice)}; a row could not say which it is compared with"
        ]
    pairs = [(run, other) for run in runs for other in target.runs(run, runs) if other is not run]
    if not pairs:
        return [f"target_run: {target.run} is the only run, so nothing is compared with it"]
    return [problem for run, other in pairs for problem in _other_samples(run, other)]


def _other_samples(run: Run, other: Run) -> Iterator[str]:
    """Why the rows of the probe are not the same samples in two runs."""
    sides = []
    for one in (run, other):
        hashes = sorted({manifest.probe_hash or "none" for manifest in one.manifests.values()})
        rules = {
            (capture.rule, capture.position, capture.tokens_per_sequence)
            for capture in (manifest.capture for manifest in one.manifests.values())
            if capture is not None
        }
        sides.append((one.name, hashes, rules))
    (name, hashes, rules), (other_name, other_hashes, other_rules) = sides
    if hashes != other_hashes or "none" in hashes or len(hashes) > 1:
        yield (
            f"target_run: the runs {name} and {other_name} were not probed with the same samples: their probe hashes are "
            f"{', '.join(hashes)} and {', '.join(other_hashes)}; train them on the same held-out data"
        )
    elif rules != other_rules:
        said = [", ".join(sorted(_rule(*rule) for rule in side)) for side in (rules, other_rules)]
        yield (
            f"target_run: the runs {name} and {other_name} captured other tokens of the probe: by the rules {said[0]} and "
            f"{said[1]}"
        )


def _rule(rule: str, position: int | None, tokens_per_sequence: int | None) -> str:
    number = position if tokens_per_sequence is None else tokens_per_sequence
    return rule if number is None else f"{rule} {number}"


def unmatched(
    target: Target, run: Run, here: Sequence[Selection], other: Run, there: Sequence[Selection]
) -> str | None:
    """Why what is selected in one run has no counterpart in the other; None where everything has one."""
    alone = [
        selection
        for selection in here
        if not any(target.counterparts(selection, there, same_checkpoint=False)) and selection.layer is not None
    ]
    layers = [{selection.layer for selection in side} for side in (here, there)]
    if target.layers is None and layers[0] != layers[1]:
        n_layers, n_other = (one.manifests[one.steps[0]].model.n_layers for one in (run, other))
        return (
            f"target_layers: run {run.name} has {n_layers} layers and run {other.name} {n_other}, which do not pair by "
            "number; use target_layers: all to compare each layer with each, or list layers that both have"
        )
    if alone:
        names = ", ".join(sorted({selection.module for selection in there}))
        return f"target_run: {alone[0].module} of run {run.name} is not in run {other.name}, which has {names}"
    return None


def no_pair(target: Target, analysed: Analysed) -> str:
    """Why a target has given no pair at all."""
    if target.checkpoint == "previous":
        steps = "; ".join(list_steps(steps) for steps in analysed.values())
        return f"target_checkpoint: previous needs two analysed steps, and there are {steps}"
    return "target_layers: all compares blocks of the model, and what is selected lies outside of them"
