"""The components that are one stored tensor: ``simple``, as it is, and ``delta``, less that of another step."""

from collections.abc import Iterator
from typing import Literal

from pico_analyze.checkpoint.format import Kind, Manifest, Split, TensorRow
from pico_analyze.checkpoint.reader import Checkpoint, matches_suffix
from pico_analyze.components import ComponentError, Layers, Piece, Selection
from pico_analyze.components.matrix import Matrix


class Simple:
    """A weight (out x in), an activation (rows x features), the gradient of a weight (out x in), or a moment of it.

    A vector, such as the gain of a norm, has entries but no spectrum. The moments that the optimizer keeps of a weight
    (kind ``optimizer``) are named for it, ``swiglu.w_2.exp_avg`` and ``swiglu.w_2.exp_avg_sq``.

    ``layer_suffixes`` is the end of the modules' names, or ``{"role": role}``: every module that has this role, whatever
    the model calls it.
    """

    name = "simple"

    def __init__(
        self,
        kind: Kind,
        split: Split | None,
        layers: Layers,
        layer_suffixes: str | dict[str, str] | None,
        order: Literal["pico_v0"] | None = None,
    ) -> None:
        by_role = isinstance(layer_suffixes, dict) and set(layer_suffixes) == {"role"}
        if not isinstance(layer_suffixes, str) and not by_role:
            raise ComponentError(
                f"{self.name} takes one module suffix as layer_suffixes, such as swiglu.w_2, or a role, such as down"
            )
        if order is not None:
            raise ComponentError("order applies to ov_circuit only")
        self.kind, self.split, self.layers = kind, split, layers
        self.suffix = layer_suffixes if isinstance(layer_suffixes, str) else None
        self.role = layer_suffixes["role"] if isinstance(layer_suffixes, dict) else None

    def select(self, manifest: Manifest) -> list[Selection]:
        """One selection for each module that ends in the suffix, or has the role."""
        rows = find_rows(manifest, self.kind, self.split, self.layers, self.suffix, self.role)
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


class Delta(Simple):
    """W_t - W_s: a weight less what it was at the step s that the metric's entry names as ``target_checkpoint``.

    Each side is selected as by `Simple`; `difference` puts them together.
    """

    name = "delta"


def difference(piece: Piece, reference: Piece) -> Piece:
    """One matrix less another, in float64, where the difference of stored numbers is exact but for rounding once."""
    here, there = piece.matrix.entries(), reference.matrix.entries()
    if here.shape != there.shape:
        shapes = " and ".join(" x ".join(map(str, side.shape)) for side in (there, here))
        matrix = Matrix.without_numbers((len(here), here[0].numel()), f"no difference of the shapes {shapes}")
    else:
        matrix = Matrix.dense(here.double() - there.double(), dtype=piece.matrix.dtype)
    return Piece(piece.layer, piece.head, piece.module, matrix, piece.content_hash, piece.dtype)


def find_rows(
    manifest: Manifest, kind: Kind, split: Split | None, layers: Layers, suffix: str | None, role: str | None = None
) -> list[TensorRow]:
    """The tensors of a kind (and split, where it has any) whose module ends in ``suffix`` or has the ``role``, by layer.

    ``layers`` ``"all"`` takes every block, and modules outside the blocks too. Of the optimizer's tensors the moments are
    found, each of them as its module's name and its own, ``swiglu.w_2.exp_avg``; the role is that of the weight.

    Raises:
        ComponentError: a layer does not exist, or nothing fits in one of the layers; says what there is.
    """
    split = None if kind in ("weights", "optimizer") else split
    n_layers = manifest.model.n_layers
    beyond = [layer for layer in layers if layer not in range(n_layers)] if layers != "all" else []
    if beyond:
        raise ComponentError(f"layers {beyond} do not exist; there are 0 to {n_layers - 1}")
    stored = [row for row in manifest.tensors if row.kind == kind and row.split == split and row.role != "step"]
    what = kind if split is None else f"{kind} of split {split}"
    if not stored and kind == "optimizer":
        raise ComponentError("this checkpoint holds no optimizer state")
    if not stored:
        captured = [row for row in manifest.tensors if row.kind in ("activations", "gradients")]
        there = sorted({f"{row.kind} of split {row.split}" for row in captured})
        raise ComponentError(f"no {what} were captured; besides weights there are {', '.join(there) or 'none'}")
    if suffix is not None:
        fitting = [row for row in stored if matches_suffix(_name(row), suffix)]
        sought, names = f"ends in {suffix!r}", dict.fromkeys(map(name_in_block, stored))
    else:
        roles = {row.module: row.role for row in manifest.tensors if row.kind == "weights"}
        fitting = [row for row in stored if roles.get(row.module, row.role) == role]
        sought, names = f"has the role {role!r}", dict.fromkeys(str(roles.get(row.module, row.role)) for row in stored)
    found = [row for row in fitting if layers == "all" or row.layer in layers]
    empty = [layer for layer in layers if all(row.layer != layer for row in found)] if layers != "all" else []
    if not found or empty:
        where = f" in layers {empty}" if empty and fitting else ""
        raise ComponentError(f"no module {sought}{where}; {what} there are of {', '.join(names)}")
    return sorted(found, key=lambda row: (row.layer is None, row.layer or 0))


def name_in_block(row: TensorRow) -> str:
    """The tensor's name without ``layers.N.``; the whole name outside the blocks."""
    whole, _, inside = _name(row).partition(f".{row.layer}.")
    return inside or whole


def _name(row: TensorRow) -> str:
    """The module; of an optimizer's tensor with the moment."""
    return f"{row.module}.{row.role}" if row.kind == "optimizer" else row.module
