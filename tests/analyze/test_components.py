import hashlib
import subprocess
import sys

import pytest
import torch

from pico_analyze.checkpoint.reader import open_run
from pico_analyze.components import COMPONENTS, ComponentError, get_component
from pico_analyze.components.circuits import OVCircuit
from pico_analyze.components.single import Simple

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
        (lambda: Simple("weights", None, "all", OV), "takes one module suffix"),
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
        assert info.summary
    with pytest.raises(ComponentError, match="there are simple, ov_circuit; did you mean 'ov_circuit'"):
        get_component("ov_circuits")


def test_no_torch_for_the_tables():
    modules = "pico_analyze.components, pico_analyze.results, pico_analyze.checkpoint.reader"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
