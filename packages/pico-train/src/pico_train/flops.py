"""How much a run computes and how much its device could: what ``mfu`` in ``metrics.jsonl`` is made of."""

from pico_train.config import ModelConfig

# Peak of dense matrix products in FLOP/s by a part of the device's name, and by the number type that the products run in: (16 bit, fp32).
# From the data sheets of NVIDIA, without sparsity; fp32 without TF32, which torch leaves off by default. The first part that fits counts.
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 75e12),  # Blackwell architecture brief, HGX B200
    "GH200": (989.4e12, 66.9e12),  # as H100 SXM
    "H200": (989.4e12, 66.9e12),  # H200 data sheet
    "H100 PCIe": (756e12, 51.2e12),  # H100 data sheet
    "H100 NVL": (835.5e12, 60e12),  # H100 NVL product brief
    "H100": (989.4e12, 66.9e12),  # H100 data sheet, SXM5
    "A100": (312e12, 19.5e12),  # A100 data sheet
    "A40": (149.7e12, 37.4e12),  # A40 data sheet
    "A10G": (70e12, 35e12),  # as AWS states for g5
    "A10": (125e12, 31.2e12),  # A10 data sheet
    "L40S": (362e12, 91.6e12),  # L40S data sheet
    "L40": (181e12, 90.5e12),  # L40 data sheet
    "L4": (121e12, 30.3e12),  # L4 data sheet
    "V100-PCIE": (112e12, 14e12),  # V100 data sheet; fp16 only
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),  # T4 data sheet; fp16 only
    "RTX 4090": (165.2e12, 82.6e12),  # Ada white paper, appendix A, fp32 accumulation
    "RTX 3090": (71e12, 35.6e12),  # Ampere GA102 white paper, table 9, fp32 accumulation
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """The peak of ``device_name`` in FLOP/s for matrix products in ``precision`` (Lightning's word); None where it is not known.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16-mixed")
    312000000000000.0
    >>> peak_flops("Intel(R) Xeon(R) Processor", "32-true")
    """
    for part, (half, full) in PEAKS.items():
        if part in device_name:
            return full if precision == "32-true" else half
    return None


def flops_per_token(model: ModelConfig) -> int:
    """Operations of forward and backward per token: 6 N + 12 L H E T.

    N are the parameters that take part in a matrix product (the matrices of the blocks and the unembedding), each with a
    multiplication and an addition forward and twice that backward; the second part is the attention of T tokens to T tokens in L
    layers of H heads of E features, counted in full although half of it is masked. What activation checkpointing repeats does not count.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    n = model.n_parameters_in_matrices + model.vocab_size * model.d_model
    return 6 * n + 12 * model.n_layers * model.d_model * model.max_seq_len
