"""The component ``simple``: one stored tensor as it is."""

from collections.abc import Iterator
from typing import Literal

from pico_analyze.checkpoint.format import Kind, Manifest, Split, TensorRow
from pico_analyze.checkpoint.reader import Checkpoint, matches_suffix
from pico_analyze.components import ComponentError, Layers, Piece, Selection
from pico_analyze.components.matrix import Matrix


class Simple:
    """A weight (out x in), an activation (rows x features), or the gradient of a weight (out x in).

    A vector, such as the gain of a norm, has entries but no spectrum.
    """

    def __init__(
        self,
        kind: Kind,
        split: Split | None,
        layers: Layers,
        layer_suffixes: str | dict[str, str],
        order: Literal["pico_v0"] | None = None,
    ) -> None:
        if not isinstance(layer_suffixes, str):
            raise ComponentError("simple takes one module suffix as layer_suffixes, such as swiglu.w_2")
        if order is not None:
            raise ComponentError("order applies to ov_circuit only")
        self.kind, self.split, self.layers, self.suffix = kind, split, layers, layer_suffixes

    def select(self, manifest: Manifest) -> list[Selection]:
        """One selection for each module that ends in the suffix."""
        rows = find_rows(manifest, self.kind, self.split, self.layers, self.suffix)
        return [Selection(row.layer, name_in_block(row), (None,), (row,)) for row in rows]

    def pieces(self, checkpoint: Checkpoint, selection: Selection) -> Iterator[Piece]:
        """The stored tensor."""
        (row,) = selection.rows
        yield Piece(
            row.layer,
            None,
            selection.module,
            Matrix.dense(checkpoint.tensor(row)),
            selection.content_hash,
            selection.dtype,
        )


def find_rows(manifest: Manifest, kind: Kind, split: Split | None, layers: Layers, suffix: str) -> list[TensorRow]:
    """The tensors of a kind (and split, unless weights) whose module ends in ``suffix``, by layer.

    ``layers`` ``"all"`` takes every block, and modules outside the blocks too.

    Raises:
        ComponentError: a layer does not exist, or nothing fits in one of the layers; says what there is.
    """
    split = None if kind == "weights" else split
    n_layers = manifest.model.n_layers
    beyond = [layer for layer in layers if layer not in range(n_layers)] if layers != "all" else []
    if beyond:
        raise ComponentError(f"layers {beyond} do not exist; there are 0 to {n_layers - 1}")
    stored = [row for row in manifest.tensors if row.kind == kind and row.split == split]
    what = kind if split is None else f"{kind} of split {split}"
    if not stored:
        captured = [row for row in manifest.tensors if row.kind in ("activations", "gradients")]
        there = sorted({f"{row.kind} of split {row.split}" for row in captured})
        raise ComponentError(f"no {what} were captured; besides weights there are {', '.join(there) or 'none'}")
    fitting = [row for row in stored if matches_suffix(row.module, suffix)]
    found = [row for row in fitting if layers == "all" or row.layer in layers]
    empty = [layer for layer in layers if all(row.layer != layer for row in found)] if layers != "all" else []
    if not found or empty:
        where = f" in layers {empty}" if empty and fitting else ""
        names = dict.fromkeys(map(name_in_block, stored))
        raise ComponentError(f"no module ends in {suffix!r}{where}; {what} there are of {', '.join(names)}")
    return sorted(found, key=lambda row: (row.layer is None, row.layer or 0))


def name_in_block(row: TensorRow) -> str:
    """The module's name without ``layers.N.``; the whole name outside the blocks."""
    whole, _, inside = row.module.partition(f".{row.layer}.")
    return inside or whole
