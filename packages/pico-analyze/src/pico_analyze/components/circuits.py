"""The components ``ov_circuit`` and ``qk_circuit``: what a head writes for what it reads, and where it looks.

Legend: d d_model, H query heads, K kv heads, E head_dim, n captured rows. Query head h has the rows h E .. (h + 1) E of
the query projection and the columns h E .. (h + 1) E of the output projection; it reads through the rows of kv head
``h // (H / K)`` of the key and value projections. The circuits are those of Elhage et al., "A mathematical framework for
transformer circuits", 2021; their thin factors are not multiplied out.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pico_analyze.checkpoint.format import Kind, Manifest, Split, TensorRow
from pico_analyze.checkpoint.reader import Checkpoint
from pico_analyze.components import ComponentError, Layers, Piece, Selection
from pico_analyze.components.matrix import Matrix, gram, plus_gram, times, triangles
from pico_analyze.components.single import find_rows, name_in_block

WORDS = {"q": "query", "k": "key", "v": "value", "o": "output"}


class Projections(ABC):
    """What is made of projections of attention: which of them, and in which blocks they are found."""

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        kind: Kind,
        split: Split | None,
        layers: Layers,
        layer_suffixes: str | dict[str, str] | None,
        order: Literal["pico_v0"] | None = None,
    ) -> None:
        keys = {f"{WORDS[role]}_layer": role for role in self.roles}
        if layer_suffixes is not None and (not isinstance(layer_suffixes, dict) or set(layer_suffixes) != set(keys)):
            example = ", ".join(f"{key}: attention.{role}_proj" for key, role in keys.items())
            raise ComponentError(
                f"{self.name} takes layer_suffixes as a mapping with {' and '.join(keys)}, such as {{{example}}}; "
                "without layer_suffixes it finds them by their roles"
            )
        if order is not None and (self.name != "ov_circuit" or kind != "weights"):
            raise ComponentError(f"order {order} applies to the weights of ov_circuit only, not to {kind}")
        self.kind, self.split, self.layers, self.order = kind, split, layers, order
        assert layer_suffixes is None or isinstance(layer_suffixes, dict)
        self.suffixes = {role: layer_suffixes[key] if layer_suffixes else None for key, role in keys.items()}

    def needed(self) -> list[tuple[Kind, str]]:
        """Kind and role of the tensors of one block, in the order of a selection's rows: gradients after weights."""
        kinds: list[Kind] = ["weights", "gradients"] if self.kind == "gradients" else ["weights"]
        return [(kind, role) for kind in kinds for role in self.roles]

    def select(self, manifest: Manifest) -> list[Selection]:
        """One selection for each block."""
        parts = [self._part(manifest, kind, role) for kind, role in self.needed()]
        layers = sorted(set.intersection(*(set(part) for part in parts)))
        heads = (*range(manifest.model.n_heads), None)
        return [
            Selection(
                layer,
                name_in_block(parts[0][layer]).rpartition(".")[0],
                heads,
                tuple(part[layer] for part in parts),
            )
            for layer in layers
        ]

    def _part(self, manifest: Manifest, kind: Kind, role: str, layers: Layers | None = None) -> dict[int, TensorRow]:
        """The projection of that role in each block, of those asked for where ``layers`` is None."""
        suffix = self.suffixes[role]
        rows = find_rows(manifest, kind, self.split, self.layers if layers is None else layers, suffix, role)
        wrong = next((row for row in rows if row.role != role or row.layer is None), None)
        if wrong is not None:
            raise ComponentError(
                f"{self.name} needs the {WORDS[role]} projection of attention, "
                f"of role {role!r}, but {suffix!r} selects {wrong.module}, of role {wrong.role!r}"
            )
        return {row.layer: row for row in rows if row.layer is not None}

    @abstractmethod
    def pieces(self, checkpoint: Checkpoint, selection: Selection) -> Iterator[Piece]:
        """The matrix of each head, or pair of heads, of the selection."""


