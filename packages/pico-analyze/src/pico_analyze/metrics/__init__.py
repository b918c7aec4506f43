"""The table of metrics: what each is called, what it consumes, what it means. Computing one imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from pico_analyze import plugins

if TYPE_CHECKING:
    from pico_analyze.components.matrix import Matrix


class MetricError(ValueError):
    """The function of a metric failed, or gave back no number: a mistake in it, not an undefined value."""


Consumes = Literal["entries", "spectrum", "matrix", "pair"]


@dataclass(frozen=True)
class Parameter:
    """A choice that a metric offers."""

    allowed: tuple[str, ...]
    default: str | None
    """None: it has to be given."""


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    function: str
    """Import path, ``module:function``."""
    consumes: Consumes
    """What the function is called with: `entries` the tensor of all entries, `spectrum` the tensor of
    singular values, `matrix` the Matrix, from which it takes what its parameters ask for, `pair` two of them,
    x and y, whose rows are the same samples."""
    summary: str
    range: str
    meaning: str
    """What it says, and when it misleads."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def resolve(self, given: Mapping[str, Any]) -> dict[str, str]:
        """All parameters with their values, defaults filled in.

        Raises:
            ValueError: A parameter that the metric does not have, one that is missing, a value not allowed.
        """
        for name in given:
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise ValueError(f"{name}: not a parameter of this metric, which has: {known}")
        resolved = {}
        for name, parameter in self.parameters.items():
            value = given.get(name, parameter.default)
            if value not in parameter.allowed:
                fault = "has to be given" if value is None else f"{value!r} is not allowed"
                raise ValueError(f"{name}: {fault}; choose one of {', '.join(parameter.allowed)}")
            resolved[name] = value
        return resolved

    def compute(self, *matrices: "Matrix", **parameters: str) -> float:
        """The value on one matrix, or on two for a pair.

        Raises:
            Undefined: There is no value, or it does not fit into a float64.
            MetricError: The function raises anything else, or returns something else than a number.
        """
        from pico_analyze.components.matrix import Undefined

        module, _, function = self.function.partition(":")
        measure = getattr(import_module(module), function)
        arguments: tuple[Any, ...] = matrices
        if self.consumes == "entries":
            arguments = tuple(matrix.entries() for matrix in matrices)
        elif self.consumes == "spectrum":
            arguments = tuple(matrix.spectrum().values for matrix in matrices)
        try:
            value = measure(*arguments, **self.resolve(parameters))
        except (Undefined, MemoryError):
            raise
        except Exception as error:
            raise MetricError(f"the metric failed: {type(error).__name__}: {error}") from error
        if not isinstance(value, Real) or isinstance(value, bool):
            raise MetricError(f"the metric failed: it gave back a {type(value).__name__}, not a float")
        if not isfinite(value):
            raise Undefined(f"the result is {value}, not a finite number")
        return value if isinstance(value, float) else float(value)

    def problem(self) -> str | None:
        """Why the metric cannot be used, None where it can; imports its function."""
        if self.consumes not in get_args(Consumes):
            return f"consumes is {self.consumes!r}, not one of {', '.join(get_args(Consumes))}"
        try:
            function = plugins.resolved(self.function)
        except plugins.PluginError as error:
            return f"function: {error}"
        return None if callable(function) else f"function: {self.function!r} cannot be called"


METRICS: dict[str, Metric] = {
    "gini": Metric(
        function="pico_analyze.metrics.sparsity:gini",
        consumes="entries",
        summary="inequality of the magnitudes of the entries",
        range="[0, 1)",
        meaning="0 when all magnitudes are equal, 1 - 1/n when one of n entries holds everything; 0.41 for "
        "a normal distribution, whatever its scale. It sees the whole distribution, so it rises with heavy "
        "tails as well as with zeros, and says nothing about where the large entries are.",
    ),
    "hoyer": Metric(
        function="pico_analyze.metrics.sparsity:hoyer",
        consumes="entries",
        summary="sparsity from the ratio of the 1-norm to the 2-norm",
        range="[0, 1]",
        meaning="0 when all magnitudes are equal, 1 when exactly one entry is not zero; 0.2 for many "
        "entries from a normal distribution. A few outliers move it through the 2-norm. The value of noise "
        "depends slightly on the number of entries, so compare small matrices with care.",
    ),
    "per": Metric(
        function="pico_analyze.metrics.spectral:per",
        consumes="spectrum",
        summary="proportional effective rank: exp(entropy of the spectrum) / number of singular values",
        range="(0, 1]",
        meaning="1 when all singular values are equal, 1/k when one of k is not zero. It weighs singular "
        "values, not their squares, so a long tail of small ones counts. Random matrices of another aspect "
        "ratio have another value: compare with initialisation rather than across shapes.",
    ),
    "condition_number": Metric(
        function="pico_analyze.metrics.spectral:condition_number",
        consumes="spectrum",
        summary="largest over smallest singular value",
        range="[1, 4.5e15)",
        meaning="1 for a multiple of an isometry; undefined for a numerically singular matrix. The "
        "smallest singular value alone decides, so the number scatters widely: for square random matrices "
        "of size d it is of the order of d, often many times that. Look at many matrices, on a log axis.",
    ),
    "norm": Metric(
        function="pico_analyze.metrics.spectral:norm",
        consumes="matrix",
        summary="size of a matrix",
        range="[0, inf)",
        meaning="frobenius: root of the sum of squares; nuclear: sum of the singular values; spectral: the "
        "largest one; inf: the largest absolute entry; inf_operator: the largest absolute row sum. All but "
        "inf grow with the shape at equal scale of the entries, so normalise before comparing sizes.",
        parameters={"norm_type": Parameter(("frobenius", "nuclear", "spectral", "inf", "inf_operator"), default=None)},
    ),
    "cka": Metric(
        function="pico_analyze.metrics.similarity:linear_cka",
        consumes="pair",
        summary="linear centred kernel alignment of two representations of the same samples",
        range="[-1, 1]; plug_in: [0, 1]",
        meaning="1 when the similarities between samples agree up to scale. Unchanged by rotations, "
        "scaling and shifts of the features, not by other linear maps: directions of large variance "
        "decide, so one outlier feature or sample can. Of unrelated features the debiased estimate "
        "scatters about 0, also below; the plug-in estimate rises towards 1 as samples become few against "
        "features.",
        parameters={"estimator": Parameter(("debiased", "plug_in"), default="debiased")},
    ),
    "pwcca": Metric(
        function="pico_analyze.metrics.similarity:pwcca",
        consumes="pair",
        summary="mean canonical correlation of two representations, weighted by what one of them expresses",
        range="[0, 1]",
        meaning="1 when every direction of the weighting side is a linear function of the other side. "
        "Unchanged by invertible linear maps of the side that gives no weights; not symmetric. Unrelated "
        "features of k dimensions each already correlate by about sqrt(k/n), so it needs many more samples "
        "than features; it is flagged where some correlations are 1 whatever the data.",
        parameters={"weights_from": Parameter(("x", "y"), default="x")},
    ),
}


def get_metric(name: str, table: Mapping[str, Metric] = METRICS) -> Metric:
    """The metric of that name.

    Raises:
        ValueError: There is none; the message lists those there are and the nearest.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no metric {name!r}; there are {', '.join(table)}{hint}")


def load_metrics(names: Sequence[str] = ()) -> dict[str, Metric]:
    """Our table and those of the plugins: modules or files that hold a dict ``METRICS`` of the same kind.

    Raises:
        PluginError: A plugin cannot be used, or two tables use one name.
    """
    return plugins.merged(METRICS, "METRICS", names)
