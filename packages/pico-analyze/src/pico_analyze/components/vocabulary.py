"""The component ``full_ov_circuit``: how a head moves the logits of all tokens for each token that it attends to.

Legend: d d_model, V vocabulary, H query heads, K kv heads, E head_dim; W_E and W_U embedding and unembedding, (V, d).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pico_analyze.checkpoint.format import Manifest, TensorRow
from pico_analyze.checkpoint.reader import Checkpoint
from pico_analyze.components import ComponentError, Piece, Selection
from pico_analyze.components.circuits import Projections, of_columns, of_rows
from pico_analyze.components.matrix import Matrix

_TOKENS = 4096


class FullOVCircuit(Projections):
    """W_U O_h V_k W_E' (V x V) of each query head, by its eigenvalues alone.

    The V x V matrix is never formed, nor its factors. Its non-zero eigenvalues are those of O_h V_k (W_E' W_U), a d x d
    matrix of rank E whose last factor all heads of all layers share: XY and YX have the same ones. That matrix is what
    is yielded, as factors O_h (d x E) and V_k W_E' W_U (E x d). Its singular values are not those of the circuit, so
    only metrics of eigenvalues fit. The gains of the norms before the attention and before the unembedding are left
    out. Tied embeddings are both W_E and W_U.

    Source: Elhage et al., "A mathematical framework for transformer circuits", 2021, on copying heads.
    """

    name = "full_ov_circuit"
    roles = ("v", "o")

    _shared: tuple[str, Tensor] | None = None
    """W_E' W_U of the checkpoint that was asked for last, and the content hashes of the two."""

    def select(self, manifest: Manifest) -> list[Selection]:
        """One selection for each block: values, outputs, embedding, unembedding."""
        ends = tuple(_end(manifest, role) for role in ("embed", "unembed"))
        return [
            Selection(found.layer, found.module, found.heads[:-1], found.rows + ends)
            for found in super().select(manifest)
        ]

    def pieces(self, checkpoint: Checkpoint, selection: Selection) -> Iterator[Piece]:
        """The circuit of each head."""
        H, K = checkpoint.manifest.model.n_heads, checkpoint.manifest.model.n_kv_heads
        v, o = (checkpoint.tensor(row) for row in selection.rows[:2])
        shared = self._product_of_ends(checkpoint, *selection.rows[2:])
        rights = of_rows((v.double() @ shared), H, K)  # (H, E, d)
        for head, left, right in zip(selection.heads, of_columns(o, H), rights, strict=True):
            matrix = Matrix.product(left, right)
            yield Piece(selection.layer, head, selection.module, matrix, selection.content_hash, selection.dtype)

    def _product_of_ends(self, checkpoint: Checkpoint, embed: TensorRow, unembed: TensorRow) -> Tensor:
        """W_E' W_U, (d, d) float64, once for all layers of a checkpoint."""
        content = embed.sha256 + unembed.sha256 + checkpoint.device
        if self._shared is None or self._shared[0] != content:
            w_e, w_u = checkpoint.tensor(embed), checkpoint.tensor(unembed)
            product = torch.zeros(w_e.shape[1], w_e.shape[1], dtype=torch.float64, device=w_e.device)
            for start in range(0, len(w_e), _TOKENS):  # float64 of some tokens at a time
                tokens = slice(start, start + _TOKENS)
                product.addmm_(w_e[tokens].double().mT, w_u[tokens].double())
            self._shared = content, product
        return self._shared[1]


def _end(manifest: Manifest, role: str) -> TensorRow:
    """The embedding or the unembedding; with tied embeddings the one for both."""
    role = "embed" if manifest.model.tied_embeddings else role
    found = [row for row in manifest.tensors if row.kind == "weights" and row.role == role]
    if len(found) != 1:
        raise ComponentError(f"full_ov_circuit needs one weight of role {role!r}; there are {len(found)}")
    return found[0]
