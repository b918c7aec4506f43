"""What an analysis will measure, said from manifests alone: checkpoints x components x metrics -> cells.

Comes in: open runs and the configuration. Goes out: a list of `Cell`, each a metric of one matrix (or of one
for each head) at one step, with the content hashes of the tensors behind it; or one error that lists all that
cannot be had.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pico_analyze.checkpoint.format import Kind, Manifest, Split
from pico_analyze.checkpoint.integrity import StandingStill, holders
from pico_analyze.checkpoint.reader import Run, list_steps
from pico_analyze.components import (
    COMPONENTS,
    Component,
    ComponentError,
    ComponentInfo,
    Selection,
    get_component,
    load_components,
)
from pico_analyze.config import AnalysisConfig, Bootstrap, ComponentEntry, MetricEntry, PermutationNull
from pico_analyze.metrics import METRICS, Metric, get_metric, load_metrics
from pico_analyze.plugins import code_hash
from pico_analyze.results import canonical, row_parameters
from pico_analyze.targets import Target, no_pair, unmatched
from pico_analyze.targets import problems as target_problems
from pico_analyze.words import counted


class AnalysisError(ValueError):
    """An analysis that cannot be done as asked; the message lists all that stands against it."""


@dataclass(frozen=True)
class Source:
    """A component with its settings; ``settings`` is all of them as text: equal text, equal source."""

    name: str
    kind: Kind
    split: Split | None
    order: Literal["pico_v0"] | None
    settings: str
    component: Component = field(compare=False)


@dataclass(frozen=True)
class Measurement:
    """One metric on one source, as the configuration asks for it."""

    metric_name: str
    metric: Metric
    parameters: Mapping[str, str | int | float]
    row_parameters: str
    source: Source
    target: Target | None
    null: PermutationNull | None
    bootstrap: Bootstrap | None
    plugins: tuple[str, ...]  # the import paths of the metric and the component, where they are not ours


@dataclass(frozen=True)
class Reference:
    """What a selection is compared with: ``selection`` of a step of a run, None where it is missing.

    ``same_as`` is as for a cell.
    """

    run: Run
    step: int
    layer: int | None
    selection: Selection | None
    same_as: int | None


@dataclass(frozen=True)
class Cell:
    """One measurement of one selection at one step of one run: a row for each head.

    ``missing`` says why there is nothing to measure. ``same_as`` is another step of the run that holds the
    very same tensors, although an update lies between, if there is one.
    """

    run: Run
    step: int
    measurement: Measurement
    selection: Selection
    reference: Reference | None
    missing: str | None
    same_as: int | None

    @property
    def heads(self) -> tuple[int | None, ...]:
        """The heads that have a row.

        A head of another layer or run is not the counterpart of the one of its number: there only all side by side compare.
        """
        heads, other = self.selection.heads, self.reference
        if other is None or (other.run is self.run and other.layer == self.selection.layer):
            return heads
        there = heads if other.selection is None else other.selection.heads
        return (None,) if None in heads else tuple(head for head in heads if head in there)

    @property
    def rows_per_sequence(self) -> int:
        """How many neighbouring rows of the captured activations belong to one sequence."""
        manifest, split = self.run.manifests[self.step], self.measurement.source.split
        batches = [
            row.shape[0]
            for row in manifest.tensors
            if (row.kind, row.split, row.module) == ("batch", split, "input_ids")
        ]
        if manifest.capture is None or split is None or not batches:
            return 1
        return manifest.capture.rows[split] // batches[0]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells this cell from all others, whatever its content: the columns `results.IDENTITY`."""
        source, other = self.measurement.source, self.reference
        return (
            self.run.identity.run_id,
            self.step,
            source.split,
            source.kind,
            source.name,
            self.selection.module,
            self.selection.layer,
            self.measurement.metric_name,
            self.measurement.row_parameters,
            *((None, None) if other is None else (other.run.name, other.step)),
            self.selection.reference_layer if other is None else other.layer,
        )

    @property
    def content(self) -> dict[str, str | None]:
        """What is stored there, as columns of the table; of no meaning where the cell is missing."""
        return {
            "dtype": self.selection.dtype,
            "content_hash": self.selection.content_hash,
            "reference_hash": other.content_hash if self.reference and (other := self.reference.selection) else None,
        }