class Circuit(Projections):
    """Two projections multiplied: a matrix for each head, and the heads side by side."""

    def pieces(self, checkpoint: Checkpoint, selection: Selection) -> Iterator[Piece]:
        """The circuit of each head, then of all heads side by side."""
        shape = checkpoint.manifest.model
        parts = [checkpoint.tensor(row) for row in selection.rows]
        matrices = self.matrices(parts, shape.n_heads, shape.n_kv_heads)
        for head, matrix in zip(selection.heads, matrices, strict=True):
            yield Piece(selection.layer, head, selection.module, matrix, selection.content_hash, selection.dtype)

    @abstractmethod
    def matrices(self, parts: list[Tensor], H: int, K: int) -> Iterator[Matrix]:
        """The matrix of each head, then of all heads side by side."""


class OVCircuit(Circuit):
    """One matrix per query head, then the heads side by side (head null).

    ============  =================================  ===============  ==============================
    kind          head h                             singular values  side by side
    ============  =================================  ===============  ==============================
    weights       O_h V_k                  (d x d)   E                [O_1 V ... O_H V]    (d x H d)
    gradients     O_h dV_k + dO_h V_k      (d x d)   2 E              likewise             (d x H d)
    activations   value activation_k O_h'  (n x d)   E                likewise             (n x H d)
    ============  =================================  ===============  ==============================

    A spectrum never has more values than the smaller side of its matrix. Minus the gradient is the
    first-order change of O_h V_k per unit of SGD step; it is not the derivative of the loss by O_h V_k.

    ``order="pico_v0"`` (weights only) gives V_k O_h (E x E) and [V O_1 ... V O_H] (E x H E) as the published
    pico-analyze computes them: the same eigenvalues per head, but other singular values.
    """

    name = "ov_circuit"
    roles = ("v", "o")

    def needed(self) -> list[tuple[Kind, str]]:
        """Kind and role of the tensors of one block; of activations those of the values."""
        return [("activations", "v"), ("weights", "o")] if self.kind == "activations" else super().needed()

    def matrices(self, parts: list[Tensor], H: int, K: int) -> Iterator[Matrix]:
        """The matrix of each head, then of all heads side by side."""
        if self.kind == "activations":
            x, o = parts  # (n, K E), (d, H E)
            yield from Written(x.view(len(x), K, x.shape[1] // K), o.view(len(o), H, -1)).matrices()
            return
        d = len(parts[1])
        v, o = parts[0].view(K, -1, d), parts[1].view(d, H, -1)  # (K, E, d), (d, H, E)
        if self.order == "pico_v0":
            products = of_rows(parts[0], H, K).double() @ o.double().movedim(1, 0)  # (H, E, E)
            yield from map(Matrix.dense, products)
            yield Matrix.dense(products.movedim(0, 1).flatten(1))  # (E, H E)
            return
        if self.kind == "gradients":
            dv, do = parts[2].view(K, -1, d), parts[3].view(d, H, -1)
            yield from Products(torch.cat([o, do], dim=2), torch.cat([dv, v], dim=1)).matrices()
        else:
            yield from Products(o, v).matrices()


class QKCircuit(Circuit):
    """One matrix per query head, then the heads side by side (head null).

    ============  =================================  ===============  ==============================
    kind          head h                             singular values  side by side
    ============  =================================  ===============  ==============================
    weights       Q_h' K_k                 (d x d)   E                [Q_1'K ... Q_H'K]    (d x H d)
    gradients     Q_h' dK_k + dQ_h' K_k    (d x d)   2 E              likewise             (d x H d)
    ============  =================================  ===============  ==============================

    It is the bilinear form x' Q_h' K_k y of a token x that looks and a token y that is looked at, both as attention
    reads them, after the norm. The score before the softmax is this form over sqrt(E) where both stand at the same
    position. At other positions the rotary embedding turns the pairs of Q_h x and K_k y against each other by an angle
    that grows with the distance; neither that nor the factor 1/sqrt(E) is part of the matrix. Minus the gradient is the
    first-order change of Q_h' K_k per unit of SGD step.
    """

    name = "qk_circuit"
    roles = ("q", "k")

    def matrices(self, parts: list[Tensor], H: int, K: int) -> Iterator[Matrix]:
        """The matrix of each head, then of all heads side by side."""
        d = parts[0].shape[1]
        q, k = parts[0].view(H, -1, d).movedim(2, 0), parts[1].view(K, -1, d)  # (d, H, E), (K, E, d)
        if self.kind == "gradients":
            dq, dk = parts[2].view(H, -1, d).movedim(2, 0), parts[3].view(K, -1, d)
            q, k = torch.cat([q, dq], dim=2), torch.cat([dk, k], dim=1)  # (d, H, 2 E), (K, 2 E, d)
        yield from Products(q, k).matrices()


class Products:
    """left_h right_k of each query head and [left_1 right, ..., left_H right], which share what is computed of them.

    The heads of a kv head share its right factor, and the rows side by side are those of the heads, side by side. So all
    Gram matrices come from one pass over the kv heads, made when the first is asked for.
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right  # (d, H, r), (K, r, d)
        self.group = left.shape[1] // len(right)

    def matrices(self) -> Iterator[Matrix]:
        """Of each head, (d, d), then of all, (d, H d)."""
        for h in range(self.left.shape[1]):
            left, right = self.left[:, h], self.right[h // self.group]
            yield Matrix.product(left, right, squared=partial(self.gram_of, h))
        yield Matrix.product(self.left.flatten(1), self.right, squared=self.gram)

    def gram_of(self, head: int) -> Tensor:
        """B_h' B_h, (k, k), of the rows B_h = left_h R_k' (d, k) of one head."""
        return self._grams[0][head]

    def gram(self) -> Tensor:
        """sum_h B_h B_h', (d, d), of which the lower triangle is right."""
        return self._grams[1]

    @cached_property
    def _grams(self) -> tuple[list[Tensor], Tensor]:
        heads, total = [], None
        for left, triangle in zip(torch.split(self.left, self.group, dim=1), triangles(self.right), strict=True):
            rows = left.double() @ triangle.mT  # (d, H / K, k)
            heads += [gram(rows[:, j]) for j in range(self.group)]
            total = plus_gram(total, rows.flatten(1).mT)
        assert total is not None
        return heads, total


class Written:
    """x_k O_h' of each query head and [x O_1', ..., x O_H'], which share the Gram matrices of the outputs.

    The heads of a kv head share x_k, so side by side K blocks are enough, whose Gram matrices are sums of those of their
    heads. Rows are not kept: these may be matrices that others are compared with, which stay in memory.
    """

    def __init__(self, x: Tensor, o: Tensor) -> None:
        self.x, self.o = x, o  # (n, K, E), (d, H, E)
        self.group = o.shape[1] // x.shape[1]

    def matrices(self) -> Iterator[Matrix]:
        """Of each head, (n, d), then of all, (n, H d)."""
        for h, right in enumerate(self.rights):
            yield Matrix.product(self.x[:, h // self.group], right, reduced=partial(self.rows_of, h))
        yield Matrix.product(self.x.flatten(1), self.blocks, reduced=self.rows)

    def rows_of(self, head: int) -> Tensor:
        """The rows of one head, (n, k)."""
        return self.x64[:, head // self.group] @ self.triangles[head].mT

    def rows(self) -> Tensor:
        """The rows of all heads side by side, (n, K k)."""
        K, E = self.x.shape[1:]
        grams = self.grams.view(K, self.group, E, E).sum(1)
        return times(self.x64.flatten(1), triangles(self.blocks, grams).mT)

    @cached_property
    def x64(self) -> Tensor:
        """(n, K, E) float64."""
        return self.x.double()

    @cached_property
    def rights(self) -> Tensor:
        """O_h', (H, E, d), in memory one after the other."""
        return self.o.movedim(0, 2).contiguous()

    @cached_property
    def blocks(self) -> Tensor:
        """What stands behind each kv head: its heads side by side, (K, E, H / K d)."""
        K, E = self.x.shape[1:]
        return self.rights.view(K, self.group, E, -1).movedim(1, 2).flatten(2)

    @cached_property
    def grams(self) -> Tensor:
        """O_h' O_h, (H, E, E)."""
        return torch.stack([gram(right.double().mT) for right in self.rights])

    @cached_property
    def triangles(self) -> Tensor:
        """R of O_h = Q R, (H, k, E)."""
        return triangles(self.rights, self.grams)


def of_rows(x: Tensor, H: int, K: int) -> Tensor:
    """The rows of each of K heads, once for each of its query heads: (K E, d) -> (H, E, d)."""
    return x.view(K, -1, x.shape[1]).repeat_interleave(H // K, dim=0)


def of_columns(x: Tensor, n: int) -> Tensor:
    """The columns of each of n heads: (d, n E) -> (n, d, E)."""
    return x.view(x.shape[0], n, -1).movedim(1, 0)
