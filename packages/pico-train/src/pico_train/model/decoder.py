"""pico-decoder: a Llama-shaped decoder that reads from top to bottom.

In: token ids. Out: logits, the hidden states before the unembedding, or with labels the loss. The names of the modules are part of
the checkpoint format (packages/CHECKPOINT_FORMAT.md, section 4).

Letters of the shape comments:
    B batch, T time (new tokens), S time (cached and new tokens), V vocabulary, D d_model, M MLP width,
    H query heads, K kv heads, E head dim
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pico_train.config import ModelConfig
from pico_train.model.fused import rms_norm, rotate
from pico_train.model.head import head_chunk, head_loss
from pico_train.sharding import part_like

ROLES = {
    "embedding_proj": "embed",
    "attention_norm": "attention_norm",
    "attention.q_proj": "q",
    "attention.k_proj": "k",
    "attention.v_proj": "v",
    "attention.o_proj": "o",
    "swiglu_norm": "mlp_norm",
    "swiglu.w_0": "gate",
    "swiglu.w_1": "up",
    "swiglu.w_2": "down",
    "output_norm": "output_norm",
    "de_embedding_proj": "unembed",
}
"""Name of a module that holds a weight, without its ``layers.N.`` -> what it is for."""

_IN_BLOCK = re.compile(r"layers\.(\d+)\.")


def role_of(module_name: str) -> str:
    """What the module is for.

    >>> role_of("layers.3.swiglu.w_2")
    'down'
    """
    return ROLES[_IN_BLOCK.sub("", module_name, count=1)]


def layer_of(module_name: str) -> int | None:
    """The number of the block that the module stands in, None outside a block.

    >>> layer_of("layers.11.attention.v_proj"), layer_of("output_norm")
    (11, None)
    """
    match = _IN_BLOCK.match(module_name)
    return int(match[1]) if match else None


class KVCache:
    """The keys and values of the tokens seen so far, one pair of tensors per layer.

    Allocated at the first use, in the dtype and on the device of the keys, for ``capacity`` tokens. It is
    written in place, so it is for decoding without gradients. One cache serves one model and one batch.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, K, T, E) keys and values of a layer; return all of them, (B, K, S, E)."""
        B, K, T, E = k.shape
        if layer == len(self._keys):
            self._keys.append(k.new_empty(B, K, self.capacity, E))
            self._values.append(v.new_empty(B, K, self.capacity, E))
        end = self.length + T
        assert end <= self.capacity, f"{end} tokens in a cache for {self.capacity}"
        self._keys[layer][:, :, self.length : end] = k
        self._values[layer][:, :, self.length : end] = v
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in fp32 and the weight applied after rounding, as in Llama.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return rms_norm(x, self.weight, self.eps)


class RotaryTable(nn.Module):
    """cos and sin of every position, for rotary pairs (i, i + E/2).

    The tables stay fp32 whatever the model is cast to: in bf16 the positions above 256 would run together.
    They follow the device, and are not saved.

    Source: Su et al., "RoFormer", 2021, equation 34, with the halves of Llama in transformers.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.theta = theta
        self._fill(torch.get_default_device())

    def _fill(self, device: torch.device) -> None:
        # fp32 in this order of operations, and not fp64, so that transformers gets the same bits.
        cpu = torch.device("cpu")
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=cpu) / self.head_dim
        frequencies = 1.0 / self.theta**exponents  # (E/2,)
        positions = torch.arange(self.max_seq_len, dtype=torch.float32, device=cpu)
        phases = torch.outer(positions, frequencies)  # (max_seq_len, E/2)
        cos, sin = phases.cos(), phases.sin()
        # The sign of the rotation sits in the table: x1 cos - x2 sin | x2 cos + x1 sin = x cos + swap(x) sin.
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1).to(device), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1).to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Every cast and move of a module passes here. Built again, the tables are exact wherever they end up.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill(self.cos.device)
        return self

    def forward(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The fp32 tables of positions start .. end - 1, each (T, 1, E) so that they broadcast over heads."""
        return self.cos[start:end, None], self.sin[start:end, None]


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, share: bool) -> Tensor:
    """Attention of H query heads over K kv heads: head h reads kv head h // (H / K), shared or copied.

    ``q`` is (B, H, T, E), ``k`` and ``v`` are (B, K, S, E), the result is (B, H, T, E). ``mask`` (T, S) is
    True where a token may look; None is plainly causal.
    """
    if not share:
        n_groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(n_groups, dim=1)  # (B, H, S, E)
        v = v.repeat_interleave(n_groups, dim=1)  # (B, H, S, E)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=share)


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share a key-value head.

    Source: Ainslie et al., "GQA", 2023.
    """

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, head_dim: int, layer: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.layer = layer
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """(B, T, D) -> (B, T, D). ``mask`` as in ``grouped_attention``."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H, E)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)  # (B, T, K, E)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)  # (B, T, K, E)
        q = rotate(q, cos, sin).transpose(1, 2)  # (B, H, T, E)
        k = rotate(k, cos, sin).transpose(1, 2)  # (B, K, T, E)
        v = v.transpose(1, 2)  # (B, K, T, E)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # (B, K, S, E)

        # On a CPU attention over shared k and v is 15 % faster than over copies. On a GPU the kernel that
        # fp32 and cards before Ampere use cannot share: torch would fall back to one that keeps T x S scores.
        y = grouped_attention(q, k, v, mask, share=q.device.type == "cpu")  # (B, H, T, E)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, E) -> (B, T, H E) -> (B, T, D)
        return out


class SwiGLU(nn.Module):
    """w_2(silu(w_0 x) * w_1 x).

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
    """

    def __init__(self, d_model: int, hidden_dim: int) -> None:
        super().__init__()
        self.w_0 = nn.Linear(d_model, hidden_dim, bias=False)
        self.w_1 = nn.Linear(d_model, hidden_dim, bias=False)
        self.w_2 = nn.Linear(hidden_dim, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        out: Tensor = self.w_2(F.silu(self.w_0(x)) * self.w_1(x))  # (B, T, D) -> (B, T, M) -> (B, T, D)
        return out


class Block(nn.Module):
    """Attention and SwiGLU, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config.d_model, config.attention_n_heads, config.n_kv_heads, config.head_dim, layer)
        self.swiglu_norm = RMSNorm(config.d_model, config.norm_eps)
        self.swiglu = SwiGLU(config.d_model, config.activation_hidden_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, mask, cache))
        out: Tensor = x + self.dropout(self.swiglu(self.swiglu_norm(x)))
        return out


