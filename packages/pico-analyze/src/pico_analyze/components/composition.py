"""The components ``q_``, ``k_`` and ``v_composition``: how much of what one head writes a head of a later layer reads.

Legend: d d_model, H query heads, E head_dim; h a head of the later layer, g one of an earlier layer. Query, key and value
rows and output columns belong to heads as in `circuits`; products are not multiplied out.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from pico_analyze.checkpoint.format import Manifest
from pico_analyze.checkpoint.reader import Checkpoint
from pico_analyze.components import ComponentError, Piece, Selection
from pico_analyze.components.circuits import Projections, of_columns, of_rows
from pico_analyze.components.matrix import Matrix, triangles
from pico_analyze.components.single import name_in_block

ZERO = "the circuit of one of the two heads is zero"


class Composition(Projections):
    """A product of two circuits over the product of their Frobenius norms, for each head of a layer and each of every
    earlier one; its own Frobenius norm is the composition score.

    ===============  =========================================  ==========================================
    component        matrix (d x d), before division            what of head g head h reads
    ===============  =========================================  ==========================================
    q_composition    (W_QK^h)' W_OV^g = K_h' (Q_h O_g) V_g      where it looks from
    k_composition    W_QK^h W_OV^g    = Q_h' (K_h O_g) V_g      what it looks at
    v_composition    W_OV^h W_OV^g    = O_h (V_h O_g) V_g       what it moves
    ===============  =========================================  ==========================================

    Of each there are E singular values; that is all that is computed, through an E x E matrix that shares them. Rotary
    embedding, the gains of the norms, and what the layers between write are left out. Q and K of h's group stand for it
    under grouped-query attention.

    Source: Elhage et al., "A mathematical framework for transformer circuits", 2021, on the composition of heads.
    """

    reads: ClassVar[tuple[str, str]]
    """The roles of the later head: what its product begins with, and what reads."""

    def select(self, manifest: Manifest) -> list[Selection]:
        """One selection for each later and earlier block, of all pairs of their heads."""
        readers = {role: self._part(manifest, "weights", role) for role in self.reads}
        writers = {role: self._part(manifest, "weights", role, "all") for role in ("v", "o")}
        pairs = [
            (later, earlier)
            for later in sorted(set.intersection(*map(set, readers.values())))
            for earlier in sorted(set.intersection(*map(set, writers.values())))
            if earlier < later
        ]
        if not pairs:
            raise ComponentError(f"{self.name}: no layer stands before those asked for; heads of two layers are needed")
        heads = range(manifest.model.n_heads)
        return [
            Selection(
                layer=later,
                module=name_in_block(readers[self.reads[0]][later]).rpartition(".")[0],
                heads=tuple(h for h in heads for _ in heads),
                rows=(*(part[later] for part in readers.values()), *(part[earlier] for part in writers.values())),
                reference_layer=earlier,
                reference_heads=tuple(g for _ in heads for g in heads),
            )
            for later, earlier in pairs
        ]

    def pieces(self, checkpoint: Checkpoint, selection: Selection) -> Iterator[Piece]:
        """The matrix of each pair of heads: h with every g, then the next h."""
        H, K = checkpoint.manifest.model.n_heads, checkpoint.manifest.model.n_kv_heads
        first, reading, v, o = (
            _rows_of_heads(checkpoint.tensor(row), role, H, K)
            for row, role in zip(selection.rows, (*self.reads, "v", "o"), strict=True)
        )
        d = v.shape[2]
        corner_first, corner_v = triangles(first), triangles(v)  # (H, E, E)
        later = (corner_first @ triangles(reading).mT).norm(dim=(1, 2))  # (H,) the norms of the circuits
        earlier = (triangles(o) @ corner_v.mT).norm(dim=(1, 2))
        inner = torch.einsum("hed,gfd->hgef", reading, o)  # (H, H, E, E)
        for h in range(H):
            cores = corner_first[h] @ inner[h] @ corner_v.mT  # (H, E, E)
            for g, core in enumerate(cores):
                size = later[h] * earlier[g]
                matrix = Matrix.of_core(core / size, (d, d)) if size > 0 else Matrix.without_numbers((d, d), ZERO)
                yield Piece(selection.layer, h, selection.module, matrix, selection.content_hash, selection.dtype)


class QComposition(Composition):
    """What head g writes changes the queries of head h."""

    name = "q_composition"
    roles = ("q", "k", "v", "o")
    reads = ("k", "q")


class KComposition(Composition):
    """What head g writes changes the keys of head h."""

    name = "k_composition"
    roles = ("q", "k", "v", "o")
    reads = ("q", "k")


class VComposition(Composition):
    """What head g writes changes the values of head h."""

    name = "v_composition"
    roles = ("v", "o")
    reads = ("o", "v")


def _rows_of_heads(weight: Tensor, role: str, H: int, K: int) -> Tensor:
    """What each query head uses of a projection, the output's transposed: (H, E, d) float64."""
    if role == "o":
        return of_columns(weight, H).mT.double()
    return of_rows(weight, H, H if role == "q" else K).double()
