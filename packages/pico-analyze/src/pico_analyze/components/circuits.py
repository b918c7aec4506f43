"""The component ``ov_circuit``: what an attention head writes into the stream for what it reads from it.

Legend: d d_model, H query heads, K kv heads, E head_dim, n captured rows. Query head h reads through the rows
of kv head ``h // (H / K)`` of the value projection and writes through columns h E .. (h + 1) E of the output
projection. The circuit is W_O W_V of Elhage et al., "A mathematical framework for transformer circuits",
2021; its thin factors are not multiplied out.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from pico_analyze.checkpoint.format import Kind, Manifest, Split, TensorRow
from pico_analyze.checkpoint.reader import Checkpoint
from pico_analyze.components import ComponentError, Layers, Piece, Selection
from pico_analyze.components.matrix import Matrix
from pico_analyze.components.single import find_rows, name_in_block


class OVCircuit:
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

    def __init__(
        self,
        kind: Kind,
        split: Split | None,
        layers: Layers,
        layer_suffixes: str | dict[str, str],
        order: Literal["pico_v0"] | None = None,
    ) -> None:
        if not isinstance(layer_suffixes, dict) or set(layer_suffixes) != {"value_layer", "output_layer"}:
            raise ComponentError(
                "ov_circuit takes layer_suffixes as a mapping with value_layer and output_layer, "
                "such as {value_layer: attention.v_proj, output_layer: attention.o_proj}"
            )
        if order is not None and kind != "weights":
            raise ComponentError(f"order {order} applies to the weights of ov_circuit only, not to {kind}")
        self.kind, self.split, self.layers, self.order = kind, split, layers, order
        self.value, self.output = layer_suffixes["value_layer"], layer_suffixes["output_layer"]

    def select(self, manifest: Manifest) -> list[Selection]:
        """One selection for each block: its value and output tensors, gradients after weights."""
        needed: list[tuple[Kind, str, str]]
        match self.kind:
            case "activations":
                needed = [("activations", self.value, "v"), ("weights", self.output, "o")]
            case "gradients":
                needed = [
                    ("weights", self.value, "v"),
                    ("weights", self.output, "o"),
                    ("gradients", self.value, "v"),
                    ("gradients", self.output, "o"),
                ]
            case _:
                needed = [("weights", self.value, "v"), ("weights", self.output, "o")]
        parts = [self._part(manifest, kind, suffix, role) for kind, suffix, role in needed]
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

    def _part(self, manifest: Manifest, kind: Kind, suffix: str, role: str) -> dict[int, TensorRow]:
        rows = find_rows(manifest, kind, self.split, self.layers, suffix)
        wrong = next((row for row in rows if row.role != role or row.layer is None), None)
        if wrong is not None:
            raise ComponentError(
                f"ov_circuit needs the {'value' if role == 'v' else 'output'} projection of attention, "
                f"of role {role!r}, but {suffix!r} selects {wrong.module}, of role {wrong.role!r}"
            )
        return {row.layer: row for row in rows if row.layer is not None}

    def pieces(self, checkpoint: Checkpoint, selection: Selection) -> Iterator[Piece]:
        """The circuit of each head, then of all heads side by side."""
        shape = checkpoint.manifest.model
        parts = [checkpoint.tensor(row) for row in selection.rows]
        matrices = self._matrices(parts, shape.n_heads, shape.n_kv_heads)
        for head, matrix in zip(selection.heads, matrices, strict=True):
            yield Piece(selection.layer, head, selection.module, matrix, selection.content_hash, selection.dtype)

    def _matrices(self, parts: list[Tensor], H: int, K: int) -> Iterator[Matrix]:
        """The matrix of each head, then of all heads side by side."""

        def of_rows(x: Tensor) -> Tensor:  # each kv head once for each of its query heads
            return x.view(K, -1, x.shape[1]).repeat_interleave(H // K, dim=0)  # (K E, d) -> (H, E, d)

        def of_columns(x: Tensor, n: int = H) -> Tensor:
            return x.view(x.shape[0], n, -1).movedim(1, 0)  # (d, n E) -> (n, d, E)

        if self.kind == "activations":
            x, o = parts  # (n, K E), (d, H E)
            lefts = of_columns(x, K).repeat_interleave(H // K, dim=0)  # (H, n, E)
            rights = of_columns(o).mT  # (H, E, d)
        else:
            v, o = parts[:2]  # (K E, d), (d, H E)
            lefts, rights = of_columns(o), of_rows(v)  # (H, d, E), (H, E, d)
        if self.kind == "gradients":
            dv, do = parts[2:]
            lefts = torch.cat([lefts, of_columns(do)], dim=2)  # (H, d, 2 E)
            rights = torch.cat([of_rows(dv), rights], dim=1)  # (H, 2 E, d)

        if self.order == "pico_v0":
            products = rights.double() @ lefts.double()  # (H, E, E)
            yield from map(Matrix.dense, products)
            yield Matrix.dense(products.movedim(0, 1).flatten(1))  # (E, H E)
            return
        yield from map(Matrix.product, lefts, rights)
        if self.kind == "activations":
            # The heads of a kv head share their left factor, so K blocks are enough.
            blocks = rights.reshape(K, H // K, *rights.shape[1:]).movedim(1, 2).flatten(2)  # (K, E, H / K d)
            yield Matrix.product(x, blocks)
        else:
            yield Matrix.product(lefts.movedim(0, 1).flatten(1), rights)  # (d, H r), (H, r, d)
