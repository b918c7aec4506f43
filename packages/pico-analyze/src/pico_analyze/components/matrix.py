"""The matrix that a component yields and a metric measures.

Components stand to the left and metrics to the right of this file: a component says which numbers of a
checkpoint belong together, a metric asks for the entries, the spectrum or the geometry of the rows. All of it
is computed in float64 from the stored numbers, whatever their dtype.

Shapes: m rows (samples, or outputs of a weight), n columns (features, or inputs), r inner dimension of a
product, b blocks side by side, of which each c, where written, share a right factor.
"""

import dataclasses
import math
from collections.abc import Callable
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
    """The right factors of b blocks that stand side by side, (b / c, r, n / b); c blocks after each other share one."""
    n_values: int
    """How many singular values count; 0 for a vector."""
    dtype: str
    """Name of the dtype in which the numbers are stored, such as "bfloat16"."""
    reduced: Callable[[], Tensor] | None = None
    """What gives `rows` of a product whose factors other products share (`circuits`)."""
    squared: Callable[[], Tensor] | None = None
    """What gives the Gram matrix of the smaller side of such a product, float64."""
    stands_for: tuple[int, int] | None = None
    """The shape of the matrix of which ``left`` has the singular values and nothing else."""
    no_numbers: str | None = None
    """Why the matrix has no numbers at all."""

    def clone(self) -> "Matrix":
        """The same with numbers of its own; nothing that was computed of it comes along."""
        right = None if self.right is None else self.right.clone()
        return dataclasses.replace(self, left=self.left.clone(), right=right, reduced=None, squared=None)

    @classmethod
    def dense(cls, tensor: Tensor, dtype: str | None = None) -> Self:
        """A stored tensor; a 1-D one has entries but no spectrum and no rows."""
        n_values = min(tensor.shape) if tensor.ndim == 2 else 0
        return cls(tensor.detach(), None, n_values, dtype or _name(tensor.dtype))

    @classmethod
    def product(
        cls,
        left: Tensor,
        right: Tensor,
        n_values: int | None = None,
        dtype: str | None = None,
        reduced: Callable[[], Tensor] | None = None,
        squared: Callable[[], Tensor] | None = None,
    ) -> Self:
        """``left @ right``, or such products side by side, which is never multiplied out for spectra.

        Args:
            left: (m, r); for b products side by side their left factors side by side, (m, b r).
            right: (r, n); for b products side by side (b, r, n): [left_1 right_1, ..., left_b right_b]. Fewer, by a divisor c
                of b: each serves c products in turn.
            n_values: Singular values that count; as many as a product of these shapes can have when None.
            dtype: Name of the storage dtype; that of ``left`` when None.
            reduced: Gives `rows`; they are computed from the factors when None.
            squared: Gives the Gram matrix of the smaller side; it is computed from the rows when None.
        """
        blocks = right if right.ndim == 3 else right.unsqueeze(0)  # (b / c, r, n)
        _, r, n = blocks.shape
        fits = left.shape[1] % max(len(blocks) * r, 1) == 0 and left.shape[1] >= len(blocks) * r
        assert fits, f"left {tuple(left.shape)} does not fit right {tuple(right.shape)}"
        b = left.shape[1] // max(r, 1)
        most = min(left.shape[0], b * r, b * n)
        assert n_values is None or n_values <= most, f"{n_values} singular values of at most {most}"
        return cls(left.detach(), blocks.detach(), n_values or most, dtype or _name(left.dtype), reduced, squared)

    @classmethod
    def of_core(cls, core: Tensor, shape: tuple[int, int]) -> Self:
        """A matrix of that shape by a small one that has the same singular values, which is all that is known of it."""
        return cls(core, None, min(core.shape), _name(core.dtype), stands_for=shape)

    @classmethod
    def without_numbers(cls, shape: tuple[int, int], reason: str) -> Self:
        """A matrix that cannot be had: whatever is asked of it is undefined for that reason."""
        return cls(torch.empty(0, 0), None, 0, "", stands_for=shape, no_numbers=reason)

    @property
    def shape(self) -> tuple[int, ...]:
        """(m, n); (n,) for a vector."""
        if self.stands_for is not None:
            return self.stands_for
        if self.right is None:
            return tuple(self.left.shape)
        return self.left.shape[0], self.left.shape[1] // max(self.right.shape[1], 1) * self.right.shape[2]

    def entries(self) -> Tensor:
        """The stored tensor, or the product in float64: the one place that multiplies out.

        Raises:
            Undefined: Only the singular values are known (`of_core`).
        """
        if self.stands_for is not None:
            raise Undefined(self.no_numbers or "only its singular values are known")
        return self.left if self.right is None else times(self.left.double(), self.right.double())

    def rows(self) -> Tensor:
        """Float64 (m, k) with the inner products between rows, hence the singular values, of the matrix.

        A product needs no more columns than its inner dimension: with right^T = Q R (thin QR) the matrix is
        (left R^T) Q^T, and Q^T changes no inner product. The scales of the factors do not matter: R is
        accurate column by column.

        Raises:
            Undefined: A vector, or an entry (of a factor) is not finite.
        """
        self._check()
        if self.reduced is not None:
            return self.reduced()
        return self.left.double() if self.right is None else times(self.left.double(), triangles(self.right).mT)

    def project(self, basis: Tensor) -> Tensor:
        """basis^T @ matrix, (k, n), for a float64 basis (m, k); a product is contracted from the left."""
        onto_left = basis.mT @ self.left.double()
        return onto_left if self.right is None else times(onto_left, self.right.double())

    def spectrum(self) -> Spectrum:
        """The singular values, computed once.

        Raises:
            Undefined: A vector, or an entry (of a factor) is not finite.
        """
        return self._spectrum

    def _check(self) -> None:
        """Raises `Undefined` unless it is a matrix of finite numbers."""
        if self.no_numbers is not None:
            raise Undefined(self.no_numbers)
        if self.left.ndim != 2:
            what = "vector" if self.left.ndim == 1 else f"tensor of {self.left.ndim} axes"
            raise Undefined(f"a {what}, not a matrix")
        for factor in (self.left, self.right) if self.right is not None else (self.left,):
            largest_magnitude(factor)

    @cached_property
    def _spectrum(self) -> Spectrum:
        values = None if self.squared is None else _roots(self.squared())  # None too where an entry is not finite
        if values is None:
            values = singular_values(self.rows())
        values = values[: self.n_values]
        m, n = self.shape
        rounding = max(m, n) * _EPSILON * values[0]
        return Spectrum(torch.where(values > rounding, values, 0.0), (m, n))


