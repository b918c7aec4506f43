import hashlib
import math
import subprocess
import sys

import pytest
import torch

from pico_analyze.checkpoint.reader import open_run
from pico_analyze.components import COMPONENTS, ComponentError, get_component
from pico_analyze.components.circuits import OVCircuit, QKCircuit
from pico_analyze.components.single import Delta, Simple, difference
from pico_analyze.components.vocabulary import FullOVCircuit
from pico_analyze.metrics.eigenvalues import eigenvalue_positivity

OV = {"value_layer": "attention.v_proj", "output_layer": "attention.o_proj"}
VALUE, OUTPUT = "layers.0.attention.v_proj", "layers.0.attention.o_proj"


def pieces_of(component, folder):
    checkpoint = open_run(folder).checkpoint(0)
    return [
        piece
        for selection in component.select(checkpoint.manifest)
        for piece in component.pieces(checkpoint, selection)
    ]


def stored(folder, kind, split, module):
    checkpoint = open_run(folder).checkpoint(0)
    (row,) = [row for row in checkpoint.select(kind, split) if row.module == module]
    return checkpoint.tensor(row).double()


def value_rows(v, n_heads, n_kv_heads):
    """The rows of the value projection that each query head reads through, by plain slices."""
    head_dim = len(v) // n_kv_heads
    kv_heads = [h // (n_heads // n_kv_heads) for h in range(n_heads)]
    return [v[k * head_dim : (k + 1) * head_dim] for k in kv_heads]


def output_columns(o, n_heads):
    head_dim = o.shape[1] // n_heads
    return [o[:, h * head_dim : (h + 1) * head_dim] for h in range(n_heads)]


def assert_matrix(piece, expected, n_values):
    """The piece has these entries, and their singular values but for the structural zeros."""
    assert piece.matrix.shape == tuple(expected.shape)
    torch.testing.assert_close(piece.matrix.entries().double(), expected, rtol=1e-12, atol=1e-14)
    spectrum, dense = piece.matrix.spectrum().values, torch.linalg.svdvals(expected)
    torch.testing.assert_close(spectrum, dense[:n_values], rtol=1e-7, atol=0)
    assert (dense[n_values:] < 1e-13 * dense[0]).all()


# --- simple


@pytest.mark.parametrize(
    ("kind", "split", "dtype"),
    [("weights", None, "F32"), ("activations", "val", "BF16"), ("gradients", "train", "F32")],
)
def test_simple_is_the_stored_tensor(run_folder, kind, split, dtype):
    first, second = pieces_of(Simple(kind, split, "all", "swiglu.w_2"), run_folder)
    (row, _) = open_run(run_folder).checkpoint(0).select(kind, split, module="swiglu.w_2")
    assert (first.layer, first.head, first.module, first.dtype) == (0, None, "swiglu.w_2", dtype)
    assert (second.layer, first.content_hash) == (1, row.sha256)
    assert torch.equal(first.matrix.entries().double(), stored(run_folder, kind, split, "layers.0.swiglu.w_2"))


def test_a_vector_has_entries(run_folder):
    piece, _ = pieces_of(Simple("weights", None, "all", "attention_norm"), run_folder)
    assert piece.matrix.entries().numel() == 16


def test_a_module_outside_the_blocks_has_no_layer(run_folder):
    (piece,) = pieces_of(Simple("weights", None, "all", "embedding_proj"), run_folder)
    assert (piece.layer, piece.module) == (None, "embedding_proj")


def test_layers_1_10_and_11_are_not_confused(make_run, make_shape):
    folder = make_run(steps=(0,), shape=make_shape(n_layers=12))
    one, eleven = pieces_of(Simple("activations", "val", [11, 1], "attention.v_proj"), folder)
    assert (one.layer, eleven.layer) == (1, 11)
    for piece in (one, eleven):
        expected = stored(folder, "activations", "val", f"layers.{piece.layer}.attention.v_proj")
        assert torch.equal(piece.matrix.entries().double(), expected)
    assert [piece.layer for piece in pieces_of(OVCircuit("weights", None, [10, 1], OV), folder)[::5]] == [
        1,
        10,
    ]


# --- ov_circuit


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (4, 4), (4, 1), (2, 1)])
class TestEveryGrouping:
    @pytest.fixture
    def folder(self, make_run, make_shape, n_heads, n_kv_heads):
        return make_run(steps=(0,), shape=make_shape(n_heads=n_heads, n_kv_heads=n_kv_heads))

    def test_weights(self, folder, n_heads, n_kv_heads):
        """O_h V_k (d x d) of rank E, and [O_1 V ... O_H V] (d x H d) of rank d."""
        outputs = output_columns(stored(folder, "weights", None, OUTPUT), n_heads)
        values = value_rows(stored(folder, "weights", None, VALUE), n_heads, n_kv_heads)
        expected = [o @ v for o, v in zip(outputs, values, strict=True)]
        *each, side_by_side = pieces_of(OVCircuit("weights", None, [0], OV), folder)
        for piece, matrix in zip(each, expected, strict=True):
            assert_matrix(piece, matrix, n_values=16 // n_heads)
        assert_matrix(side_by_side, torch.cat(expected, dim=1), n_values=16)

    def test_gradients(self, folder, n_heads, n_kv_heads):
        """Minus O dV + dO V is the change of O V under one SGD step, per unit of its size."""
        o, v = stored(folder, "weights", None, OUTPUT), stored(folder, "weights", None, VALUE)
        do, dv = stored(folder, "gradients", "val", OUTPUT), stored(folder, "gradients", "val", VALUE)

        def circuits(lr):
            return [
                a @ b
                for a, b in zip(
                    output_columns(o - lr * do, n_heads),
                    value_rows(v - lr * dv, n_heads, n_kv_heads),
                    strict=True,
                )
            ]

        # The product is quadratic in lr, so a central difference is exact but for rounding.
        expected = [(back - forth) / 2 for back, forth in zip(circuits(-1.0), circuits(1.0), strict=True)]
        *each, side_by_side = pieces_of(OVCircuit("gradients", "val", [0], OV), folder)
        for piece, matrix in zip(each, expected, strict=True):
            assert_matrix(piece, matrix, n_values=min(16, 2 * 16 // n_heads))
        assert_matrix(side_by_side, torch.cat(expected, dim=1), n_values=16)

    def test_activations(self, folder, n_heads, n_kv_heads):
        """Value activation times W_O[:, h]' (n x d), of rank E; side by side n x H d, of the rank of the values."""
        values = stored(folder, "activations", "train", VALUE)
        outputs = output_columns(stored(folder, "weights", None, OUTPUT), n_heads)
        expected = [x.T @ o.T for x, o in zip(value_rows(values.T, n_heads, n_kv_heads), outputs, strict=True)]
        *each, side_by_side = pieces_of(OVCircuit("activations", "train", [0], OV), folder)
        for piece, matrix in zip(each, expected, strict=True):
            assert_matrix(piece, matrix, n_values=16 // n_heads)
        assert_matrix(side_by_side, torch.cat(expected, dim=1), n_values=16 // n_heads * n_kv_heads)

    def test_pico_v0(self, folder, n_heads, n_kv_heads):
        """V_k O_h (E x E): the same eigenvalues as O_h V_k, but other singular values."""
        outputs = output_columns(stored(folder, "weights", None, OUTPUT), n_heads)
        values = value_rows(stored(folder, "weights", None, VALUE), n_heads, n_kv_heads)
        expected = [v @ o for o, v in zip(outputs, values, strict=True)]
        *each, side_by_side = pieces_of(OVCircuit("weights", None, [0], OV, order="pico_v0"), folder)
        for piece, matrix in zip(each, expected, strict=True):
            assert_matrix(piece, matrix, n_values=16 // n_heads)
        assert_matrix(side_by_side, torch.cat(expected, dim=1), n_values=16 // n_heads)
        ours = pieces_of(OVCircuit("weights", None, [0], OV), folder)[0].matrix
        theirs = each[0].matrix.entries()
        traces = [torch.trace(ours.entries() @ ours.entries()), torch.trace(theirs @ theirs)]
        torch.testing.assert_close(*traces)
        assert abs(ours.spectrum().values.sum() / each[0].matrix.spectrum().values.sum() - 1) > 0.1


def test_summed_over_heads_the_circuit_is_the_attention_module(make_run, make_shape):
    """sum_h A_h x (O_h V_k)' and sum_h A_h (OV activations of h) are what attention writes, worked out by hand."""
    generator = torch.Generator().manual_seed(0)
    T = 5
    x = torch.randn(T, 16, generator=generator)  # (T, d)
    attention = torch.randn(4, T, T, generator=generator).softmax(-1).double()  # (H, T, T)

    def change(_, tensors):
        tensors["activations", "val", VALUE] = (x.double() @ tensors["weights", None, VALUE].double().T).float()

    folder = make_run(steps=(0,), shape=make_shape(n_heads=4, n_kv_heads=2), change=change)
    values = x.double() @ stored(folder, "weights", None, VALUE).T  # (T, K E)
    mixed = []
    for h in range(4):
        k = {0: 0, 1: 0, 2: 1, 3: 1}[h]
        mixed.append(attention[h] @ values[:, 4 * k : 4 * k + 4])  # (T, E)
    written = torch.cat(mixed, dim=1) @ stored(folder, "weights", None, OUTPUT).T  # (T, d)

    *weights, _ = pieces_of(OVCircuit("weights", None, [0], OV), folder)
    total = sum(attention[piece.head] @ x.double() @ piece.matrix.entries().T for piece in weights)
    torch.testing.assert_close(total, written, rtol=1e-12, atol=1e-12)

    *activations, _ = pieces_of(OVCircuit("activations", "val", [0], OV), folder)
    total = sum(attention[piece.head] @ piece.matrix.entries() for piece in activations)
    torch.testing.assert_close(total, written, rtol=1e-5, atol=1e-5)  # the values are stored in float32


def one_head(make_run, make_shape, v, o, dv=None, do=None):
    """A run of one layer and one head of size 1 with these projections."""
    shape = make_shape(d_model=len(o), n_layers=1, n_heads=1, n_kv_heads=1).model_copy(update={"head_dim": 1})

    def change(_, tensors):
        tensors["weights", None, VALUE], tensors["weights", None, OUTPUT] = torch.tensor(v), torch.tensor(o)
        if dv is not None:
            tensors["gradients", "val", VALUE], tensors["gradients", "val", OUTPUT] = (
                torch.tensor(dv),
                torch.tensor(do),
            )

    return make_run(steps=(0,), shape=shape, change=change)


def test_ov_by_hand(make_run, make_shape):
    """W_V = [[1, 0]], W_O = [[0], [1]]: W_O W_V = [[0, 0], [1, 0]], of Frobenius norm 1; W_V W_O is 0."""
    folder = one_head(make_run, make_shape, v=[[1.0, 0.0]], o=[[0.0], [1.0]])
    head, side_by_side = pieces_of(OVCircuit("weights", None, "all", OV), folder)
    for piece in (head, side_by_side):
        assert piece.matrix.entries().tolist() == [[0.0, 0.0], [1.0, 0.0]]
        assert piece.matrix.spectrum().values.tolist() == pytest.approx([1.0])
    published, _ = pieces_of(OVCircuit("weights", None, "all", OV, order="pico_v0"), folder)
    assert published.matrix.entries().tolist() == [[0.0]]


def test_ov_gradient_by_hand(make_run, make_shape):
    """Scalars O = 2, V = 3, dO = 3, dV = 2: O dV + dO V = 13."""
    folder = one_head(make_run, make_shape, v=[[3.0]], o=[[2.0]], dv=[[2.0]], do=[[3.0]])
    head, _ = pieces_of(OVCircuit("gradients", "val", "all", OV), folder)
    assert head.matrix.entries().tolist() == [[13.0]]
    assert head.matrix.spectrum().values.tolist() == pytest.approx([13.0])


def test_what_a_circuit_piece_says_of_itself(run_folder):
    checkpoint = open_run(run_folder).checkpoint(0)
    pieces = pieces_of(OVCircuit("activations", "val", [1], OV), run_folder)
    assert [piece.head for piece in pieces] == [0, 1, 2, 3, None]
    assert {(piece.layer, piece.module, piece.dtype) for piece in pieces} == {(1, "attention", "BF16+F32")}
    (v,) = checkpoint.select("activations", "val", layer=1, role="v")
    (o,) = checkpoint.select("weights", layer=1, role="o")
    assert {piece.content_hash for piece in pieces} == {hashlib.sha256((v.sha256 + o.sha256).encode()).hexdigest()}


# --- by role


def with_more(*, tied=True):
    """``change`` for `make_run`: query, key and (untied) output embedding, gradients of them, moments of two weights."""

    def change(step, tensors):
        generator = torch.Generator().manual_seed(step + 7)
        kv, d = tensors["weights", None, VALUE].shape
        shapes = {
            f"layers.{layer}.attention.{name}": size
            for layer in (0, 1)
            for name, size in (("q_proj", d), ("k_proj", kv))
        }
        for module, size in shapes.items():
            tensors["weights", None, module] = torch.randn(size, d, generator=generator)
            tensors["gradients", "val", module] = 1e-3 * torch.randn(size, d, generator=generator)
        if not tied:
            tensors["weights", None, "de_embedding_proj"] = torch.randn(32, d, generator=generator)
        for layer in (0, 1) if step else ():
            module = f"layers.{layer}.swiglu.w_2"
            shape = tensors["weights", None, module].shape
            tensors["optimizer", "exp_avg", module] = 1e-3 * torch.randn(shape, generator=generator)
            tensors["optimizer", "exp_avg_sq", module] = 1e-6 * torch.rand(shape, generator=generator)
            tensors["optimizer", "step", module] = torch.tensor(float(step))

    return change


def test_a_pattern_takes_every_module_that_fits(run_folder):
    manifest = open_run(run_folder).manifests[0]
    found = Simple("weights", None, [1], "attention.[ov]_proj").select(manifest)
    assert sorted(selection.module for selection in found) == ["attention.o_proj", "attention.v_proj"]
    with pytest.raises(
        ComponentError, match=r"no module ends in 'attention\.x\*'; weights there are of .*attention\.v_proj"
    ):
        Simple("weights", None, "all", "attention.x*").select(manifest)


@pytest.mark.parametrize(
    ("role", "module"), [("v", "attention.v_proj"), ("down", "swiglu.w_2"), ("embed", "embedding_proj")]
)
def test_a_role_is_the_suffix_of_its_modules(run_folder, role, module):
    by_role = pieces_of(Simple("weights", None, "all", {"role": role}), run_folder)
    by_suffix = pieces_of(Simple("weights", None, "all", module), run_folder)
    assert [(p.layer, p.module, p.content_hash) for p in by_role] == [
        (p.layer, p.module, p.content_hash) for p in by_suffix
    ]


def test_circuits_find_their_roles(run_folder):
    for kind, split in (("weights", None), ("gradients", "val"), ("activations", "val")):
        by_role = pieces_of(OVCircuit(kind, split, "all", None), run_folder)
        by_suffix = pieces_of(OVCircuit(kind, split, "all", OV), run_folder)
        assert [p.content_hash for p in by_role] == [p.content_hash for p in by_suffix]


def test_moments_of_the_optimizer(make_run):
    run = open_run(make_run(change=with_more()))
    checkpoint = run.checkpoint(10)
    for suffix, expected in (
        ("swiglu.w_2.exp_avg", ["swiglu.w_2.exp_avg"] * 2),
        ({"role": "down"}, ["swiglu.w_2.exp_avg", "swiglu.w_2.exp_avg_sq"] * 2),
    ):
        component = Simple("optimizer", None, "all", suffix)
        found = component.select(checkpoint.manifest)
        assert [selection.module for selection in found] == expected
        (row,) = found[0].rows
        (piece,) = component.pieces(checkpoint, found[0])
        assert (row.key, piece.layer) == ("layers.0.swiglu.w_2.weight.exp_avg", 0)
        assert torch.equal(piece.matrix.entries(), checkpoint.tensor(row))
    with pytest.raises(ComponentError, match="this checkpoint holds no optimizer state"):
        Simple("optimizer", None, "all", "swiglu.w_2.exp_avg").select(run.manifests[0])
    with pytest.raises(
        ComponentError, match=r"no module ends in 'exp_av'; optimizer there are of swiglu\.w_2\.exp_avg, "
    ):
        Simple("optimizer", None, "all", "exp_av").select(checkpoint.manifest)


# --- delta


def test_delta_is_the_exact_difference(make_run):
    run = open_run(make_run())
    component = Delta("weights", None, "all", "swiglu.w_2")
    pieces = []
    for step in (10, 1):
        checkpoint = run.checkpoint(step)
        pieces.append(next(component.pieces(checkpoint, component.select(checkpoint.manifest)[0])))
    changed = difference(*pieces)
    late, early = (piece.matrix.entries() for piece in pieces)
    assert torch.equal(changed.matrix.entries(), late.double() - early.double())
    assert (changed.layer, changed.module, changed.dtype, changed.matrix.dtype) == (0, "swiglu.w_2", "F32", "float32")
    assert difference(pieces[0], pieces[0]).matrix.spectrum().values.abs().max() == 0


# --- qk_circuit

QK = {"query_layer": "attention.q_proj", "key_layer": "attention.k_proj"}


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 2), (4, 4), (4, 1), (2, 1)])
class TestQK:
    @pytest.fixture
    def folder(self, make_run, make_shape, n_heads, n_kv_heads):
        return make_run(steps=(0,), shape=make_shape(n_heads=n_heads, n_kv_heads=n_kv_heads), change=with_more())

    def test_weights(self, folder, n_heads, n_kv_heads):
        """Q_h' K_k (d x d) of rank E, and [Q_1'K ... Q_H'K] (d x H d) of rank d."""
        queries = value_rows(stored(folder, "weights", None, "layers.0.attention.q_proj"), n_heads, n_heads)
        keys = value_rows(stored(folder, "weights", None, "layers.0.attention.k_proj"), n_heads, n_kv_heads)
        expected = [q.T @ k for q, k in zip(queries, keys, strict=True)]
        *each, side_by_side = pieces_of(QKCircuit("weights", None, [0], QK), folder)
        for piece, matrix in zip(each, expected, strict=True):
            assert_matrix(piece, matrix, n_values=16 // n_heads)
        assert_matrix(side_by_side, torch.cat(expected, dim=1), n_values=16)
        assert [piece.head for piece in (*each, side_by_side)] == [*range(n_heads), None]
        assert {piece.module for piece in each} == {"attention"}

    def test_gradients(self, folder, n_heads, n_kv_heads):
        """Minus Q' dK + dQ' K is the change of Q' K under one SGD step, per unit of its size."""
        names = [f"layers.0.attention.{name}" for name in ("q_proj", "k_proj")]
        q, k = (stored(folder, "weights", None, name) for name in names)
        dq, dk = (stored(folder, "gradients", "val", name) for name in names)

        def circuits(lr):
            queries = value_rows(q - lr * dq, n_heads, n_heads)
            return [a.T @ b for a, b in zip(queries, value_rows(k - lr * dk, n_heads, n_kv_heads), strict=True)]

        expected = [(back - forth) / 2 for back, forth in zip(circuits(-1.0), circuits(1.0), strict=True)]
        *each, side_by_side = pieces_of(QKCircuit("gradients", "val", [0], None), folder)
        for piece, matrix in zip(each, expected, strict=True):
            assert_matrix(piece, matrix, n_values=min(16, 2 * 16 // n_heads))
        assert_matrix(side_by_side, torch.cat(expected, dim=1), n_values=16)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_qk_scores_are_those_of_the_model(make_run, make_shape, n_kv_heads):
    """With all tokens at one position the rotary embedding cancels: softmax(x' Q' K y / sqrt(E)) is the attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=n_kv_heads, initializer_range=0.5,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    read = {}
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, x, number=number: read.update({number: x[0][0]}))
    with torch.no_grad():
        out = model(torch.arange(7).unsqueeze(0), position_ids=torch.full((1, 7), 5), output_attentions=True)

    def change(_, tensors):
        for number, layer in enumerate(layers):
            for name in ("q_proj", "k_proj"):
                weight = getattr(layer.self_attn, name).weight.detach()
                tensors["weights", None, f"layers.{number}.attention.{name}"] = weight

    folder = make_run(steps=(0,), shape=make_shape(n_heads=4, n_kv_heads=n_kv_heads), change=change)
    future = torch.ones(7, 7).triu(1).bool()
    pieces = [piece for piece in pieces_of(QKCircuit("weights", None, "all", QK), folder) if piece.head is not None]
    assert len(pieces) == 8
    for piece in pieces:
        x = read[piece.layer].double()
        scores = x @ piece.matrix.entries() @ x.T / math.sqrt(4)
        attention = scores.masked_fill(future, -math.inf).softmax(-1)
        torch.testing.assert_close(attention, out.attentions[piece.layer][0, piece.head].double(), rtol=1e-4, atol=1e-6)
        assert attention[-1].std() > 1e-3  # not all alike


# --- full_ov_circuit


@pytest.mark.parametrize("tied", [True, False])
def test_eigenvalues_of_the_full_ov_circuit(make_run, make_shape, tied, monkeypatch):
    """Those of W_U O_h V_k W_E' (V x V), written out."""
    shape = make_shape().model_copy(update={"tied_embeddings": tied})
    folder = make_run(steps=(0,), shape=shape, change=with_more(tied=tied))
    w_e = stored(folder, "weights", None, "embedding_proj")
    w_u = w_e if tied else stored(folder, "weights", None, "de_embedding_proj")
    for tokens in (7, 4096):  # some of the vocabulary at a time, or all
        monkeypatch.setattr("pico_analyze.components.vocabulary._TOKENS", tokens)
        pieces = pieces_of(FullOVCircuit("weights", None, "all", OV), folder)
        assert [(piece.layer, piece.head) for piece in pieces] == [
            (layer, head) for layer in (0, 1) for head in range(4)
        ]
        for piece in pieces:
            module = f"layers.{piece.layer}.attention."
            o = output_columns(stored(folder, "weights", None, f"{module}o_proj"), 4)[piece.head]
            v = value_rows(stored(folder, "weights", None, f"{module}v_proj"), 4, 2)[piece.head]
            dense = torch.linalg.eigvals(w_u @ o @ v @ w_e.T)
            largest = dense[dense.abs().argsort(descending=True)[:4]]
            ours = torch.linalg.eigvals(piece.matrix.entries())
            ours = ours[ours.abs().argsort(descending=True)[:4]]
            torch.testing.assert_close(ours.abs(), largest.abs(), rtol=1e-9, atol=0)
            torch.testing.assert_close(ours.real.sum(), largest.real.sum(), rtol=1e-9, atol=1e-9)
            positivity = float(dense.real.sum() / dense.abs().sum())
            assert eigenvalue_positivity(piece.matrix) == pytest.approx(positivity, abs=1e-9)


def test_a_head_that_copies(make_run, make_shape):
    """V = 1 on some directions, O its transpose, and one basis for both embeddings: all eigenvalues positive."""

    def change(_, tensors):
        for layer in (0, 1):
            v = torch.randn(8, 16, generator=torch.Generator().manual_seed(layer))
            tensors["weights", None, f"layers.{layer}.attention.v_proj"] = v
            sign = 1.0 if layer == 0 else -1.0
            by_head = [v[4 * k : 4 * k + 4].T for k in (0, 0, 1, 1)]
            tensors["weights", None, f"layers.{layer}.attention.o_proj"] = sign * torch.cat(by_head, 1)

    folder = make_run(steps=(0,), change=change)  # tied
    scores = [
        eigenvalue_positivity(piece.matrix) for piece in pieces_of(FullOVCircuit("weights", None, "all", None), folder)
    ]
    assert scores == pytest.approx([1.0] * 4 + [-1.0] * 4)


def test_the_content_of_a_full_circuit_has_both_embeddings(make_run, make_shape):
    shape = make_shape().model_copy(update={"tied_embeddings": False})
    folder = make_run(steps=(0,), shape=shape, change=with_more(tied=False))
    (first, _) = FullOVCircuit("weights", None, "all", OV).select(open_run(folder).manifests[0])
    assert [row.role for row in first.rows] == ["v", "o", "embed", "unembed"]
    uncaptured = make_run("untied", steps=(0,), shape=shape)
    with pytest.raises(ComponentError, match="needs one weight of role 'unembed'; there are 0"):
        FullOVCircuit("weights", None, "all", OV).select(open_run(uncaptured).manifests[0])


# --- what cannot be had


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (
            lambda: Simple("weights", None, [0, 99], "swiglu.w_2"),
            r"layers \[99\] do not exist; there are 0 to 1",
        ),
        (lambda: Simple("weights", None, [-1], "swiglu.w_2"), r"layers \[-1\] do not exist"),
        (
            lambda: Simple("weights", None, "all", "o_projj"),
            r"no module ends in 'o_projj'; weights there are of .*attention\.o_proj",
        ),
        (lambda: Simple("weights", None, "all", "proj"), "no module ends in 'proj'"),
        (
            lambda: Simple("weights", None, [0], "embedding_proj"),
            r"no module ends in 'embedding_proj' in layers \[0\]",
        ),
        (
            lambda: Simple("gradients", "val", "all", "attention_norm"),
            r"gradients of split val there are of attention\.v_proj",
        ),
        (lambda: OVCircuit("weights", None, [2], OV), r"layers \[2\] do not exist"),
        (
            lambda: OVCircuit("weights", None, [0], OV | {"value_layer": "swiglu.w_2"}),
            r"needs the value projection .* but 'swiglu\.w_2' selects layers\.0\.swiglu\.w_2, of role 'down'",
        ),
        (lambda: Simple("weights", None, "all", OV), "simple takes one module suffix .* or a role"),
        (lambda: Simple("weights", None, "all", None), "simple takes one module suffix"),
        (
            lambda: Simple("weights", None, "all", {"role": "gate"}),
            r"no module has the role 'gate'; weights there are of embed, .*down",
        ),
        (
            lambda: Simple("weights", None, [1], {"role": "embed"}),
            r"no module has the role 'embed' in layers \[1\]",
        ),
        (lambda: QKCircuit("weights", None, "all", OV), r"qk_circuit takes .* with query_layer and key_layer"),
        (lambda: QKCircuit("weights", None, "all", None), "no module has the role 'q'"),
        (lambda: QKCircuit("weights", None, "all", QK, order="pico_v0"), "weights of ov_circuit only"),
        (lambda: Delta("weights", None, "all", OV), "delta takes one module suffix"),
        (
            lambda: Simple("weights", None, "all", "swiglu.w_2", order="pico_v0"),
            "order applies to ov_circuit only",
        ),
        (
            lambda: OVCircuit("weights", None, "all", "attention.v_proj"),
            "mapping with value_layer and output_layer",
        ),
        (
            lambda: OVCircuit("gradients", "val", "all", OV, order="pico_v0"),
            "weights of ov_circuit only, not to gradients",
        ),
    ],
)
def test_what_does_not_exist(run_folder, component, message):
    with pytest.raises(ComponentError, match=message):
        component().select(open_run(run_folder).manifests[0])


@pytest.mark.parametrize(
    "component",
    [lambda *args: Simple(*args, "all", "attention.v_proj"), lambda *args: OVCircuit(*args, "all", OV)],
)
def test_what_was_not_captured(make_run, component):
    uncaptured = open_run(make_run("none", splits=())).manifests[0]
    with pytest.raises(
        ComponentError, match="no activations of split val were captured; besides weights there are none"
    ):
        component("activations", "val").select(uncaptured)
    only_val = open_run(make_run("val", splits=("val",))).manifests[0]
    with pytest.raises(
        ComponentError,
        match=r"no gradients of split train .* there are activations of split val, gradients of split val",
    ):
        component("gradients", "train").select(only_val)
    assert len(component("weights", None).select(uncaptured)) == 2


def test_a_captured_module_is_missing(make_run):
    folder = make_run(change=lambda _, tensors: tensors.pop(("gradients", "val", OUTPUT)))
    with pytest.raises(ComponentError, match=r"no module ends in 'attention\.o_proj' in layers \[0\]"):
        OVCircuit("gradients", "val", [0], OV).select(open_run(folder).manifests[0])


def test_the_table():
    for info in COMPONENTS.values():
        assert info.load()("weights", None, "all", dict.fromkeys(info.suffixes, "x") or "x")
        assert info.problem() is None
        assert info.summary
    with pytest.raises(ComponentError, match=r"there are simple, delta, ov_circuit, .*; did you mean 'ov_circuit'"):
        get_component("ov_circuits")


def test_no_torch_for_the_tables():
    modules = "pico_analyze.components, pico_analyze.results, pico_analyze.checkpoint.reader"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
