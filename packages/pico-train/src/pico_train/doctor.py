"""``pico-train doctor``: what this machine has, and what each optional path computes here, and how fast, beside the plain one.

A probe runs a forward and backward (of an optimizer: an update) on the plain path and on an optional one, and says how far apart their
numbers are, how long the one takes as a share of the other, or why the optional one cannot run. Nothing is written.
"""

import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pico_train.compile import compiled, largest_error, reason
from pico_train.config import FabricConfig, ModelConfig, RunConfig
from pico_train.flops import peak_flops
from pico_train.hardware import choose_hardware
from pico_train.kernels import attention_kernel, kernels_of
from pico_train.launch import Place
from pico_train.memory import free_memory
from pico_train.model.decoder import PicoDecoder
from pico_train.model.head import head_chunk, head_loss
from pico_train.optim import is_block_matrix
from pico_train.timing import in_turns

HEAD_WIDTHS = (8, 16, 32, 64, 128, 256)  # features
PLAIN = "plain pass, fp32"
LIMIT_S = 0.7  # for the rounds that one path is timed in

Run = Callable[[], list[Tensor]]
"""One forward and backward, or one update: what it has computed. The first call may cost more than those after it."""


@dataclass(frozen=True)
class Size:
    """Large enough that the time says something on its kind of device, small enough for a second or two."""

    model: ModelConfig
    n_sequences: int
    vocab_size: int  # of the head alone

    @property
    def n_tokens(self) -> int:
        """Tokens of one pass."""
        return self.n_sequences * self.model.max_seq_len


ON_CPU = Size(
    ModelConfig(
        d_model=256,
        n_layers=2,
        vocab_size=2048,
        max_seq_len=256,
        attention_n_heads=8,
        attention_n_kv_heads=4,
        activation_hidden_dim=1024,
    ),
    n_sequences=2,
    vocab_size=8192,
)
ON_GPU = Size(
    ModelConfig(
        d_model=1024,
        n_layers=4,
        vocab_size=32768,
        max_seq_len=1024,
        attention_n_heads=16,
        attention_n_kv_heads=4,
        activation_hidden_dim=4096,
    ),
    n_sequences=4,
    vocab_size=32768,
)


@dataclass(frozen=True)
class Path:
    """An optional path: ``prepare`` gives what runs it. ``expected`` are its numbers where the plain path computes something else."""

    name: str
    prepare: Callable[[], Run]
    slow: bool = False  # compiling takes tens of seconds
    expected: Run | None = None
    note: str = ""


@dataclass(frozen=True)
class Probe:
    """What one path came to.

    Attributes:
        against: the plain path that it was compared with.
        error: the largest difference of a tensor over its largest entry, None where the path cannot run.
        time: how long it takes as a share of the plain path, None where it was not timed.
        reason: why it cannot run, or what else there is to say.
    """

    path: str
    against: str
    error: float | None
    time: float | None = None
    reason: str = ""


def facts(runs: Sequence[RunConfig] = ()) -> Iterator[tuple[str, str]]:
    """What the machine has, what ``auto`` makes of it, and what it comes to for each of ``runs``, as pairs of words for a table."""
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
    choices = [
        f"{kernels_by_width(precision, device)} in {precision}"
        for precision in dict.fromkeys(("32-true", hardware.precision, "bf16-mixed"))
    ]
    yield "attention", "; ".join(choices)
    yield "processes", "; ".join(ways_to_talk())
    peak = peak_flops(hardware.device_name, hardware.precision)
    yield "peak", "unknown, so mfu is null" if peak is None else f"{peak / 1e12:.0f} TFLOP/s, of which mfu is the share"
    for config in runs:
        here = choose_hardware(config.training.fabric, Place())
        steps = config.training.optimization.gradient_accumulation_steps
        n_tokens = config.data.dataloader.batch_size * config.model.max_seq_len // (1 if steps == "auto" else steps)
        kernels = kernels_of(config.model, here.precision, torch.device(here.accelerator), n_tokens)
        yield str(config.checkpointing.run_name), f"{here}; {kernels}"


def kernels_by_width(precision: str, device: torch.device) -> str:
    """The attention kernels that torch takes for heads of common widths: ``flash (8 to 128), math (256 features a head)``."""

    def kernel_of(width: int) -> str:
        model = ModelConfig(d_model=4 * width, attention_n_heads=4, attention_n_kv_heads=2, max_seq_len=128)
        return attention_kernel(model, precision, device)

    spans = []
    for name, group in groupby(HEAD_WIDTHS, kernel_of):
        widths = list(group)
        spans.append(f"{name} ({' to '.join(map(str, dict.fromkeys((widths[0], widths[-1]))))})")
    return f"{', '.join(spans)[:-1]} features a head)"