def singular_values(x: Tensor) -> Tensor:
    """All min(m, n) singular values of a finite (m, n) tensor of any dtype: float64, descending.

    They are the roots of the eigenvalues of the smaller Gram matrix in float64, several times faster
    than an SVD, or come from an SVD in float64 where the Gram matrix would lose the small ones.
    """
    a, scale, largest = x.detach().double(), 1.0, largest_magnitude(x)
    if not _SQUARES_IN_RANGE[0] < largest < _SQUARES_IN_RANGE[1]:
        scale = math.ldexp(1.0, math.frexp(largest)[1] - 1)  # a power of two: exact
        a = a / scale
    values = _roots(gram(a if a.shape[1] <= a.shape[0] else a.mT))
    if values is None and _on_cpu(a):
        values = torch.from_numpy(scipy.linalg.svdvals(a.numpy(), check_finite=False))
    elif values is None:
        values = torch.linalg.svdvals(a).cpu()
    found: Tensor = values * scale
    return found


def gram(a: Tensor) -> Tensor:
    """a^T a of a float64 (m, k) tensor, (k, k); on the CPU by numpy, which does half the work for a matrix and itself."""
    if not _on_cpu(a):
        return a.mT @ a
    array = a.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # whoever needs it looks
        return torch.from_numpy(array.T @ array)


