"""What computes a pass of a run where there is a choice: found out before step 0, printed, and stored in every manifest."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from pico_train.config import ModelConfig
from pico_train.model.decoder import Attention, RotaryTable
from pico_train.model.head import head_chunk


@dataclass(frozen=True)
class Kernels:
    """``attention`` is torch's kernel in a word; ``head_tokens`` the tokens whose logits exist at a time; whether passes are compiled.

    Each of them changes the numbers of a run by rounding only.
    """

    attention: str
    head_tokens: int
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.attention} attention; the head takes {self.head_tokens:,} tokens at a time"


NARROW = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-mixed": torch.float16}


def kernels_of(model: ModelConfig, precision: str, device: torch.device, n_tokens: int) -> Kernels:
    """What computes a pass over ``n_tokens`` at a time on ``device`` in ``precision`` (Lightning's word), before anything is compiled."""
    return Kernels(attention_kernel(model, precision, device), min(head_chunk(model.vocab_size, device.type), n_tokens))


def attention_kernel(model: ModelConfig, precision: str, device: torch.device) -> str:
    """The kernel that torch takes by itself for the attention of ``model``: `flash`, `efficient`, `cudnn`, or `math`, the plain one.

    Asked with what the model hands to it for a whole window of one sequence: the choice depends on heads, their width and sharing,
    the window, the precision, and what the device can do. `none` where the model's attention does not go through torch's.
    """
    narrow = NARROW.get(precision, torch.float32)
    dtype = narrow if precision.endswith("true") else torch.float32
    with torch.device("meta"):
        attention = Attention(model.d_model, model.attention_n_heads, model.n_kv_heads, model.head_dim, layer=0)
    attention = attention.to(dtype).to_empty(device=device)
    rotary = RotaryTable(model.head_dim, model.max_seq_len, model.position_emb_theta).to(device)
    x = torch.zeros(1, model.max_seq_len, model.d_model, dtype=dtype, device=device)
    asked = _Asked()
    with asked, torch.autocast(device.type, narrow) if narrow != dtype else nullcontext():
        attention(x, *rotary(0, model.max_seq_len), mask=None, cache=None)
    return asked.kernel


class _Asked(TorchFunctionMode):
    """Within it attention notes which kernel torch would take, and computes nothing."""

    kernel: str = "none"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q = args[0]
        there = q.device.type in ("cpu", "cuda")  # others have one kernel, and no answer to the question
        choice = torch._fused_sdp_choice(*args, **kwargs) if there else SDPBackend.MATH.value
        self.kernel = SDPBackend(choice).name.lower().removesuffix("_attention")
        return torch.empty_like(q)  # of long windows the answer costs time, and nobody reads it
