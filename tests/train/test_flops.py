import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pico_train.config import ModelConfig
from pico_train.flops import flops_per_token, peak_flops
from pico_train.loop import Passes
from pico_train.model.decoder import PicoDecoder

CONFIG = ModelConfig(
    d_model=32,
    n_layers=3,
    vocab_size=100,
    max_seq_len=16,
    attention_n_heads=4,
    attention_n_kv_heads=2,
    activation_hidden_dim=48,
)


def test_the_formula_counts_what_torch_counts() -> None:
    """torch counts every matrix product that it is asked for, here with attention as two of them forward and four backward."""
    model, tokens = PicoDecoder(CONFIG), 2 * 16
    with FlopCounterMode(display=False) as counter, sdpa_kernel([SDPBackend.MATH]):
        model(torch.zeros(2, 16, dtype=torch.long)).sum().backward()
    assert counter.get_total_flops() == flops_per_token(CONFIG) * tokens


def test_a_hand_worked_model() -> None:
    tiny = ModelConfig(
        d_model=2,
        n_layers=1,
        vocab_size=3,
        max_seq_len=5,
        attention_n_heads=1,
        attention_n_kv_heads=1,
        activation_hidden_dim=1,
    )
    assert flops_per_token(tiny) == 6 * (4 * 4 + 3 * 2 + 6) + 12 * 2 * 5


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756e12),
        ("NVIDIA H200", "bf16-true", 989.4e12),
        ("NVIDIA A100-SXM4-40GB", "32-true", 19.5e12),
        ("NVIDIA A10G", "bf16-mixed", 70e12),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
        ("NVIDIA L4", "bf16-mixed", 121e12),
        ("Tesla T4", "16-mixed", 65e12),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "32-true", None),
        ("Apple M2", "32-true", None),
    ],
)
def test_peaks(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak


def test_utilisation() -> None:
    at = Passes.__new__(Passes)
    object.__setattr__(at, "flops_per_token", 10**6)
    object.__setattr__(at, "peak_flops", 1e12)
    assert at.mfu(250_000) == 0.25
    object.__setattr__(at, "peak_flops", None)
    assert at.mfu(250_000) is None
