import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from pico_train.config import ModelConfig
from pico_train.model.decoder import PicoDecoder, role_of
from pico_train.model.huggingface import (
    WeightsError,
    from_llama_name,
    generation_config,
    llama_config,
    llama_state_dict,
    load_llama_state_dict,
    to_llama_name,
)

FORMAT_PAGE = Path(__file__).parents[2] / "packages" / "CHECKPOINT_FORMAT.md"


def tiny(seed: int = 0, **changes) -> PicoDecoder:
    sizes = {
        "d_model": 16,
        "n_layers": 2,
        "vocab_size": 61,
        "max_seq_len": 32,
        "attention_n_heads": 4,
        "attention_n_kv_heads": 2,
        "activation_hidden_dim": 40,
    }
    model = PicoDecoder(ModelConfig(**{**sizes, "init_std": 0.3, **changes}))
    model.initialize(seed)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@torch.no_grad()
def test_a_folder_opens_in_transformers_and_gives_our_logits(tmp_path, tied, dtype):
    model = tiny(tie_embeddings=tied, position_emb_theta=500.0, norm_eps=1e-5).to(dtype)
    save_file(llama_state_dict(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = llama_config(model.config, bos_token_id=1, eos_token_id=2, dtype=dtype)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config(bos_token_id=1, eos_token_id=2)))

    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == dtype
    ids = torch.randint(61, (3, 32), generator=torch.Generator().manual_seed(0))
    expected, actual = theirs(ids).logits, model(ids)
    tolerance = 1e-6 * float(expected.abs().max()) if dtype == torch.float32 else 0  # our norm sums in another order
    assert float((actual - expected).abs().max()) <= tolerance
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2


def test_every_field_of_the_config_is_one_that_transformers_keeps(tmp_path):
    config = tiny(attention_n_kv_heads=None, position_emb_theta=500.0).config
    fields = llama_config(config, bos_token_id=None, eos_token_id=0, dtype=torch.float32)
    assert fields["num_key_value_heads"] == 4
    assert fields["rope_theta"] == 500.0
    (tmp_path / "config.json").write_text(json.dumps(fields))
    kept = AutoConfig.from_pretrained(tmp_path).to_dict()
    for key in fields.keys() - {"rope_theta"}:  # what version 4 reads
        assert kept[key] == fields[key], key


def test_names_and_roles_are_those_of_the_format_page():
    rows = re.findall(
        r"^\| `([\w.]+)` \| (\w+) \| `([\w.]+)`.*\|$", FORMAT_PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    rows = [(module, role, key) for module, role, key in rows if key.endswith(".weight")]
    for module, role, key in rows:
        name = module.replace("layers.N.", "layers.11.") + ".weight"
        key = key.replace("layers.N.", "layers.11.")
        assert to_llama_name(name) == key
        assert from_llama_name(key) == name
        assert role_of(name.removesuffix(".weight")) == role
    modules = {re.sub(r"layers\.\d+", "layers.N", name.removesuffix(".weight")) for name in tiny().state_dict()}
    assert {module for module, _, _ in rows} == modules


@pytest.mark.parametrize("name", ["layers.0.attention.w_proj.weight", "lm_head.weight", "layers.0.rotary.cos"])
def test_a_name_that_is_no_parameter_is_refused(name):
    with pytest.raises(WeightsError, match=re.escape(repr(name))):
        to_llama_name(name)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_come_back_from_a_file_bit_for_bit(tmp_path, tied):
    saved, loaded = tiny(0, tie_embeddings=tied), tiny(1, tie_embeddings=tied)
    tensors = llama_state_dict(saved)
    assert ("lm_head.weight" in tensors) != tied
    save_file(tensors, tmp_path / "model.safetensors")
    load_llama_state_dict(loaded, load_file(tmp_path / "model.safetensors"))
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert (loaded.de_embedding_proj.weight is loaded.embedding_proj.weight) == tied


def test_tensors_that_do_not_fit_are_all_listed_and_none_is_used():
    model = tiny(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = llama_state_dict(tiny(1))
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(40, 16)
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(16, 16)
    with pytest.raises(WeightsError) as error:
        load_llama_state_dict(model, tensors)
    message = str(error.value)
    assert "model.norm.weight is missing" in message
    assert "model.layers.2.mlp.up_proj.weight is unexpected" in message
    assert "k_proj.weight has shape [16, 16], the model needs [8, 16]" in message
    assert message.count(";") == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
