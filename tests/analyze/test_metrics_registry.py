import contextlib
import inspect
import itertools
import math
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_analyze.components.matrix import Flagged, Matrix, Undefined
from pico_analyze.metrics import METRICS, Metric, MetricError, Number, get_metric


def settings_of_each():
    """Every metric with every choice of its parameters."""
    for name, metric in METRICS.items():
        if name in (
            "eigenvalue_positivity",
            "composition_score",
        ):  # of some matrices only: have such tests of their own
            continue
        offered = [
            (parameter.default,) if isinstance(parameter, Number) else parameter.allowed
            for parameter in metric.parameters.values()
        ]
        for values in itertools.product(*offered):
            chosen = dict(zip(metric.parameters, values, strict=True))
            for key, parameter in metric.parameters.items():
                only = parameter.only if isinstance(parameter, Number) else None
                if only is not None and chosen[only[0]] != only[1]:
                    del chosen[key]
            yield pytest.param(name, chosen, id="-".join([name, *map(str, chosen.values())]))


every_metric = pytest.mark.parametrize(("name", "chosen"), list(settings_of_each()))
every_name = pytest.mark.parametrize("name", METRICS)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compute(name, chosen, x, y):
    """The metric on x, or on the pair (x, y) if it takes two."""
    metric = METRICS[name]
    matrices = [x if isinstance(x, Matrix) else Matrix.dense(x), y if isinstance(y, Matrix) else Matrix.dense(y)]
    return metric.compute(*matrices if metric.consumes == "pair" else matrices[:1], **chosen)


def same(name, chosen, pair, other, rel, abs=0.0, factor=1.0):
    """The metric has ``factor`` times the value on one pair that it has on the other, or no value for the same reason."""
    outcomes = []
    for x, y in (pair, other):
        try:
            outcomes.append(compute(name, chosen, x, y))
        except Undefined as error:
            outcomes.append(error.reason)
    first, second = outcomes
    if isinstance(first, str) or isinstance(second, str):
        assert first == second
    else:
        assert second == pytest.approx(first * factor, rel=rel, abs=abs)


def function(name):
    module, _, attribute = METRICS[name].function.partition(":")
    return getattr(import_module(module), attribute)


class TestTable:
    def test_no_torch_to_read_it(self):
        code = "import sys, pico_analyze.metrics; sys.exit(sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)) or 0)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    @every_name
    def test_describes_itself(self, name):
        metric = METRICS[name]
        assert metric.summary
        assert metric.range.startswith(("[", "("))
        assert len(metric.meaning.split()) > 20

    @every_name
    def test_docstring_has_source_range_and_example(self, name):
        doc = inspect.getdoc(function(name))
        for part in ("Source: ", ">>> "):
            assert part in doc
        assert any(word in doc for word in ("In [0, 1", "In (0, 1", "In [-1", "At least", "in [-1, 1]"))
        assert "ndefined" in doc

    @every_name
    def test_parameters_are_those_of_the_function(self, name):
        arguments = list(inspect.signature(function(name)).parameters.values())
        n_inputs = 2 if METRICS[name].consumes == "pair" else 1
        assert [a.name for a in arguments[n_inputs:]] == list(METRICS[name].parameters)
        for argument in arguments[n_inputs:]:
            default = None if argument.default is inspect.Parameter.empty else argument.default
            assert METRICS[name].parameters[argument.name].default == default

    def test_get_metric(self):
        assert get_metric("cka") is METRICS["cka"]
        with pytest.raises(ValueError, match=r"no metric 'ginni'; there are gini, .*; did you mean 'gini'\?"):
            get_metric("ginni")
        with pytest.raises(ValueError, match=r"no metric 'xyzzy'; there are gini, hoyer, .*mutual_knn$"):
            get_metric("xyzzy")


