"""Every key that an analysis YAML may hold, and what it means.

A file becomes an ``AnalysisConfig``, or one ``ConfigError`` that lists everything wrong with it. Whether a
metric, a component, a layer or a step exists is not asked here but when the analysis is planned on the runs.
Key names are those of the published Pico files, which load as they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from pico_analyze.strict_yaml import (
    ConfigError,
    Problem,
    Section,
    attributed,
    folder_name_problem,
    overridden,
    read_mapping,
    to_text,
    validated,
)

__all__ = [
    "AnalysisConfig",
    "ComponentEntry",
    "ConfigError",
    "MetricEntry",
    "StepRange",
    "load_config",
    "not_built_yet",
]

Step = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Steps = Annotated[tuple[Step, ...], Strict(False)]  # a YAML list arrives as a list
Texts = Annotated[tuple[Text, ...], Strict(False)]

# The keys of an entry that belong to some metrics only, and what those must give.
OWN_KEYS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "norm_type": (("norm",), "one of frobenius, nuclear, spectral, inf, inf_operator"),
    "target_checkpoint": (("cka", "pwcca"), "a step, last, previous, all, same or nearest_tokens"),
    "estimator": (("cka",), None),
    "batch": (("cka",), None),
    "weights_from": (("pwcca",), None),
}


class StepRange(Section):
    """Evenly spaced steps: start, start + step, ... and the end only when it is hit."""

    start: int = Field(ge=0, description="first step")
    end: int = Field(ge=0, description="last step, if start plus a multiple of step hits it")
    step: int = Field(gt=0, description="distance")

    def problems(self) -> Iterator[Problem]:
        """A range goes up."""
        if self.end < self.start:
            yield Problem("end", self.end, f"must be at least start {self.start}", ("start",))


class ComponentEntry(Section):
    """What a metric is measured on."""

    component_name: str = Field(min_length=1, description="as `pico-analyze ls components` lists them")
    data_type: Literal["weights", "activations", "gradients", "optimizer"] = Field(
        description="kind of the tensors; optimizer = the moments of the optimizer"
    )
    layer_suffixes: Text | dict[str, Text] | None = Field(
        None,
        description="end of the module names, e.g. swiglu.w_2, or a pattern of it, e.g. swiglu.*; for ov_circuit a mapping "
        "with value_layer and output_layer, for qk_circuit with query_layer and key_layer, for compositions all of them; null = by role",
    )
    role: Literal["q", "k", "v", "o", "gate", "up", "down", "embed", "unembed"] | None = Field(
        None, description="what the modules do, in the place of layer_suffixes, for simple and delta"
    )
    layers: Steps | Literal["all"] = Field("all", description="block numbers from 0, or all")
    order: Literal["pico_v0"] | None = Field(
        None, description="pico_v0 = the published product W_V W_O, only for the weights of ov_circuit"
    )

    def problems(self) -> Iterator[Problem]:
        """An empty list of layers selects nothing; the order of the product is a matter of OV weights."""
        if not self.layers:
            yield Problem("layers", self.layers, "selects nothing; list block numbers, or write all")
        if self.role is not None and self.layer_suffixes is not None:
            yield Problem(
                "role", self.role, "stands in the place of layer_suffixes; give one of them", ("layer_suffixes",)
            )
        if self.component_name in ("simple", "delta") and self.role is None and self.layer_suffixes is None:
            yield Problem(
                "layer_suffixes", None, f"is not enough for {self.component_name}; give it, or a role", ("role",)
            )
        if self.role is not None and self.component_name.endswith(("_circuit", "_composition")):
            yield Problem("role", self.role, "is for one module; a circuit finds its own roles", ("component_name",))
        if self.order is not None and (self.component_name, self.data_type) != ("ov_circuit", "weights"):
            yield Problem("order", self.order, "is only for the weights of ov_circuit", ("component_name", "data_type"))


class PermutationNull(Section):
    """What a similarity is compared with: its values when the samples of the reference are permuted."""

    permutations: int = Field(200, ge=1, description="how many; the smallest p-value is 1 / (1 + permutations)")
    quantile: float = Field(0.95, gt=0, lt=1, description="which quantile of them the table holds")
    unit: Literal["sequence", "row"] = Field(
        "sequence",
        description="what is exchanged: whole sequences, or single rows; the tokens of one sequence are alike, so rows make "
        "p-values too small",
    )
    seed: int = Field(0, ge=0, description="of the permutations; the same ones for everything with as many samples")


class Bootstrap(Section):
    """An interval about a value of activations, from random halves of the samples."""

    resamples: int = Field(200, ge=10, description="how many halves")
    level: float = Field(
        0.95, gt=0, lt=1, description="share of repetitions in which the interval should hold the mean value"
    )
    unit: Literal["sequence", "row"] = Field(
        "sequence",
        description="what is left out: whole sequences, or single rows; the tokens of one sequence are alike, so rows make "
        "the interval too narrow",
    )
    seed: int = Field(0, ge=0, description="of the halves; the same ones for everything with as many samples")


class MetricEntry(Section):
    """One metric on some components; the same metric may stand any number of times."""

    if_unknown = (
        "a parameter of the metric that has no key of its own stands under options, as in options: {{{key}: ...}}"
    )

    metric_name: str = Field(min_length=1, description="as `pico-analyze ls metrics` lists them")
    data_split: Literal["train", "val"] | None = Field(
        None,
        description="the batch behind activations and gradients: train = the batch of the step, "
        "val = the held-out probe, the same at every step; weights do not need it",
    )
    components: Annotated[tuple[ComponentEntry, ...], Strict(False)] = Field((), description="what it is measured on")
    norm_type: Literal["frobenius", "nuclear", "spectral", "inf", "inf_operator"] | None = Field(
        None, description="which norm, only for norm; inf = largest absolute entry, as published"
    )
    target_checkpoint: Step | Literal["last", "previous", "all", "same", "nearest_tokens"] | None = Field(
        None,
        description="step that every step is compared with, only for metrics that compare: a number; last = the last of "
        "the run; previous = the one before among those analysed; all = each pair of those analysed, once; with "
        "target_run or target_layers also same = the same step, and nearest_tokens = the one after the nearest number of "
        "tokens",
    )
    target_run: Text | None = Field(
        None,
        description="name of the run, among those analysed, that every run is compared with, on the same probe; all = each "
        "pair of runs, once; null = each run with itself",
    )
    target_layers: Literal["all"] | None = Field(
        None, description="all = each layer is compared with each; null = with the layer of the same number"
    )
    estimator: Literal["debiased", "plug_in", "minibatch"] | None = Field(
        None, description="estimate of the alignment, only for cka; null = debiased"
    )
    batch: int | None = Field(
        None, ge=4, description="samples of a minibatch, only for cka with estimator minibatch; null = 256"
    )
    weights_from: Literal["x", "y"] | None = Field(
        None,
        description="side that weighs the correlations, only for pwcca: x = the step, y = the target; null = x",
    )
    permutation_null: PermutationNull | None = Field(
        None,
        description="compare the value with unrelated samples, only for metrics that compare; {} = with its defaults",
    )
    bootstrap: Bootstrap | None = Field(
        None, description="an interval about the value, only for activations; {} = with its defaults"
    )
    options: dict[str, str | int | float] = Field(
        {}, description="parameters of the metric that have no key of their own, name to value, e.g. {k: 20}"
    )

    @property
    def parameters(self) -> dict[str, str | int | float]:
        """The metric's own parameters that are given; what it is compared with is not one of them."""
        own = {
            "norm_type": self.norm_type,
            "estimator": self.estimator,
            "batch": self.batch,
            "weights_from": self.weights_from,
        }
        return {**self.options, **{name: value for name, value in own.items() if value is not None}}

    @property
    def uncertainty(self) -> dict[str, Any]:
        """How null and interval are computed, where they are asked for, name to settings."""
        asked = {"permutation_null": self.permutation_null, "bootstrap": self.bootstrap}
        return {name: settings.model_dump() for name, settings in asked.items() if settings is not None}

    def problems(self) -> Iterator[Problem]:
        """Each metric has its own keys; an entry measures something; captured tensors have a split."""
        for key, (metrics, needed) in OWN_KEYS.items():
            value = getattr(self, key)
            if value is None and needed and self.metric_name in metrics:
                yield Problem(key, None, f"is not enough for {self.metric_name}; give {needed}", ("metric_name",))
            # A plugin's metric may compare too: whether this one does is asked when the analysis is planned.
            if value is not None and self.metric_name not in metrics and key != "target_checkpoint":
                yield Problem(
                    key,
                    value,
                    f"is only for {' and '.join(metrics)}, not for {self.metric_name}",
                    ("metric_name",),
                )
        yield from self._target_problems()
        for name in self.options.keys() & OWN_KEYS.keys():
            yield Problem("options", name, f"is a key of its own: write {name} beside metric_name", ("metric_name",))
        if not self.components:
            yield Problem("components", [], "is empty: the metric is measured on nothing")
        captured = sorted({c.data_type for c in self.components} - {"weights", "optimizer"})
        if captured and self.data_split is None:
            yield Problem("data_split", None, f"must be train or val for {' and '.join(captured)}", ("components",))

    def _target_problems(self) -> Iterator[Problem]:
        """A reference has a step, and is not the very same matrix."""
        step, others = self.target_checkpoint, {"target_run": self.target_run, "target_layers": self.target_layers}
        for key, value in others.items():
            if value is not None and step is None:
                yield Problem(key, value, "needs a target_checkpoint, for example same", ("target_checkpoint",))
        if step == "same" and not any(others.values()):
            message = "compares each matrix with itself; give a target_run, or target_layers: all"
            yield Problem("target_checkpoint", step, message, tuple(others))
        if step == "nearest_tokens" and self.target_run is None:
            yield Problem("target_checkpoint", step, "is a step of another run; give target_run", ("target_run",))
        if step == "previous" and self.target_run is not None:
            yield Problem("target_checkpoint", step, "is a step of the same run; leave out target_run", ("target_run",))