def plus_gram(total: Tensor | None, a: Tensor) -> Tensor:
    """total + a^T a, of which the lower triangle is right; ``total`` is overwritten, or None for zeros. As `gram`."""
    if not _on_cpu(a):
        return a.mT @ a if total is None else total.addmm_(a.mT, a)
    given = {} if total is None else {"c": total.numpy().T, "beta": 1.0, "overwrite_c": True}
    upper = scipy.linalg.blas.dsyrk(1.0, a.numpy(), trans=True, **given)  # of the transposed, which is the lower one
    return torch.from_numpy(upper.T)


def _roots(squared: Tensor) -> Tensor | None:
    """Roots of the eigenvalues of a Gram matrix, descending, on the CPU; None where the small ones would be wrong."""
    low, high = squared.diagonal().aminmax()
    if not (_SQUARES_IN_RANGE[0] ** 2 < float(high) < _SQUARES_IN_RANGE[1] ** 2 and float(low) >= 0):
        return None
    squares: Tensor = torch.linalg.eigvalsh(squared).cpu()  # of the lower triangle
    if not float(squares[0]) * _GRAM_CONDITION_LIMIT**2 > float(squares[-1]):
        return None
    roots: Tensor = squares.flip(0).sqrt()
    return roots


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
    scale = _largest(moved)
    if scale <= max(rows.shape) * _EPSILON * _largest(rows):
        raise Undefined(f"every feature of {name} is constant over the samples")
    return moved.div_(scale)


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
    largest = _largest(x)
    if not math.isfinite(largest):
        raise Undefined(f"{x.numel() - int(x.isfinite().sum())} of {x.numel()} entries are not finite")
    return largest


def _largest(x: Tensor) -> float:
    """The largest |entry|; nan if any entry is."""
    low, high = torch.aminmax(x.detach())
    return max(abs(float(low)), abs(float(high)))


def triangles(blocks: Tensor, grams: Tensor | None = None) -> Tensor:
    """R of the thin QR of each block's transpose, but for signs: (b, r, n) of any dtype -> (b, k, r) float64, k = min(r, n).

    Where the normalised rows of the blocks are well conditioned, by the Cholesky factors of their Gram matrices, which is
    several times faster and as accurate. ``grams`` are these matrices, (b, r, r) float64, where they are known.
    """
    b, r, n = blocks.shape
    if r <= n:
        if grams is None:
            grams = torch.stack([gram(block.double().mT) for block in blocks])
        norms = grams.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(2)  # (b, r, 1)
        lower: Tensor
        lower, _ = torch.linalg.cholesky_ex(grams / norms / norms.mT)
        eye = torch.eye(r, dtype=torch.float64, device=blocks.device).expand(b, r, r)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        bound = r * inverse.square().sum((1, 2)).max()  # nan, inf where Cholesky failed or squares left the range
        if bound < _CHOLESKY_LIMIT and lower.isfinite().all():
            return norms.mT * lower.mT
    found: Tensor
    _, found = torch.linalg.qr(blocks.double().mT, mode="r")
    return found


def times(left: Tensor, blocks: Tensor) -> Tensor:
    """[left_1 blocks_1, ..., left_b blocks_b]: (m, b r) and (b / c, r, n) give (m, b n)."""
    k, r, _ = blocks.shape
    if left.shape[1] == r:
        return left @ blocks[0]
    by_block = left.reshape(len(left), k, left.shape[1] // (k * r), r)
    return torch.einsum("mkcr,krn->mkcn", by_block, blocks).flatten(1)


def _on_cpu(x: Tensor) -> bool:
    """Where numpy and scipy compute; on a device torch does."""
    return x.device.type == "cpu"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