class PicoDecoder(nn.Module):
    """The whole model. All state belongs to the instance: models of any sizes live in one process.

    A new model holds torch's default values; ``initialize`` gives it those of the config and a seed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False  # set by who trains: keep the input of each block, compute the rest again
        self.embedding_proj = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.output_norm = RMSNorm(config.d_model, config.norm_eps)
        self.de_embedding_proj = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.rotary = RotaryTable(config.head_dim, config.max_seq_len, config.position_emb_theta)
        self.dropout = nn.Dropout(config.dropout)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            self.de_embedding_proj.weight = self.embedding_proj.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A move away from the meta device makes new parameters, one per module.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None = None,
        labels: Tensor | None = None,
        blocks: Sequence[Callable[..., Tensor]] | None = None,
    ) -> Tensor:
        """Logits of the next token at every position, (B, T) -> (B, T, V).

        With ``labels`` (B, T), their mean cross-entropy in nats instead, by ``head_loss``: a negative one is not scored. ``blocks`` are
        called in place of ``layers``: the same, compiled.
        """
        hidden = self.hidden_states(input_ids, cache, blocks)  # (B, T, D)
        if labels is None:
            logits: Tensor = self.de_embedding_proj(hidden)
            return logits
        if self.de_embedding_proj._forward_hooks:  # captured: the loss below never calls the module
            with torch.no_grad():
                for sequence in torch.split(hidden, 1):
                    self.de_embedding_proj(sequence)
        chunk = head_chunk(self.config.vocab_size, hidden.device.type)
        return head_loss(hidden.flatten(0, 1), self.de_embedding_proj.weight, labels.flatten(), chunk)

    def hidden_states(
        self, input_ids: Tensor, cache: KVCache | None = None, blocks: Sequence[Callable[..., Tensor]] | None = None
    ) -> Tensor:
        """What the unembedding reads, (B, T) -> (B, T, D).

        With a cache, ``input_ids`` continue the tokens that the cache holds, and join them. Raises ValueError
        when the whole sequence is longer than ``max_seq_len``.
        """
        T = input_ids.shape[1]
        start = 0 if cache is None else cache.length
        end = start + T
        limit = self.config.max_seq_len
        if end > limit:
            raise ValueError(f"a sequence of {end} tokens is longer than model.max_seq_len = {limit}")

        x = self.dropout(self.embedding_proj(input_ids))  # (B, T) -> (B, T, D)
        cos, sin = self.rotary(start, end)  # (T, 1, E) each
        mask = None
        if start > 0:  # the new tokens see all cached ones, and each other causally
            mask = torch.ones(T, end, dtype=torch.bool, device=x.device).tril(start)  # (T, S)
        for block in blocks or self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, mask, cache, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask, cache)
        if cache is not None:
            cache.length = end
        hidden: Tensor = self.output_norm(x)
        return hidden

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter from ``seed`` alone: drawn on the CPU in fp32, whatever the device and dtype.

        ``normal``: N(0, init_std^2), and 1 / sqrt(2 n_layers) of that spread for the two projections of each
        block that write to the residual stream, so that its variance does not grow with depth (Radford et
        al., GPT-2, 2019, section 2.3). ``torch_default``, as published: N(0, 1) for the embedding, uniform
        within +-1 / sqrt(fan in) for the rest. Norms are 1 in both. The global random state is not used.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        residual_std = self.config.init_std / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            role = role_of(name.removesuffix(".weight"))
            if role.endswith("norm"):
                parameter.fill_(1.0)
                continue
            value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            if self.config.initialization == "normal":
                std = residual_std if role in ("o", "down") else self.config.init_std
                value.normal_(0.0, std, generator=generator)
            elif role == "embed":
                value.normal_(generator=generator)
            else:
                bound = 1 / math.sqrt(parameter.shape[1])
                value.uniform_(-bound, bound, generator=generator)
            parameter.copy_(part_like(value, parameter))