def plan(runs: Sequence[Run], config: AnalysisConfig) -> list[Cell]:
    """Every cell of the analysis: by run, then by step, then in the order of the configuration.

    Raises:
        PluginError: a plugin cannot be used.
        AnalysisError: something that is asked for cannot be had in some run; all of it at once.
    """
    tables = load_metrics(config.plugins), load_components(config.plugins)
    problems = _run_problems(runs) + _step_problems(runs, config)
    measurements: list[Measurement] = []
    for i, entry in enumerate(config.metrics):
        for component in entry.components:
            try:
                measurements.append(_measurement(entry, component, *tables))
            except ValueError as error:
                problems.append(f"metrics[{i}], {entry.metric_name} of {component.component_name}: {error}")
    expected: list[dict[Source, list[Selection]]] = []
    for run in runs:
        expected.append({})
        for source in dict.fromkeys(measurement.source for measurement in measurements):
            try:
                expected[-1][source] = _expected(run, source)
            except ComponentError as error:
                problems.append(f"{source.name} of {source.kind}, run {run.name}: {error}")
    if not problems:
        problems = _target_problems(runs, measurements, expected)
    if problems:
        raise AnalysisError("the analysis cannot be done:\n  " + "\n  ".join(dict.fromkeys(problems)))
    cells: dict[tuple[Any, ...], Cell] = {}  # what two entries ask for is measured once
    empty = [measurement for measurement in measurements if measurement.target is not None]
    for cell in _Cells(runs, config, measurements, expected):
        empty = [measurement for measurement in empty if measurement is not cell.measurement]
        cells.setdefault(cell.key, cell)
    analysed = {run.identity.run_id: steps_of(run, config) for run in runs}
    if without := [f"{one.metric_name}: {no_pair(one.target, analysed)}" for one in empty if one.target is not None]:
        raise AnalysisError("the analysis cannot be done:\n  " + "\n  ".join(without))
    return list(cells.values())


def code_hashes(cells: Sequence[Cell]) -> dict[tuple[str, str], str]:
    """The hash of the source behind each (metric, component) of which one comes from a plugin."""
    measurements = {id(cell.measurement): cell.measurement for cell in cells}.values()
    return {
        (measurement.metric_name, measurement.source.name): "+".join(map(code_hash, measurement.plugins))
        for measurement in measurements
        if measurement.plugins
    }