def ways_to_talk() -> Iterator[str]:
    """What several processes could use to train one run together."""
    yield "gloo" if dist.is_gloo_available() else "no gloo, so a run cannot be trained by several"
    if torch.cuda.is_available():
        yield "NCCL" if dist.is_nccl_available() else "no NCCL, so not by several GPUs"


def probes(*, slow: bool) -> Iterator[Probe]:
    """The plain pass first, then each optional path; slow ones are left out with a word unless they are asked for."""
    device = torch.device(choose_hardware(FabricConfig(), Place()).accelerator)
    for plain, prepare, paths in groups(ON_CPU if device.type == "cpu" else ON_GPU, device):
        try:
            run = prepare()
            expected = [tensor.clone() for tensor in run()]
            fault = "" if all(bool(tensor.isfinite().all()) for tensor in expected) else "not finite"
        except Exception as failure:  # whatever it is, it is what the user wants to know
            fault = reason(failure)
        if plain == PLAIN or fault:
            yield Probe(plain, "", None if fault else 0.0, reason=fault)
        if not fault:
            for path in paths:
                yield probed(path, plain, run, expected, device, slow)
        elif plain == PLAIN:
            return


def probed(path: Path, plain: str, run_plain: Run, expected: list[Tensor], device: torch.device, slow: bool) -> Probe:
    """``path`` beside the ``plain`` one, which has computed ``expected``."""
    if path.slow and not slow:
        return Probe(path.name, plain, None, reason="not tried: it compiles for a while; use --compile")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run = path.prepare()
            wanted = path.expected() if path.expected else expected
            error = max(largest_error([a], [b]) for a, b in zip(run(), wanted, strict=True))
            seconds_plain, seconds = in_turns([run_plain, run], device, limit_s=LIMIT_S)
            return Probe(path.name, plain, error, seconds / seconds_plain, path.note)
        except Exception as failure:  # as above
            told = [str(warning.message).split(" (Triggered")[0] for warning in said if warning.category is UserWarning]
            why = [line for line in told if "runtime disabled" not in line]  # the other kernels, switched off by us
            return Probe(
                path.name, plain, None, reason="; ".join(dict.fromkeys([reason(failure).split(". ")[0], *why]))
            )


def groups(size: Size, device: torch.device) -> Iterator[tuple[str, Callable[[], Run], list[Path]]]:
    """Each plain path and the optional ones that take its place."""
    decoder = partial(decoder_pass, size, device)
    yield (
        PLAIN,
        decoder,
        [
            Path("bf16 autocast", partial(decoder, autocast=True)),
            Path("activation checkpointing", partial(decoder, recomputing)),
            Path("torch.compile", partial(decoder, partial(compiled, dropout=0.0)), slow=True),
        ],
    )
    attention = partial(attention_pass, size, device)
    yield (
        "plain attention",
        partial(attention, kernel(SDPBackend.MATH)),
        [
            Path("flash attention", partial(attention, kernel(SDPBackend.FLASH_ATTENTION))),
            Path("memory-efficient attention", partial(attention, kernel(SDPBackend.EFFICIENT_ATTENTION))),
            Path("cuDNN attention", partial(attention, kernel(SDPBackend.CUDNN_ATTENTION))),
            Path("FlexAttention", lambda: attention(flex(size.model.max_seq_len, device)), slow=True),
        ],
    )
    head = partial(head_pass, size, device)
    yield "plain head", partial(head, plain_head), [Path("head in chunks", partial(head, chunked_head))]
    update = partial(optimizer_update, size, device)
    yield (
        "plain AdamW",
        partial(update, partial(torch.optim.AdamW, foreach=False)),
        [
            Path("fused AdamW", partial(update, partial(torch.optim.AdamW, fused=True))),
            Path(
                "Muon",
                partial(update, torch.optim.Muon),
                expected=partial(muon_update, size, device),
                note="the error is against its formula in fp32",
            ),
        ],
    )
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        yield "plain sum", partial(sum_pass, gpus, added), [Path("NCCL all_reduce", partial(sum_pass, gpus, reduced))]


# ---- the pass of a decoder


def decoder_pass(
    size: Size,
    device: torch.device,
    wrap: Callable[[PicoDecoder], nn.Module] = lambda model: model,
    autocast: bool = False,
) -> Run:
    """The loss of a decoder and its gradients, as in training, through what ``wrap`` makes of it; ``autocast`` takes products in bf16."""
    model = PicoDecoder(size.model)
    model.initialize(seed=0)
    model.to(device)
    forward = wrap(model)
    ids = token_ids(size, device, size.model.vocab_size).view(size.n_sequences, -1)

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = forward(ids, labels=ids.roll(-1, dims=1))
        torch.autograd.backward(loss)
        return [loss.detach(), *gradients(model.parameters())]

    return run


