"""pico-decoder in the words of transformers: the same tensors under the names of ``LlamaForCausalLM``.

In: a model, or tensors read from ``model.safetensors``. Out: what goes into ``model.safetensors``,
``config.json`` and ``generation_config.json`` of a checkpoint, which then opens with
``AutoModelForCausalLM.from_pretrained(folder)``. The rotary pairs are half-split in both, so this is a
rename. transformers itself is not needed.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pico_train.config import ModelConfig
from pico_train.errors import UserError
from pico_train.model.decoder import PicoDecoder
from pico_train.sharding import part_like

_LLAMA_NAMES = {
    "embedding_proj.weight": "model.embed_tokens.weight",
    "layers.N.attention_norm.weight": "model.layers.N.input_layernorm.weight",
    "layers.N.attention.q_proj.weight": "model.layers.N.self_attn.q_proj.weight",
    "layers.N.attention.k_proj.weight": "model.layers.N.self_attn.k_proj.weight",
    "layers.N.attention.v_proj.weight": "model.layers.N.self_attn.v_proj.weight",
    "layers.N.attention.o_proj.weight": "model.layers.N.self_attn.o_proj.weight",
    "layers.N.swiglu_norm.weight": "model.layers.N.post_attention_layernorm.weight",
    "layers.N.swiglu.w_0.weight": "model.layers.N.mlp.gate_proj.weight",
    "layers.N.swiglu.w_1.weight": "model.layers.N.mlp.up_proj.weight",
    "layers.N.swiglu.w_2.weight": "model.layers.N.mlp.down_proj.weight",
    "output_norm.weight": "model.norm.weight",
    "de_embedding_proj.weight": "lm_head.weight",
}
_PICO_NAMES = {llama: pico for pico, llama in _LLAMA_NAMES.items()}


class WeightsError(UserError):
    """Tensors that are not the weights of this model."""


def to_llama_name(parameter_name: str) -> str:
    """The name in transformers of a parameter of PicoDecoder.

    >>> to_llama_name("layers.11.swiglu.w_0.weight")
    'model.layers.11.mlp.gate_proj.weight'
    """
    return _rename(parameter_name, _LLAMA_NAMES)


def from_llama_name(llama_name: str) -> str:
    """The inverse of ``to_llama_name``.

    >>> from_llama_name("lm_head.weight")
    'de_embedding_proj.weight'
    """
    return _rename(llama_name, _PICO_NAMES)


def _rename(name: str, table: Mapping[str, str]) -> str:
    layer = re.search(r"(?<=layers\.)\d+(?=\.)", name)
    pattern = name if layer is None else name.replace(f"layers.{layer[0]}.", "layers.N.", 1)
    if pattern not in table:
        raise WeightsError(f"there is no parameter {name!r}; the names are {', '.join(table)}")
    return table[pattern] if layer is None else table[pattern].replace(".N.", f".{layer[0]}.", 1)


def llama_state_dict(model: PicoDecoder) -> dict[str, Tensor]:
    """The parameters under their Llama names, contiguous; a tied embedding once, as the embedding.

    The tensors share memory with the model. ``model`` is the bare module: not compiled, not wrapped.
    """
    return {to_llama_name(name): p.detach().contiguous() for name, p in model.named_parameters()}


@torch.no_grad()
def load_llama_state_dict(model: PicoDecoder, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into the model: all of its parameters, and nothing else.

    Each is cast to the dtype and moved to the device of its parameter. Raises WeightsError, and changes
    nothing, when a name is missing or unexpected or a shape differs; all of them are listed.
    """
    parameters = {to_llama_name(name): p for name, p in model.named_parameters()}
    faults = [f"{name} is missing" for name in parameters if name not in tensors]
    for name, tensor in tensors.items():
        if name not in parameters:
            faults.append(f"{name} is unexpected")
        elif tensor.shape != parameters[name].shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, the model needs {list(parameters[name].shape)}")
    if faults:
        raise WeightsError("these weights do not fit the model: " + "; ".join(faults))
    for name, parameter in parameters.items():
        parameter.copy_(part_like(tensors[name], parameter))


def llama_config(
    config: ModelConfig, *, bos_token_id: int | None, eos_token_id: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """``config.json`` of a checkpoint whose tensors are stored in ``dtype``, for transformers 4 and 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.activation_hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.attention_n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.position_emb_theta},
        "rope_theta": config.position_emb_theta,  # where version 4 looks
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "dtype": str(dtype).removeprefix("torch."),
    }


def generation_config(*, bos_token_id: int | None, eos_token_id: int | None) -> dict[str, Any]:
    """``generation_config.json`` of a checkpoint: where a text begins and ends."""
    return {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
