"""``pico-train doctor``: what this machine has, and which optional paths compute here what the plain path computes.

Each probe runs one forward and backward of a small problem on the plain path and on an optional one, and says how far apart their
gradients are or why the optional one cannot run. Nothing is written.
"""

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pico_train.compile import compiled, largest_error, reason
from pico_train.config import FabricConfig, ModelConfig
from pico_train.flops import peak_flops
from pico_train.hardware import choose_hardware
from pico_train.launch import Place
from pico_train.memory import free_memory
from pico_train.model.decoder import PicoDecoder

MODEL = ModelConfig(
    d_model=64,
    n_layers=2,
    vocab_size=512,
    max_seq_len=64,
    attention_n_heads=4,
    attention_n_kv_heads=2,
    activation_hidden_dim=128,
)
SLOW = ("torch.compile", "FlexAttention")  # compiling takes tens of seconds


@dataclass(frozen=True)
class Probe:
    """One path: the largest difference of its gradients from the plain one's over their largest entry, or why there is none."""

    path: str
    error: float | None
    seconds: float
    reason: str


def facts() -> Iterator[tuple[str, str]]:
    """What the machine has and what ``auto`` makes of it, as pairs of words for a table."""
    hardware = choose_hardware(FabricConfig(), Place())
    device = torch.device(hardware.accelerator)
    yield (
        "system",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
    )
    yield "CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    free = free_memory(torch.device("cpu"))
    yield "memory", "unknown" if free is None else f"{free / 1e9:.1f} GB free"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        free = free_memory(torch.device("cuda", number)) or 0
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        yield f"GPU {number}", f"{gpu.name}, {capability}, {free / 1e9:.1f} of {gpu.total_memory / 1e9:.1f} GB free"
    if torch.backends.mps.is_available():
        yield "GPU", "Apple, through MPS"
    yield "auto takes", str(hardware)
    allowed = ["32-true", "bf16-mixed", "bf16-true"] + ["16-mixed"] * (hardware.accelerator == "cuda")
    yield "precisions", ", ".join(allowed)
    yield "attention", f"{attention_kernel(device)} for {MODEL.head_dim} features per head"
    peak = peak_flops(hardware.device_name, hardware.precision)
    yield "peak", "unknown, so mfu is null" if peak is None else f"{peak / 1e12:.0f} TFLOP/s, of which mfu is the share"


def attention_kernel(device: torch.device) -> str:
    """The kernel that torch takes by itself for causal attention on ``device``, in a word."""
    q, k, v = attention_inputs(device)
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True)
    return SDPBackend(choice).name.lower().removesuffix("_attention").replace("_", " ")


def probes(*, slow: bool) -> Iterator[Probe]:
    """The plain path first, then each optional one; ``slow`` ones are left out with a word unless they are asked for."""
    device = torch.device(choose_hardware(FabricConfig(), Place()).accelerator)
    began = time.perf_counter()
    try:
        plain = decoder_gradients(device, lambda model: model)
        math = attention_gradients(device, kernel(SDPBackend.MATH))
        finite = all(bool(tensor.isfinite().all()) for tensor in (*plain, *math))
    except Exception as failure:  # whatever it is, it is what the user wants to know
        yield Probe("plain fp32", None, time.perf_counter() - began, reason(failure))
        return
    yield Probe("plain fp32", 0.0 if finite else None, time.perf_counter() - began, "" if finite else "not finite")
    paths: dict[str, tuple[list[Tensor], Callable[[], list[Tensor]]]] = {
        "bf16 autocast": (plain, lambda: autocast_gradients(device)),
        "activation checkpointing": (plain, lambda: decoder_gradients(device, recomputing)),
        "flash attention": (math, lambda: attention_gradients(device, kernel(SDPBackend.FLASH_ATTENTION))),
        "memory-efficient attention": (
            math,
            lambda: attention_gradients(device, kernel(SDPBackend.EFFICIENT_ATTENTION)),
        ),
        "cuDNN attention": (math, lambda: attention_gradients(device, kernel(SDPBackend.CUDNN_ATTENTION))),
        "FlexAttention": (math, lambda: attention_gradients(device, flex)),
        "torch.compile": (plain, lambda: decoder_gradients(device, lambda model: compiled(model, dropout=0.0))),
    }
    for path, (expected, run) in paths.items():
        if path in SLOW and not slow:
            yield Probe(path, None, 0.0, "not tried: it compiles for a while; use --compile")
            continue
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                error = largest_error(run(), expected)
                yield Probe(path, error, time.perf_counter() - began, "")
            except Exception as failure:  # as above
                told = [
                    str(warning.message).split(" (Triggered")[0] for warning in said if warning.category is UserWarning
                ]
                why = [line for line in told if "runtime disabled" not in line]  # the other kernels, switched off by us
                lines = dict.fromkeys([reason(failure).split(". ")[0], *why])
                yield Probe(path, None, time.perf_counter() - began, "; ".join(lines))


def decoder_gradients(device: torch.device, wrap: Callable[[PicoDecoder], nn.Module]) -> list[Tensor]:
    """The gradient of a small decoder's loss, through what ``wrap`` makes of it."""
    model = PicoDecoder(MODEL)
    model.initialize(seed=0)
    model.to(device)
    ids = torch.arange(4 * 65, device=device).view(4, 65) % MODEL.vocab_size
    logits = wrap(model)(ids[:, :-1])
    torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def autocast_gradients(device: torch.device) -> list[Tensor]:
    """``decoder_gradients`` with matrix products in bf16."""
    with torch.autocast(device.type, torch.bfloat16):
        return decoder_gradients(device, lambda model: model)


def recomputing(model: PicoDecoder) -> PicoDecoder:
    """``model`` with activation checkpointing."""
    model.activation_checkpointing = True
    return model


def attention_inputs(device: torch.device) -> list[Tensor]:
    """Query, key and value (B 2, H 4, T 64, E 16) of attention without shared heads."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 64, MODEL.head_dim, generator=generator).to(device).requires_grad_() for _ in range(3)]


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_gradients(device: torch.device, attention: Attention) -> list[Tensor]:
    """Output and gradients of causal ``attention``, in fp32, or in bf16 on a GPU, where the fast kernels need it."""
    inputs = attention_inputs(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    output = attention(*(tensor.to(dtype) for tensor in inputs))
    torch.autograd.backward(output.float().square().sum())
    return [output.detach().float(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def kernel(backend: SDPBackend) -> Attention:
    """Causal attention by the kernel ``backend`` and no other."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by FlexAttention, compiled, as it has to be."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=str(q.device))
    out: Tensor = torch.compile(flex_attention)(q, k, v, block_mask=mask)
    return out