class TestParameters:
    def test_defaults_are_filled_in(self):
        assert METRICS["cka"].resolve({}) == {"estimator": "debiased", "kernel": "linear"}
        assert METRICS["pwcca"].resolve({"weights_from": "y"}) == {"weights_from": "y"}
        assert METRICS["gini"].resolve({}) == {}
        minibatch = METRICS["cka"].resolve({"estimator": "minibatch"})
        assert minibatch == {"estimator": "minibatch", "kernel": "linear", "batch": 256}

    def test_a_parameter_of_one_choice_alone(self):
        with pytest.raises(ValueError, match="batch: is only for estimator minibatch"):
            METRICS["cka"].resolve({"batch": 8})
        with pytest.raises(ValueError, match="batch: 3 is not allowed; needed: a whole number from 4"):
            METRICS["cka"].resolve({"estimator": "minibatch", "batch": 3})

    def test_numbers_have_one_text(self):
        """A row's parameters are its identity: 1 and 1.0 must not be two."""
        for given_ in (1, 1.0):
            resolved = METRICS["dead_units"].resolve({"tolerance": given_})
            assert (resolved, type(resolved["tolerance"])) == ({"tolerance": 1.0}, float)
        assert Number(1, None, default=10).allowed == ("a whole number from 1",)
        assert Number(1, None, default=10).checked(3) == 3
        for bad in (0, 3.0, math.inf, None):
            with pytest.raises(ValueError, match="is not allowed; needed: a whole number from 1"):
                Number(1, None, default=10).checked(bad)

    @pytest.mark.parametrize(
        ("name", "given_", "message"),
        [
            ("norm", {}, "norm_type: has to be given; choose one of frobenius, nuclear, spectral, inf, inf_operator"),
            ("dead_units", {"tolerance": -1}, "tolerance: -1 is not allowed; needed: a number from 0 to 1"),
            ("dead_units", {"tolerance": True}, "tolerance: True is not allowed"),
            ("dead_units", {"tolerance": math.nan}, "tolerance: nan is not allowed"),
            ("dead_units", {"tolerance": "0.1"}, "tolerance: '0.1' is not allowed"),
            ("norm", {"norm_type": "fro"}, "norm_type: 'fro' is not allowed; choose one of frobenius"),
            ("gini", {"norm_type": "inf"}, "norm_type: not a parameter of this metric, which has: none"),
            ("cka", {"weights_from": "x"}, "weights_from: not a parameter of this metric, which has: estimator"),
        ],
    )
    def test_faults(self, name, given_, message):
        with pytest.raises(ValueError, match=message):
            METRICS[name].resolve(given_)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """``plugin("name", source)``: a module of that name that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_not_a_finite_number_is_undefined(plugin, value):
    name = plugin(f"{value}_plugin", f"def measure(entries):\n    return float('{value}')\n")
    metric = Metric(f"{name}:measure", "entries", summary="", range="", meaning="")
    with pytest.raises(Undefined, match=f"the result is {value}, not a finite number"):
        metric.compute(Matrix.dense(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "the metric failed: ZeroDivisionError: division by zero"),
        ("return None", "it gave back a NoneType, not a float"),
        ("return True", "it gave back a bool"),
        ("return entries", "it gave back a Tensor"),
        ("return 1 + 0j", "it gave back a complex"),
    ],
)
def test_a_function_that_fails(plugin, body, message):
    name = plugin("breaking_plugin", f"def measure(entries):\n    {body}\n")
    with pytest.raises(MetricError, match=message):
        Metric(f"{name}:measure", "entries", summary="", range="", meaning="").compute(Matrix.dense(torch.ones(2, 2)))


@pytest.mark.parametrize("value", ["2", "np.float32(2)", "np.float64(2)"])
def test_any_real_number_is_a_value(plugin, value):
    name = plugin("number_plugin", f"import numpy as np\ndef measure(entries):\n    return {value}\n")
    metric = Metric(f"{name}:measure", "entries", summary="", range="", meaning="")
    assert metric.compute(Matrix.dense(torch.ones(2, 2))) == 2.0
    assert isinstance(metric.compute(Matrix.dense(torch.ones(2, 2))), float)


@every_metric
class TestEveryMetric:
    def test_is_a_finite_python_float(self, name, chosen):
        value = compute(name, chosen, normal(30, 12), normal(30, 11, seed=1))
        assert type(value) in (float, Flagged)
        assert math.isfinite(value)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_not_finite_is_undefined(self, name, chosen, bad, dtype):
        x = normal(30, 6).to(dtype)
        x[3, 2] = bad
        for matrix in (x, Matrix.product(x, normal(6, 20).to(dtype))):
            with pytest.raises(Undefined, match="entries are not finite"):
                compute(name, chosen, matrix, normal(30, 5, seed=1))

    @pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (2, 2), (3, 3), (5,), (0, 4)])
    @pytest.mark.parametrize("fill", ["zeros", "ones", "normal"])
    def test_small_and_degenerate_inputs_have_a_value_or_a_reason(self, name, chosen, shape, fill):
        x = {"zeros": torch.zeros(shape), "ones": torch.ones(shape), "normal": normal(*shape)}[fill]
        with contextlib.suppress(Undefined):  # anything but that would end a run
            assert math.isfinite(compute(name, chosen, x, normal(*shape, seed=1)))

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64]
    )
    def test_storage_dtype_equals_float64_of_the_stored_numbers(self, name, chosen, dtype):
        x, y = (10 * normal(30, 12)).to(dtype), (10 * normal(30, 12, seed=1)).to(dtype)
        assert compute(name, chosen, x, y) == pytest.approx(compute(name, chosen, x.double(), y.double()), rel=1e-9)

    @settings(max_examples=10, deadline=None)
    @given(p=st.integers(1, 12), q=st.integers(1, 12), seed=st.integers(0, 99), exponent=st.integers(-60, 60))
    def test_scale(self, name, chosen, p, q, seed, exponent):
        x, y, scale = normal(30, p, seed=seed), normal(30, q, seed=seed + 1), 2.0**exponent
        factor = scale if name == "norm" else 1.0
        same(name, chosen, (x, y), (-scale * x, y), rel=1e-7, abs=1e-12 * factor, factor=factor)

    @settings(max_examples=10, deadline=None)
    @given(p=st.integers(1, 12), q=st.integers(1, 12), seed=st.integers(0, 99))
    def test_order_of_rows_and_columns(self, name, chosen, p, q, seed):
        generator = torch.Generator().manual_seed(seed)
        x, y = normal(30, p, seed=seed), normal(30, q, seed=seed + 1)
        rows = torch.randperm(30, generator=generator)
        x2 = x[rows][:, torch.randperm(p, generator=generator)]
        y2 = y[rows][:, torch.randperm(q, generator=generator)]
        same(name, chosen, (x, y), (x2, y2), rel=1e-7, abs=1e-12)

    @settings(max_examples=10, deadline=None)
    @given(r=st.integers(1, 6), b=st.integers(1, 2), seed=st.integers(0, 99))
    def test_product_equals_dense(self, name, chosen, r, b, seed):
        # As wide as its rank, so that the product has no structural zeros and both count the same values.
        x = Matrix.product(normal(30, b * r, seed=seed), normal(b, r, r, seed=seed + 1))
        y = Matrix.product(normal(30, r, seed=seed + 2), normal(r, 40, seed=seed + 3))
        same(name, chosen, (x.entries(), y.entries()), (x, y), rel=1e-6, abs=1e-12)

    def test_leaves_its_input_alone(self, name, chosen):
        for dtype in (torch.float64, torch.float32):
            x, y = normal(30, 12).to(dtype), normal(30, 11, seed=1).to(dtype)
            before = x.clone(), y.clone()
            compute(name, chosen, x, y)
            assert torch.equal(x, before[0])
            assert torch.equal(y, before[1])