def recomputing(model: PicoDecoder) -> PicoDecoder:
    """``model`` with activation checkpointing."""
    model.activation_checkpointing = True
    return model


def token_ids(size: Size, device: torch.device, vocab_size: int) -> Tensor:
    """Made-up ids of all tokens of a pass (N,)."""
    return (torch.arange(size.n_tokens, device=device) * 7919) % vocab_size


def gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of ``tensors``."""
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same standard normal numbers at every call with this shape, on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


# ---- attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_pass(size: Size, device: torch.device, attention: Attention) -> Run:
    """Output and gradients of causal ``attention`` without shared heads, in fp32, or in bf16 on a GPU, where the fast kernels need it."""
    model, dtype = size.model, torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = (3, size.n_sequences, model.attention_n_heads, model.max_seq_len, model.head_dim)
    inputs = [tensor.requires_grad_() for tensor in random(*shape, device=device, dtype=dtype)]

    def run() -> list[Tensor]:
        for tensor in inputs:
            tensor.grad = None
        output = attention(*inputs)
        torch.autograd.backward(output, output.detach())
        return [output.detach(), *gradients(inputs)]

    return run


def kernel(backend: SDPBackend) -> Attention:
    """Causal attention by the kernel ``backend`` and no other."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def flex(n_tokens: int, device: torch.device) -> Attention:
    """Causal attention by FlexAttention, compiled, as it has to be."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    mask = create_block_mask(causal, None, None, n_tokens, n_tokens, device=device)
    return cast(Attention, partial(torch.compile(flex_attention), block_mask=mask))


# ---- the vocabulary head

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def head_pass(size: Size, device: torch.device, head: Head) -> Run:
    """Loss and gradients of ``head`` over the tokens of a pass; its products are in bf16 on a GPU, as in training."""
    hidden = random(size.n_tokens, size.model.d_model, device=device).requires_grad_()  # (N, D)
    weight = (random(size.vocab_size, size.model.d_model, device=device) * 0.02).requires_grad_()  # (V, D)
    labels = token_ids(size, device, size.vocab_size)  # (N,)

    def run() -> list[Tensor]:
        hidden.grad = weight.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = head(hidden, weight, labels)
        torch.autograd.backward(loss)
        return [loss.detach(), *gradients([hidden, weight])]

    return run


def plain_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The logits of all tokens at once, and their cross-entropy."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def chunked_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The head that training takes."""
    return head_loss(hidden, weight, labels, head_chunk(len(weight), hidden.device.type))


# ---- optimizers


def block_matrices(size: Size, device: torch.device) -> list[Tensor]:
    """Made-up gradients of the matrices of the blocks."""
    with torch.device("meta"):
        named = PicoDecoder(size.model).named_parameters()
        shapes = [parameter.shape for name, parameter in named if is_block_matrix(name, parameter)]
    return [random(*shape, device=device) for shape in shapes]


def optimizer_update(size: Size, device: torch.device, optimizer: Callable[..., torch.optim.Optimizer]) -> Run:
    """What updates of all matrices of the blocks, from zeros, come to under ``optimizer``."""
    parameters = []
    for gradient in block_matrices(size, device):
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    moving = optimizer(parameters, lr=1e-3, weight_decay=0.0)

    def run() -> list[Tensor]:
        moving.step()
        return [parameter.detach() for parameter in parameters]

    return run


def muon_update(size: Size, device: torch.device) -> list[Tensor]:
    """The first update of Muon by its formula: -lr sqrt(max(1, rows / columns)) times the gradient made nearly orthogonal.

    Five steps X <- a X + (b X X^T + c (X X^T)^2) X from X = G / |G|_F, in fp32 where torch takes bf16. Source: as in ``optim.muon``.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    updates = []
    for gradient in block_matrices(size, device):
        rows, columns = gradient.shape
        x = gradient / gradient.norm()
        for _ in range(5):
            square = x @ x.T if rows <= columns else x.T @ x
            polynomial = b * square + c * square @ square
            x = a * x + (polynomial @ x if rows <= columns else x @ polynomial)
        updates.append(-1e-3 * max(1, rows / columns) ** 0.5 * x)
    return updates


# ---- several GPUs


def sum_pass(devices: Sequence[torch.device], summed: Callable[[list[Tensor]], Tensor]) -> Run:
    """The sum of one tensor of 4 MB on each of ``devices``, on the first."""
    tensors = [random(2**20, device=device) * (number + 1) for number, device in enumerate(devices)]
    return lambda: [summed([tensor.clone() for tensor in tensors])]


def added(tensors: list[Tensor]) -> Tensor:
    """One after the other, brought to the first device."""
    return sum((tensor.to(tensors[0].device) for tensor in tensors[1:]), tensors[0])


def reduced(tensors: list[Tensor]) -> Tensor:
    """By NCCL."""
    torch.cuda.nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
    return tensors[0]
