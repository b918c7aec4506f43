"""How much memory a run takes, part by part, and from that how many sequences go through the model at a time.

A stated model, held to measured peaks by ``tests/train/test_memory.py``. Letters as in ``model/decoder.py``: D d_model, M MLP width,
H query heads, K kv heads, E head dim, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from pico_train.config import ModelConfig, RunConfig, divisors
from pico_train.errors import UserError
from pico_train.estimate import FP32, capture_bytes
from pico_train.hardware import Hardware
from pico_train.model.head import head_chunk
from pico_train.optim import n_moments
from pico_train.words import counted

BASE_BYTES = 450_000_000  # Python with torch and Lightning loaded, before a model exists
COMPILER_BYTES = 150_000_000  # torch.compile and what it keeps: 93 MB for one layer, more for more
HEADROOM = 0.8  # the share of the free memory that a choice of ours fills: the model may be a quarter off


@dataclass(frozen=True)
class Memory:
    """The peak of a run in bytes, by part; on a GPU, ``device`` of it is there and the rest in the host's memory."""

    base: int
    weights: int
    gradients: int
    moments: int
    activations: int
    head: int
    capture: int
    snapshot: int

    @property
    def device(self) -> int:
        """Weights, gradients, moments, activations and head."""
        return self.weights + self.gradients + self.moments + self.activations + self.head

    @property
    def total(self) -> int:
        """All parts."""
        return self.base + self.device + self.capture + self.snapshot


def memory(
    config: RunConfig, micro_batch_size: int, precision: str = "32-true", *, n_shards: int = 1, on_gpu: bool = False
) -> Memory:
    """The peak of a run that sends ``micro_batch_size`` sequences through the model at a time, on one of ``n_shards`` ranks.

    Throughout there are the interpreter, the weights, the optimizer's moments, what the last save captured, and the snapshot that is
    being written (weights, moments and capture once more). On top of that comes the largest of

    * forward and backward of a micro-batch, beside the gradients of those before it,
    * forward and backward of the probe, beside the gradient of the training pass that is set aside,
    * the head of an evaluation, beside that gradient,
    * the end of a backward: the gradients alone, those of the training pass and of the probe, or with the noise scale of one micro-batch.
    """
    model, training = config.model, config.training
    dynamics, n_sequences = config.checkpointing.learning_dynamics, config.data.dataloader.batch_size
    _, width = _widths(precision)
    weights = width * model.n_parameters // n_shards
    moments = width * n_moments(model, training.optimization.optimizer) // n_shards
    recompute, capture = training.activation_checkpointing, capture_bytes(config)

    def forward(n: int) -> tuple[int, int]:
        tokens = n * model.max_seq_len
        activations = activation_bytes(model, tokens, precision, recompute=recompute, on_gpu=on_gpu)
        head = head_bytes(model, tokens, precision, on_gpu=on_gpu)
        return activations + block_gradient_bytes(model, tokens, precision), head

    beside = 0 if micro_batch_size == n_sequences else weights
    moments_in_time = [(beside, *forward(micro_batch_size)), (weights, 0, 0)]  # gradients, activations, head
    if config.monitoring.gradient_noise_scale:
        moments_in_time.append((2 * weights, 0, 0))
    if capture and dynamics.eval_data is not None:
        probe = forward(min(dynamics.batch_size, dynamics.probe_windows))
        moments_in_time += [(weights, *probe), (2 * weights, 0, 0)]
    if training.compile:  # tried before step 0 and compared: two gradients
        moments_in_time.append((2 * weights, *forward(micro_batch_size)))
    if "held_out" in (config.evaluation.metrics or ()):
        tokens = config.evaluation.held_out.batch_size * model.max_seq_len
        moments_in_time.append((weights, 0, head_bytes(model, tokens, precision, on_gpu=on_gpu, backward=False)))
    gradients, activations, head = max(moments_in_time, key=sum)
    return Memory(
        base=BASE_BYTES + (COMPILER_BYTES if training.compile else 0),
        weights=weights,
        gradients=gradients,
        moments=moments,
        activations=activations,
        head=head,
        capture=capture,
        snapshot=n_shards * (weights + moments) + capture,
    )


def head_bytes(model: ModelConfig, tokens: int, precision: str, *, on_gpu: bool, backward: bool = True) -> int:
    """What the unembedding and the loss of ``tokens`` tokens hold (``model/head.py``): the logits of a chunk of them, once.

    In half precision also in that precision, and again as their gradient. Backward: the hidden states once more without the unscored ones
    and their gradient, and the gradient of the unembedding, which is made beside the loss.
    """
    narrow, _ = _widths(precision)
    rows = min(tokens, head_chunk(model.vocab_size, "cuda" if on_gpu else "cpu"))
    copies = FP32 + (0 if narrow == FP32 else 2 * narrow)
    made = 2 * narrow * tokens * model.d_model + FP32 * model.vocab_size * model.d_model
    return rows * model.vocab_size * copies + made * backward


