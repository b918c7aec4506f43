"""What every measure of similarity does alike: storage, limits, and what has no value."""

import math
from functools import partial

import pytest
import torch
from representations import normal, related

from pico_analyze.components.matrix import Matrix, Undefined
from pico_analyze.metrics.cca import mean_cca, pwcca, svcca
from pico_analyze.metrics.similarity import cka, mutual_knn, procrustes, rsa

MEASURES = {
    "cka": cka,
    "rbf": partial(cka, kernel="rbf"),
    "procrustes": procrustes,
    "rsa": rsa,
    "knn": partial(mutual_knn, k=3, distance="euclidean"),
    "pwcca": pwcca,
    "mean_cca": mean_cca,
    "svcca": svcca,
}
each = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
def test_storage_dtype(measure, dtype):
    x, y = ((10 * z).to(dtype) for z in related(40, 6, 5))
    assert measure(x, y) == pytest.approx(measure(x.double(), y.double()), rel=1e-12)
    assert measure(x, y) == pytest.approx(measure(Matrix.dense(x), Matrix.dense(y)), rel=1e-12)


@each
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_constant_features(measure, constant, dtype):
    flat = torch.full((10, 3), constant, dtype=dtype)
    with pytest.raises(Undefined, match="every feature of y is constant"):
        measure(normal(10, 3), flat)
    product = Matrix.product(flat, normal(3, 20))
    with pytest.raises(Undefined, match="every feature of x is constant"):
        measure(product, normal(10, 3))


@each
def test_other_samples(measure):
    with pytest.raises(Undefined, match="10 samples of x, 9 of y"):
        measure(normal(10, 3), normal(9, 3))


@each
def test_vectors(measure):
    with pytest.raises(Undefined, match="a vector, not a matrix"):
        measure(normal(10), normal(10))


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(measure, bad):
    x = normal(10, 3)
    x[2, 1] = bad
    with pytest.raises(Undefined, match="1 of 30 entries are not finite"):
        measure(normal(10, 3), x)


@each
@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_extreme_scales(measure, scale):
    x, y = related(40, 6, 5)
    assert measure(x * scale, y / scale) == pytest.approx(measure(x, y), rel=1e-9)