def describe(cells: Sequence[Cell]) -> list[str]:
    """What a plan measures, a line for each metric and module, for a dry run."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        source, parameters = cell.measurement.source, cell.measurement.row_parameters
        text = cell.measurement.metric_name + (f" {parameters}" if parameters != "{}" else "")
        text += f" of {source.name} {source.kind} {cell.selection.module}"
        text += f" ({source.split})" if source.split else ""
        target = cell.measurement.target
        groups[text + (f" against {target.words()}" if target else "")].append(cell)
    lines = []
    for text, group in groups.items():
        layers = sorted({cell.selection.layer for cell in group if cell.selection.layer is not None})
        where = f", layers {', '.join(map(str, layers))}" if layers else ""
        n_checkpoints = len({(cell.run.identity.run_id, cell.step) for cell in group})
        n_values = sum(len(cell.heads) for cell in group)
        n_missing = sum(len(cell.heads) for cell in group if cell.missing)
        gaps = f", {n_missing} of them missing" if n_missing else ""
        pairs = f"{counted(len(group), 'pair')}, " if group[0].reference else ""
        lines.append(
            f"{text}{where}: {counted(n_checkpoints, 'checkpoint')}, {pairs}{counted(n_values, 'value')}{gaps}"
        )
    return lines


def steps_of(run: Run, config: AnalysisConfig) -> list[int]:
    """The steps asked for; ``all`` holds the damaged ones too, so that the gap shows."""
    return config.select_steps({*run.steps, *run.skipped})


def _run_problems(runs: Sequence[Run]) -> list[str]:
    problems = [] if runs else ["no run is given"]
    by_id: dict[str, Run] = {}
    for run in runs:
        if not run.steps:
            why = "".join(f"; {reason}" for reason in run.skipped.values())
            problems.append(f"run {run.name} has no complete checkpoint{why}")
        other = by_id.setdefault(run.identity.run_id, run)
        if other is not run:
            problems.append(f"{other.path} and {run.path} hold the same run; name one of them")
    return problems


def _step_problems(runs: Sequence[Run], config: AnalysisConfig) -> list[str]:
    there = "; ".join(f"run {run.name} has {list_steps(run.steps)}" for run in runs)
    asked = {step for run in runs for step in steps_of(run, config)}
    stored = {step for run in runs for step in run.steps}
    problems = []
    if stored and not asked & stored:
        problems.append(f"steps: none of those asked for exists; {there}")
    for entry in config.metrics:
        if stored and isinstance(entry.target_checkpoint, int) and entry.target_checkpoint not in stored:
            problems.append(f"target_checkpoint: there is no step {entry.target_checkpoint}; {there}")
    return problems


def _measurement(
    entry: MetricEntry,
    component: ComponentEntry,
    metrics: Mapping[str, Metric],
    components: Mapping[str, ComponentInfo],
) -> Measurement:
    """What a metric entry asks for on one of its components; ValueError where they do not fit."""
    metric, info = get_metric(entry.metric_name, metrics), get_component(component.component_name, components)
    kind = component.data_type
    if kind not in info.kinds:
        raise ValueError(f"it has no {kind}, only {', '.join(info.kinds)}")
    if info.only and entry.metric_name not in info.only:
        raise ValueError(f"does not fit this component; what fits: {', '.join(info.only)}")
    compared = metric.consumes == "pair" or info.compared
    if compared and entry.target_checkpoint is None:
        raise ValueError("target_checkpoint: is needed; give a step, or last")
    if info.compared and (entry.target_run or entry.target_layers):
        raise ValueError(
            "target_run, target_layers: a difference is one of the same weight of the same run; leave them out"
        )
    if not compared and entry.target_checkpoint is not None:
        pairs = ", ".join(name for name, other in metrics.items() if other.consumes == "pair")
        raise ValueError(
            f"target_checkpoint: {entry.target_checkpoint} is only for metrics that compare: {pairs}; and for delta"
        )
    if kind not in metric.fits:
        others = ", ".join(name for name, other in metrics.items() if kind in other.fits)
        verb = "compares" if metric.consumes == "pair" else "measures"
        raise ValueError(f"{verb} {', '.join(metric.fits)} and does not fit {kind}; what fits: {others}")
    same_batch = entry.target_checkpoint == "same" and entry.target_run is None
    if metric.consumes == "pair" and entry.data_split == "train" and not same_batch:
        raise ValueError(
            "needs the same samples at every step, and the batch of split train is another at each; use data_split: val"
        )
    if entry.permutation_null is not None and metric.consumes != "pair":
        raise ValueError(
            "permutation_null: is only for metrics that compare samples, where their order can be permuted"
        )
    if entry.bootstrap is not None and kind != "activations":
        raise ValueError(
            f"bootstrap: leaves out samples, and the rows of {kind} are none; use it for activations alone"
        )
    split = None if kind in ("weights", "optimizer") else entry.data_split
    source = Source(
        name=component.component_name,
        kind=kind,
        split=split,
        order=component.order,
        settings=canonical(component.model_dump(mode="json") | {"split": split}),
        component=_component(component, info, split),
    )
    return Measurement(
        metric_name=entry.metric_name,
        metric=metric,
        parameters=metric.resolve(entry.parameters),
        row_parameters=row_parameters(entry, component, metrics),
        source=source,
        target=Target.of(entry),
        null=entry.permutation_null,
        bootstrap=entry.bootstrap,
        plugins=tuple(
            path
            for path, theirs in (
                (metric.function, entry.metric_name not in METRICS),
                (info.path, component.component_name not in COMPONENTS),
            )
            if theirs
        ),
    )


def _component(entry: ComponentEntry, info: ComponentInfo, split: Split | None) -> Component:
    """The component with the settings of its entry; ValueError where these do not fit it, or it fails on them."""
    suffixes: str | dict[str, str] | None = entry.layer_suffixes
    if entry.role is not None:
        suffixes = {"role": entry.role}
    try:
        return info.load()(entry.data_type, split, entry.layers, suffixes, entry.order)
    except ComponentError:
        raise
    except Exception as error:
        raise ValueError(f"the component failed: {type(error).__name__}: {error}") from error


def _selections(source: Source, manifest: Manifest) -> list[Selection]:
    """What the source finds; ComponentError where something is missing, or where the component fails."""
    try:
        found = list(source.component.select(manifest))
    except ComponentError:
        raise
    except Exception as error:
        raise ComponentError(f"the component failed: {type(error).__name__}: {error}") from error
    wrong = next((one for one in found if not isinstance(one, Selection)), None)
    if wrong is not None:
        raise ComponentError(f"the component failed: it selects a {type(wrong).__name__}, not a Selection")
    return found


def _expected(run: Run, source: Source) -> list[Selection]:
    """What the source finds at the first step that has all of it; where no step has, ComponentError with what the last one lacks."""
    problem = None
    for manifest in run.manifests.values():
        try:
            return _selections(source, manifest)
        except ComponentError as error:
            problem = error  # the first steps may lack more: there is no optimizer's state before an update
    if problem is not None:
        raise problem
    return []  # no step at all is a problem of its own


def _target_problems(
    runs: Sequence[Run], measurements: Sequence[Measurement], expected: Sequence[Mapping[Source, Sequence[Selection]]]
) -> list[str]:
    """What stands against the comparisons between runs."""
    found = []
    selections = {run.identity.run_id: of_run for run, of_run in zip(runs, expected, strict=True)}
    for measurement in measurements:
        target, source = measurement.target, measurement.source
        if target is None:
            continue
        if whole := target_problems(target, runs):
            found += whole
            continue
        for run in runs:
            for other in target.runs(run, runs):
                here, there = (selections[one.identity.run_id][source] for one in (run, other))
                if other is not run and (problem := unmatched(target, run, here, other, there)):
                    found.append(f"{measurement.metric_name} of {source.name} {source.kind}: {problem}")
    return found


Place = tuple[str, int | None, int | None]


def _place(selection: Selection) -> Place:
    """What tells a selection from the others of its source: module, layer, reference layer."""
    return selection.module, selection.layer, selection.reference_layer


class _Cells:
    """What each measurement is at each step of each run, or why it is missing there."""

    def __init__(
        self,
        runs: Sequence[Run],
        config: AnalysisConfig,
        measurements: Sequence[Measurement],
        expected: Sequence[Mapping[Source, Sequence[Selection]]],
    ) -> None:
        self.runs, self.measurements = runs, measurements
        ids = [run.identity.run_id for run in runs]
        self.expected = dict(zip(ids, expected, strict=True))
        self.analysed = {run.identity.run_id: steps_of(run, config) for run in runs}
        self.held = {run.identity.run_id: holders(run) for run in runs}
        self.still = {run.identity.run_id: StandingStill.of(run) for run in runs}
        self.found: dict[tuple[str, Source, int], dict[Place, Selection] | str] = {}

    def __iter__(self) -> Iterator[Cell]:
        for run in self.runs:
            run_id = run.identity.run_id
            for step in self.analysed[run_id]:
                for measurement in self.measurements:
                    for like in self.expected[run_id][measurement.source]:
                        yield from self._of(run, step, measurement, like)

    def _of(self, run: Run, step: int, measurement: Measurement, like: Selection) -> Iterator[Cell]:
        """The cells of one selection: one for each that it is compared with, or the one."""
        here, missing, same_as = self._find(run, measurement.source, step, _place(like))
        target = measurement.target
        if target is None:
            yield Cell(run, step, measurement, here or like, None, missing, same_as)
            return
        for other, other_step in target.checkpoints(run, step, self.runs, self.analysed):
            itself = other is run and other_step == step
            there = self.expected[other.identity.run_id][measurement.source]
            for layer, module in target.counterparts(like, there, same_checkpoint=itself):
                found, why, doubt = self._find(other, measurement.source, other_step, (module, layer, None))
                reference = Reference(other, other_step, layer, found, doubt)
                without = missing or (f"the reference: {why}" if why else None)
                yield Cell(run, step, measurement, here or like, reference, without, same_as)

    def _find(
        self, run: Run, source: Source, step: int, place: Place
    ) -> tuple[Selection | None, str | None, int | None]:
        """What the source finds there, or why nothing; and another step that holds the same, if there is one."""
        run_id = run.identity.run_id
        if (run_id, source, step) not in self.found:
            self.found[run_id, source, step] = _select(run, source, step)
        there = self.found[run_id, source, step]
        if isinstance(there, str):
            return None, there, None
        selection = there.get(place)
        if selection is None:
            return None, f"step {step} does not have it", None
        held, still = self.held[run_id], self.still[run_id]
        steps = set.intersection(*(held[row.kind, row.module, row.sha256] for row in selection.rows)) - {step}
        return selection, None, min((other for other in steps if not still.between(step, other)), default=None)


def _select(run: Run, source: Source, step: int) -> dict[Place, Selection] | str:
    """What the source finds at a step, by place; or why it finds nothing."""
    if step in run.skipped:
        return run.skipped[step]
    if step not in run.manifests:
        return f"there is no step {step}"
    try:
        selections = _selections(source, run.manifests[step])
    except ComponentError as error:
        return f"step {step}: {error}"
    return {_place(selection): selection for selection in selections}