def activation_bytes(model: ModelConfig, tokens: int, precision: str, *, recompute: bool, on_gpu: bool = False) -> int:
    """What a forward over ``tokens`` keeps for its backward, without the logits.

    Per block and token, counted from what autograd saves: 6 D, on a GPU 8 D (the stream before and after attention, both norms, on a
    GPU before and after their gain, the query, what attention gives, and that once more as the input of W_O), 2 D more with dropout; 2
    K E keys and values; 4 M of the SwiGLU; H + 2 statistics. Outside the blocks D of the last norm, on a GPU 2 D, D more with dropout.
    In half precision the matrix products keep 2 bytes a number; the stream keeps 4. ``recompute`` (activation checkpointing) keeps the
    input of each block, and the rest of one block only.
    """
    narrow, wide = _widths(precision)
    D, dropout = model.d_model, model.dropout > 0
    block = wide * ((6 + 2 * on_gpu + 2 * dropout) * D + model.attention_n_heads + 2)
    block += narrow * (2 * model.n_kv_heads * model.head_dim + 4 * model.activation_hidden_dim)
    kept = model.n_layers * wide * D + block if recompute else model.n_layers * block
    return tokens * (kept + wide * (1 + on_gpu + dropout) * D)


def block_gradient_bytes(model: ModelConfig, tokens: int, precision: str) -> int:
    """What the backward of one block holds beside what the forward has kept: gradients of the stream (2 D) and of the SwiGLU (3 M)."""
    narrow, wide = _widths(precision)
    return tokens * (2 * wide * model.d_model + 3 * narrow * model.activation_hidden_dim)


def _widths(precision: str) -> tuple[int, int]:
    """Bytes of a number in matrix products, and in the residual stream."""
    return FP32 if precision == "32-true" else 2, 2 if precision == "bf16-true" else FP32


def micro_batch_size(config: RunConfig, hardware: Hardware, free: int | None, before: int | None) -> int:
    """How many of the sequences of a rank go through the model at a time; ``free`` bytes are free on the device, or the machine.

    With a number of accumulation steps it follows from that. Under ``auto`` it is the one of ``before``, with which the run has been
    trained so far, if that still fits; else the largest divisor with which the run takes at most ``HEADROOM`` of the free memory.

    Raises:
        UserError: the memory is too little, and ``training.ignore_memory`` does not say to start all the same.
    """
    steps = config.training.optimization.gradient_accumulation_steps
    n_sequences = config.data.dataloader.batch_size // hardware.world_size
    n_shards, on_gpu = hardware.world_size if hardware.strategy == "fsdp" else 1, hardware.accelerator != "cpu"
    if free is not None and hardware.accelerator != "cuda":
        free //= hardware.n_devices  # the ranks of a machine share it

    def needed(size: int) -> int:
        needs = memory(config, size, hardware.precision, n_shards=n_shards, on_gpu=on_gpu)
        return needs.device if on_gpu else needs.total - BASE_BYTES  # what there is already is not free

    if steps != "auto":
        size = n_sequences // steps
    elif free is None:
        raise UserError(
            "training.optimization.gradient_accumulation_steps: 'auto' needs to know the free memory, which this system "
            "does not tell; give a number"
        )
    elif before is not None and n_sequences % before == 0 and needed(before) <= free:
        size = before
    else:
        sizes = divisors(n_sequences)[::-1]
        size = next((size for size in sizes if needed(size) <= HEADROOM * free), 1)
    if free is not None and needed(size) > free and not config.training.ignore_memory:
        raise UserError(
            f"{config.checkpointing.run_name} needs about {needed(size) / 1e9:,.3g} GB more of memory with "
            f"{counted(size, 'sequence')} at a time, and {free / 1e9:,.3g} GB are free; raise "
            "training.optimization.gradient_accumulation_steps (or 'auto'), set training.activation_checkpointing=true, make the model "
            "or its windows smaller, or start all the same with training.ignore_memory=true"
        )
    return size


def free_memory(device: torch.device) -> int | None:
    """The bytes that this process can still take: of ``device`` if that is a GPU, else of the machine; None where nothing tells.

    On Linux a limit of the control group (version 2) counts too, as containers and Slurm set it.
    """
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    [available] = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([available, *control_group_room()])


def control_group_room(root: Path = Path("/sys/fs/cgroup"), of: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What is left of each memory limit that the control groups of this process set, in bytes; none without such groups."""
    own = [line.removeprefix("0::/") for line in of.read_text().splitlines() if line.startswith("0::/")]
    room = []
    for group in [
        path for name in own for path in ((root / name), *(root / name).parents) if path.is_relative_to(root)
    ]:
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cached = int(statistics["inactive_file"])  # given back when it is needed
                room.append(int(limit) - int((group / "memory.current").read_text()) + cached)
        except OSError:  # the topmost group has no limit, and a container may hide those above its own
            continue
    return room
