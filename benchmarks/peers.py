"""One training step of pico-train for a side-by-side timing with other trainers.

A harness that times several frameworks on one decoder shape calls ``build`` with the shape and drives what it returns: the model, its
logits, and the loss as the trainer computes it, objective and all. Backward and AdamW are the harness's own, the same for everybody.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pico_train.config import ModelConfig
from pico_train.data.batches import Batch
from pico_train.heap import keep_freed_memory
from pico_train.model.decoder import PicoDecoder
from pico_train.objectives import next_token

ROLES = {
    "embed": "embedding_proj",
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.o_proj",
    "gate": "swiglu.w_0",
    "up": "swiglu.w_1",
    "down": "swiglu.w_2",
    "norm1": "attention_norm",
    "norm2": "swiglu_norm",
    "norm": "output_norm",
    "head": "de_embedding_proj",
}
"""The harness's name of a weight, without its layer -> ours."""


def build(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    hidden: int,
    vocab: int,
    seq: int,
    batch: int,
    rope_theta: float,
    norm_eps: float,
) -> dict[str, Any]:
    """The model of this shape with what a harness needs to drive it: ``logits(m, x)``, ``loss(m, x, y)`` and ``load(m, weights)``.

    ``x`` and ``y`` are token ids and the ids that follow them, (batch, seq) each. ``load`` takes weights by ``<layer>.<role>`` or
    ``<role>`` whose rotary pairs are interleaved.
    """
    config = ModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        vocab_size=vocab,
        max_seq_len=seq,
        attention_n_heads=n_heads,
        attention_n_kv_heads=n_kv_heads,
        activation_hidden_dim=hidden,
        norm_eps=norm_eps,
        position_emb_theta=rope_theta,
    )
    keep_freed_memory(2**30)  # the trainer takes what pico_train.memory states
    model = PicoDecoder(config)
    model.initialize(seed=0)

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        windows = torch.cat((x, y[:, -1:]), dim=1)  # (batch, seq + 1), as the trainer reads them
        return next_token(module, Batch(step=0, input_ids=windows, sample_ids=torch.arange(len(x))), step=0)

    @torch.no_grad()
    def load(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            layer, _, role = name.rpartition(".")
            if role in ("q", "k"):
                pairs = weight.view(-1, config.head_dim // 2, 2, d_model)  # (heads, pair, member, D), interleaved
                weight = pairs.transpose(1, 2).reshape(weight.shape)  # all first members, then all second ones
            place = f"layers.{layer}.{ROLES[role]}" if layer else ROLES[role]
            module.get_parameter(f"{place}.weight").copy_(weight)

    return {"module": model, "logits": lambda module, x: module(x), "loss": loss, "load": load}
