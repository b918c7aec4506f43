"""What a line of the table of metrics says, and how it is computed. Only computing imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from pico_analyze import plugins

if TYPE_CHECKING:
    from pico_analyze.components.matrix import Matrix
    from pico_analyze.metrics.null import Scores

Value = str | int | float
Consumes = Literal["entries", "spectrum", "matrix", "pair"]


class MetricError(ValueError):
    """The function of a metric failed, or gave back no number: a mistake in it, not an undefined value."""


@dataclass(frozen=True)
class Parameter:
    """A choice that a metric offers."""

    allowed: tuple[str, ...]
    default: str | None
    """None: it has to be given."""

    def checked(self, value: Any) -> Value:
        """The value; ValueError where it is not one of those allowed."""
        if value not in self.allowed:
            fault = "has to be given" if value is None else f"{value!r} is not allowed"
            raise ValueError(f"{fault}; choose one of {', '.join(self.allowed)}")
        return str(value)


@dataclass(frozen=True)
class Number:
    """A number that a metric takes, from ``least`` to ``most`` inclusive; ``most`` None has no end."""

    least: float
    most: float | None
    default: int | float
    """An int where only whole numbers are allowed."""
    only: tuple[str, str] | None = None
    """Another parameter and its value without which this one does not exist; None: it always does."""

    @property
    def allowed(self) -> tuple[str, ...]:
        """What is allowed, in words."""
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        return (f"{kind} from {self.least:g}" + ("" if self.most is None else f" to {self.most:g}"),)

    def checked(self, value: Any) -> Value:
        """The value, of the type of the default, so that 1 and 1.0 are one; ValueError where it does not fit."""
        types = int if isinstance(self.default, int) else (int, float)
        fits = isinstance(value, types) and not isinstance(value, bool) and value >= self.least
        if not fits or not value <= (float("inf") if self.most is None else self.most) or not isfinite(value):
            raise ValueError(f"{value!r} is not allowed; needed: {self.allowed[0]}")
        return type(self.default)(value)


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
    parameters: Mapping[str, Parameter | Number] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("weights", "activations", "gradients", "optimizer")
    """The kinds of tensors that it makes sense for."""
    over_orders: str | None = None
    """Of a pair: import path of a function of the same arguments that does once what does not depend on the order of the
    samples of y, and gives the value as a function of that order (`null.Scores`). None: the metric is computed anew for
    each."""
    distance: bool = False
    """Of a pair: whether it is 0 for sides that agree entirely and rises from there; otherwise it is 1 there, and falls."""

    @property
    def fits(self) -> tuple[str, ...]:
        """The kinds of tensors that it takes: samples alone can be the same on both sides of a pair."""
        return ("activations",) if self.consumes == "pair" else self.kinds

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Value]:
        """All parameters with their values, defaults filled in.

        Raises:
            ValueError: A parameter that the metric does not have, one that is missing, a value not allowed.
        """
        for name in given:
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise ValueError(f"{name}: not a parameter of this metric, which has: {known}")
        resolved: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            only = parameter.only if isinstance(parameter, Number) else None
            if only is not None and resolved[only[0]] != only[1]:
                if name in given:
                    raise ValueError(f"{name}: is only for {only[0]} {only[1]}")
                continue
            try:
                resolved[name] = parameter.checked(given.get(name, parameter.default))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return resolved

    def compute(self, *matrices: "Matrix", **parameters: Value) -> float:
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
        if not self.function.startswith("pico_analyze."):  # what others do to it must not reach the next metric
            arguments = tuple(argument.clone() for argument in arguments)
        try:
            value = measure(*arguments, **self.resolve(parameters))
        except Undefined:
            raise
        except (Exception, SystemExit) as error:
            raise MetricError(f"the metric failed: {type(error).__name__}: {error}") from error
        if not isinstance(value, Real) or isinstance(value, bool):
            raise MetricError(f"the metric failed: it gave back a {type(value).__name__}, not a float")
        try:
            number = value if isinstance(value, float) else float(value)
        except OverflowError:
            raise Undefined("the result does not fit into a float64") from None
        if not isfinite(number):
            raise Undefined(f"the result is {number}, not a finite number")
        return number

    def scores(self, x: "Matrix", y: "Matrix", **parameters: Value) -> "Scores":
        """The value of a pair as a function of the order of the samples of y.

        Raises:
            Undefined, MetricError: as `compute`.
        """
        from pico_analyze.components.matrix import Undefined
        from pico_analyze.metrics.interval import rows_of

        if self.over_orders is None:
            return lambda order: self.compute(x, rows_of(y, order), **parameters)
        module, _, function = self.over_orders.partition(":")
        try:
            scores: Scores = getattr(import_module(module), function)(x, y, **self.resolve(parameters))
        except Undefined:
            raise
        except (Exception, SystemExit) as error:
            raise MetricError(f"the metric failed: {type(error).__name__}: {error}") from error
        return scores

    def problem(self) -> str | None:
        """Why the metric cannot be used, None where it can; imports its function."""
        if self.consumes not in get_args(Consumes):
            return f"consumes is {self.consumes!r}, not one of {', '.join(get_args(Consumes))}"
        for name, path in (("function", self.function), ("over_orders", self.over_orders)):
            try:
                function = None if path is None else plugins.resolved(path)
            except plugins.PluginError as error:
                return f"{name}: {error}"
            if path is not None and not callable(function):
                return f"{name}: {path!r} cannot be called"
        return None
