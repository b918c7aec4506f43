"""The circuits that pico-analyze measures are those by which pico-train's attention works."""

import math

import pytest
import torch

from pico_analyze.components.circuits import OVCircuit, QKCircuit
from pico_train.model.decoder import Attention, RotaryTable


@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (4, 1)])
@torch.no_grad()
def test_attention_from_its_circuits(H: int, K: int) -> None:
    """sum_h softmax(x' W_QK^h x / sqrt(E)) x (W_OV^h)' is the module's output, with all tokens at one position."""
    torch.manual_seed(0)
    d, E, T = 16, 4, 6
    attention = Attention(d, H, K, E, layer=0).double()
    x = torch.randn(1, T, d, dtype=torch.float64)
    cos, sin = (table.expand(T, 1, E) for table in RotaryTable(E, 8, 10_000.0)(5, 6))
    written = attention(x, cos.double(), sin.double(), None, None)[0]

    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    *looking, _ = QKCircuit("weights", None, "all", None).matrices([q, k], H, K)
    *moving, _ = OVCircuit("weights", None, "all", None).matrices([v, o], H, K)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    total = torch.zeros(T, d, dtype=torch.float64)
    for qk, ov in zip(looking, moving, strict=True):
        scores = (x[0] @ qk.entries() @ x[0].T / math.sqrt(E)).masked_fill(future, -math.inf)
        total += scores.softmax(-1) @ x[0] @ ov.entries().T
    torch.testing.assert_close(total, written, rtol=1e-5, atol=1e-7)  # the rotary tables are float32
    assert written.abs().max() > 0.01
