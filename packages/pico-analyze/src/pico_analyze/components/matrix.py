"""The matrix that a component yields and a metric measures.

Components stand to the left and metrics to the right of this file: a component says which numbers of a
checkpoint belong together, a metric asks for the entries, the spectrum or the geometry of the rows. All of it
is computed in float64 from the stored numbers, whatever their dtype.

Shapes: m rows (samples, or outputs of a weight), n columns (features, or inputs), r inner dimension of a
product, b blocks side by side.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

_EPSILON = torch.finfo(torch.float64).eps

_CHOLESKY_LIMIT = 1e8
"""Above this bound on the squared condition number of the normalised rows R comes from a QR: what Cholesky gives is wrong
by 1e-16 of that number, which the bound exceeds up to r^2 times."""

_SQUARES_IN_RANGE = (1e-100, 1e100)

_GRAM_CONDITION_LIMIT = 1e5
"""Above this condition number singular values come from an SVD. An eigenvalue of the Gram matrix is wrong by
about 1e-16 of the largest one, hence the smallest singular value by 1e-16 condition^2 of itself: measured,
2e-7 at this limit and 3e-6 at ten times it."""


class Undefined(ValueError):  # an outcome of a measurement, not a mistake
    """A measure has no value on this input; the text is the reason that goes into the result row."""

    @property
    def reason(self) -> str:
        """Why there is no value."""
        return str(self)


class Flagged(float):
    """A value that stands, with a reason to read it with care; otherwise an ordinary float."""

    reason: str

    def __new__(cls, value: float, reason: str) -> Self:
        """A float with its ``reason``."""
        self = super().__new__(cls, value)
        self.reason = reason
        return self


@dataclass(frozen=True)
class Spectrum:
    """The singular values of a matrix."""

    values: Tensor
    """Float64, descending, one per singular value that counts (`Matrix.n_values`). Those at or below
    max(m, n) 2.2e-16 sigma_1 cannot be told from rounding and are exactly 0."""
    shape: tuple[int, int]
    """(m, n) of the full matrix."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """An m x n matrix, stored as it is or as a product of thin factors; build one by `dense` or `product`."""

    left: Tensor
    """The matrix itself (right is None), or the left factor, (m, b r)."""
    right: Tensor | None
    """The right factors of b blocks that stand side by side, (b, r, n / b)."""
    n_values: int
    """How many singular values count; 0 for a vector."""
    dtype: str
    """Name of the dtype in which the numbers are stored, such as "bfloat16"."""

    @classmethod
    def dense(cls, tensor: Tensor, dtype: str | None = None) -> Self:
        """A stored tensor; a 1-D one has entries but no spectrum and no rows."""
        n_values = min(tensor.shape) if tensor.ndim == 2 else 0
        return cls(tensor.detach(), None, n_values, dtype or _name(tensor.dtype))

    @classmethod
    def product(cls, left: Tensor, right: Tensor, n_values: int | None = None, dtype: str | None = None) -> Self:
        """``left @ right``, or such products side by side, which is never multiplied out for spectra.

        Args:
            left: (m, r); for b products side by side their left factors side by side, (m, b r).
            right: (r, n); for b products side by side (b, r, n): [left_1 right_1, ..., left_b right_b].
            n_values: Singular values that count; as many as a product of these shapes can have when None.
            dtype: Name of the storage dtype; that of ``left`` when None.
        """
        blocks = right if right.ndim == 3 else right.unsqueeze(0)  # (b, r, n)
        b, r, n = blocks.shape
        assert left.shape[1] == b * r, f"left {tuple(left.shape)} does not fit right {tuple(right.shape)}"
        most = min(left.shape[0], b * r, b * n)
        assert n_values is None or n_values <= most, f"{n_values} singular values of at most {most}"
        return cls(left.detach(), blocks.detach(), n_values or most, dtype or _name(left.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """(m, n); (n,) for a vector."""
        if self.right is None:
            return tuple(self.left.shape)
        return self.left.shape[0], self.right.shape[0] * self.right.shape[2]

    def entries(self) -> Tensor:
        """The stored tensor, or the product in float64: the one place that multiplies out."""
        return self.left if self.right is None else _times(self.left.double(), self.right.double())

    def rows(self) -> Tensor:
        """Float64 (m, k) with the inner products between rows, hence the singular values, of the matrix.

        A product needs no more columns than its inner dimension: with right^T = Q R (thin QR) the matrix is
        (left R^T) Q^T, and Q^T changes no inner product. The scales of the factors do not matter: R is
        accurate column by column.

        Raises:
            Undefined: A vector, or an entry (of a factor) is not finite.
        """
        if self.left.ndim != 2:
            what = "vector" if self.left.ndim == 1 else f"tensor of {self.left.ndim} axes"
            raise Undefined(f"a {what}, not a matrix")
        largest_magnitude(self.left)
        if self.right is None:
            return self.left.double()
        largest_magnitude(self.right)
        return _times(self.left.double(), _triangles(self.right.double()).mT)

    def project(self, basis: Tensor) -> Tensor:
        """basis^T @ matrix, (k, n), for a float64 basis (m, k); a product is contracted from the left."""
        onto_left = basis.mT @ self.left.double()
        return onto_left if self.right is None else _times(onto_left, self.right.double())

    def spectrum(self) -> Spectrum:
        """The singular values, computed once.

        Raises:
            Undefined: A vector, or an entry (of a factor) is not finite.
        """
        return self._spectrum

    @cached_property
    def _spectrum(self) -> Spectrum:
        values = singular_values(self.rows())[: self.n_values]
        m, n = self.shape
        rounding = max(m, n) * _EPSILON * values[0]
        return Spectrum(torch.where(values > rounding, values, 0.0), (m, n))


def singular_values(x: Tensor) -> Tensor:
    """All min(m, n) singular values of a finite (m, n) tensor of any dtype: float64, descending.

    They are the roots of the eigenvalues of the smaller Gram matrix in float64, several times faster
    than an SVD, or come from an SVD in float64 where the Gram matrix would lose the small ones.
    """
    a, scale, largest = x.detach().double().numpy(), 1.0, largest_magnitude(x)
    if not _SQUARES_IN_RANGE[0] < largest < _SQUARES_IN_RANGE[1]:
        scale = math.ldexp(1.0, math.frexp(largest)[1] - 1)  # a power of two: exact
        a = a / scale
    gram = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    squares = scipy.linalg.eigh(gram, eigvals_only=True, driver="evr", check_finite=False, overwrite_a=True)
    if squares[0] * _GRAM_CONDITION_LIMIT**2 > squares[-1]:
        values = np.sqrt(squares[::-1])
    else:
        values = scipy.linalg.svdvals(a, check_finite=False)
    return torch.from_numpy(values * scale)


def as_matrix(x: Tensor | Matrix) -> Matrix:
    """A matrix as it is, a tensor as the matrix of its entries."""
    return x if isinstance(x, Matrix) else Matrix.dense(x)


def centred(x: Tensor | Matrix, name: str) -> Tensor:
    """(m, k) float64 with the geometry of the rows of ``x`` less their mean, at most 1 in magnitude.

    Raises:
        Undefined: A vector, an entry that is not finite, or every column of ``name`` is constant.
    """
    rows = as_matrix(x).rows()
    moved = rows - rows.mean(0)
    scale = float(moved.abs().max())
    if scale <= max(rows.shape) * _EPSILON * float(rows.abs().max()):
        raise Undefined(f"every feature of {name} is constant over the samples")
    return moved / scale


def n_samples(a: Tensor, b: Tensor) -> int:
    """The number of rows of both.

    Raises:
        Undefined: They differ.
    """
    if len(a) != len(b):
        raise Undefined(f"{len(a)} samples of x, {len(b)} of y: they are not the same samples")
    return len(a)


def largest_magnitude(x: Tensor) -> float:
    """The largest |entry|.

    Raises:
        Undefined: There is no entry, or one is not finite.
    """
    if x.numel() == 0:
        raise Undefined("no entries")
    low, high = torch.aminmax(x.detach())  # both are nan if any entry is
    largest = max(abs(low.item()), abs(high.item()))
    if not math.isfinite(largest):
        raise Undefined(f"{x.numel() - int(x.isfinite().sum())} of {x.numel()} entries are not finite")
    return float(largest)


def _triangles(blocks: Tensor) -> Tensor:
    """R of the thin QR of each block's transpose, but for signs: (b, r, n) -> (b, k, r), k = min(r, n).

    Where the normalised rows of the blocks are well conditioned, by the Cholesky factors of their Gram matrices, which is
    several times faster and as accurate.
    """
    b, r, n = blocks.shape
    if r <= n:
        gram = blocks @ blocks.mT
        norms = gram.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(2)  # (b, r, 1)
        lower: Tensor
        lower, _ = torch.linalg.cholesky_ex(gram / norms / norms.mT)
        eye = torch.eye(r, dtype=torch.float64).expand(b, r, r)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        bound = r * inverse.square().sum((1, 2)).max()  # nan, inf where Cholesky failed or squares left the range
        if bound < _CHOLESKY_LIMIT and lower.isfinite().all():
            return norms.mT * lower.mT
    triangles: Tensor
    _, triangles = torch.linalg.qr(blocks.mT, mode="r")
    return triangles


def _times(left: Tensor, blocks: Tensor) -> Tensor:
    """[left_1 blocks_1, ..., left_b blocks_b]: (m, b r) and (b, r, n) give (m, b n)."""
    b, r, _ = blocks.shape
    if b == 1:
        return left @ blocks[0]
    return torch.einsum("mbr,brn->mbn", left.reshape(-1, b, r), blocks).flatten(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