class WandbConfig(Section):
    """Weights & Biases."""

    entity: str | None = Field(None, description="user or team; needed when save_to_wandb")
    project: str | None = Field(None, description="project; needed when save_to_wandb")


class MonitoringConfig(Section):
    """Where results go."""

    output_dir: str = Field(
        "analysis_results",
        min_length=1,
        description="parent folder of the results, from the working directory",
    )
    save_to_wandb: bool = Field(False, description="log to Weights & Biases")
    wandb: WandbConfig = WandbConfig()

    def problems(self) -> Iterator[Problem]:
        """A tracker needs to know where."""
        for key in ("entity", "project"):
            value = getattr(self.wandb, key)
            if self.save_to_wandb and not value:
                yield Problem(f"wandb.{key}", value, "must not be empty when save_to_wandb is true", ("save_to_wandb",))


class AnalysisConfig(Section):
    """One analysis: which metrics, on what, at which steps of which runs."""

    analysis_name: str | None = Field(
        None, description="sub-folder of monitoring.output_dir; null = <run or suite>_analysis"
    )
    runs: Texts = Field((), description="run folders, globs of them, or <runs_dir>/<suite>; --run-path replaces them")
    steps: Steps | StepRange | Literal["all"] = Field(
        "all", description="checkpoints: a list, a range {start, end, step}, or all that a run has"
    )
    metrics: Annotated[tuple[MetricEntry, ...], Strict(False)] = Field((), description="what is measured")
    plugins: Texts = Field(
        (),
        description="metrics and components of your own: plugins of installed packages (pico-analyze ls plugins), importable "
        "modules, or paths of .py files from the working directory, that hold a dict METRICS or COMPONENTS; they run as they are, so "
        "name only what you trust",
    )
    monitoring: MonitoringConfig = MonitoringConfig()
    write_json: Literal["pico_v0"] | None = Field(
        None,
        description="pico_v0 = also the JSON file of each step and metric that the published code writes",
    )

    def select_steps(self, available: Iterable[int]) -> list[int]:
        """The steps asked for, ascending: all that are ``available``, or those named, available or not."""
        if self.steps == "all":
            return sorted(available)
        if isinstance(self.steps, StepRange):
            return list(range(self.steps.start, self.steps.end + 1, self.steps.step))
        return sorted(set(self.steps))

    def problems(self) -> Iterator[Problem]:
        """The name of an analysis is a folder."""
        if self.analysis_name and (message := folder_name_problem(self.analysis_name)):
            yield Problem("analysis_name", self.analysis_name, message)
        by_role = [c.role for entry in self.metrics for c in entry.components if c.role is not None]
        if self.write_json is not None and by_role:
            yield Problem("write_json", self.write_json, f"names modules: give layer_suffixes, not role {by_role[0]}")
        for entry in self.metrics if self.write_json is not None else ():
            words = [entry.target_run, entry.target_layers, entry.target_checkpoint]
            if other := [word for word in words if word not in (None, "last") and not isinstance(word, int)]:
                message = f"has one value for each step and layer, so compare with a step or last, not with {other[0]}"
                yield Problem("write_json", self.write_json, message)

    def to_yaml(self) -> str:
        """All keys with their values, as YAML that loads back equal."""
        return to_text(self.model_dump(mode="json"))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of an analysis file."""
        return cls.model_json_schema()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> AnalysisConfig:
    """The analysis that the YAML file ``path`` describes: defaults < file < ``key.sub=value`` overrides.

    Raises:
        ConfigError: the file cannot be read, or all that is wrong with what it says.
    """
    path = Path(path)
    raw = overridden(read_mapping(path), overrides)
    try:
        return validated(AnalysisConfig, raw, str(path))
    except ConfigError as error:
        raise attributed(error, overrides) from None


def not_built_yet(config: AnalysisConfig) -> list[str]:
    """What ``config`` asks for that this version cannot do, one line each: key, value, override to use."""
    if not config.monitoring.save_to_wandb:
        return []
    return ["monitoring.save_to_wandb: true: Weights & Biases: not built yet; use monitoring.save_to_wandb=false"]
