import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from pico_train.config import ModelConfig
from pico_train.model.decoder import (
    ROLES,
    KVCache,
    PicoDecoder,
    RotaryTable,
    grouped_attention,
    layer_of,
    role_of,
)
from pico_train.model.fused import rotate
from pico_train.model.huggingface import llama_config, llama_state_dict, to_llama_name

TINY = {
    "d_model": 16,
    "n_layers": 2,
    "vocab_size": 61,
    "max_seq_len": 32,
    "attention_n_heads": 4,
    "attention_n_kv_heads": 2,
    "activation_hidden_dim": 40,
}


def random_model(**changes) -> PicoDecoder:
    """A tiny model in which every parameter, norms included, is drawn."""
    model = PicoDecoder(ModelConfig(**{**TINY, **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def llama_twin(model: PicoDecoder, attention: str = "sdpa") -> LlamaForCausalLM:
    fields = llama_config(model.config, bos_token_id=None, eos_token_id=None, dtype=torch.float32)
    twin = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation=attention))
    tensors = llama_state_dict(model)
    if model.config.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    twin.load_state_dict(tensors, strict=True)
    return twin


def random_ids(batch: int, length: int, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))


def assert_equal_to(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Within ``tolerance`` of the largest magnitude that is expected."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    ("attention", "dtype"), [("sdpa", torch.float32), ("eager", torch.float64)], ids=["float32", "float64"]
)
@pytest.mark.parametrize(
    ("changes", "batch", "length"),
    [
        pytest.param({}, 3, 16, id="grouped"),
        pytest.param({"attention_n_kv_heads": None}, 3, 16, id="as many kv heads"),
        pytest.param({"attention_n_kv_heads": 1}, 2, 16, id="one kv head"),
        pytest.param({"tie_embeddings": True}, 3, 16, id="tied"),
        pytest.param({}, 2, 13, id="odd length"),
        pytest.param({}, 1, 32, id="one sequence as long as can be"),
        pytest.param({"n_layers": 1, "norm_eps": 1e-3}, 1, 7, id="one layer"),
        pytest.param({"position_emb_theta": 37.0, "d_model": 24}, 2, 9, id="other base and head dim"),
    ],
)
def test_logits_loss_and_gradients_equal_llama(changes, batch, length, attention, dtype):
    model = random_model(**changes)
    twin = llama_twin(model, attention).to(dtype)
    model.to(dtype)
    ids = random_ids(batch, length)

    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    expected = twin(ids, labels=ids)
    expected.loss.backward()

    assert_equal_to(logits, expected.logits)
    assert_equal_to(loss, expected.loss)
    for name, parameter in model.named_parameters():
        assert_equal_to(parameter.grad, twin.get_parameter(to_llama_name(name)).grad)


def test_models_of_other_size_and_base_live_in_one_process():
    small = random_model(d_model=32, position_emb_theta=1e4)
    large = random_model(d_model=64, position_emb_theta=5e5, max_seq_len=48)
    ids = random_ids(2, 31)
    for model in (small, large, small):
        assert_equal_to(model(ids), llama_twin(model)(ids).logits)


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1], [5, 3], [1, 7, 4], [12]], ids=str)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(pieces):
    model = random_model()
    ids = random_ids(2, sum(pieces))
    cache = KVCache(capacity=20)
    logits = torch.cat([model(piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)
    assert cache.length == sum(pieces)
    torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)


def test_a_sequence_too_long_is_refused_with_both_numbers():
    model = random_model()
    with pytest.raises(ValueError, match=r"33 tokens .*max_seq_len = 32"):
        model(random_ids(1, 33))
    cache = KVCache(capacity=40)
    with torch.no_grad():
        model(random_ids(1, 30), cache)
        with pytest.raises(ValueError, match=r"34 tokens .*max_seq_len = 32"):
            model(random_ids(1, 4), cache)


def test_logits_are_the_unembedded_hidden_states():
    model = random_model()
    ids = random_ids(2, 6)
    hidden = model.hidden_states(ids)
    assert hidden.shape == (2, 6, 16)
    assert torch.equal(model(ids), hidden @ model.de_embedding_proj.weight.T)


def test_a_token_sees_nothing_after_it():
    model = random_model()
    ids = random_ids(1, 10)
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % 61
    same = (model(ids) == model(changed)).all(dim=-1)[0]
    assert same[:6].all()
    assert not same[6:].any()


@pytest.mark.parametrize("masked", [False, True])
def test_shared_and_copied_kv_heads_agree(masked):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, 5, 8, generator=generator)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if masked else None
    shared, copied = (grouped_attention(q, k, v, mask, share) for share in (True, False))
    torch.testing.assert_close(shared, copied, rtol=1e-6, atol=1e-6)
    scores = (q[1, 4] @ k[1, 1].T) / math.sqrt(8)  # head 4 of 6 reads kv head 4 // 3 = 1
    by_hand = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1) @ v[1, 1]
    torch.testing.assert_close(copied[1, 4], by_hand, rtol=1e-6, atol=1e-6)


# ---- rotary table


def exact_angles(start: int, end: int, head_dim: int, theta: float) -> torch.Tensor:
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(start, end, dtype=torch.float64), frequencies)


def test_rotation_is_multiplication_by_a_complex_number():
    table = RotaryTable(head_dim=8, max_seq_len=20, theta=100.0)
    x = torch.randn(2, 20, 3, 8, generator=torch.Generator().manual_seed(0))
    angles = exact_angles(0, 20, 8, 100.0)[:, None]
    turned = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.exp(1j * angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(rotate(x, *table(0, 20)), expected, rtol=1e-5, atol=1e-5)


def cast_after(model_dtype: torch.dtype) -> PicoDecoder:
    return random_model(max_seq_len=320).to(model_dtype)


def built_in(model_dtype: torch.dtype) -> PicoDecoder:
    torch.set_default_dtype(model_dtype)  # what Fabric does under bf16-true
    try:
        return random_model(max_seq_len=320).to(model_dtype)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("make", [cast_after, built_in])
def test_a_bf16_model_keeps_exact_angles(make):
    model = make(torch.bfloat16)
    unit = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.bfloat16).expand(1, 51, 1, 4)
    turned = rotate(unit, *model.rotary(250, 301))[0, :, 0]  # cos of each pair, then sin
    assert turned.dtype == torch.bfloat16
    angles = exact_angles(250, 301, 4, 10000.0)
    exact = torch.cat((angles.cos(), angles.sin()), dim=-1)
    # Half a unit of bf16's last place, and the fp32 rounding of a phase of 300.
    assert ((turned.double() - exact).abs() <= 2**-8 * exact.abs() + 300 * 2**-23).all()


def test_no_cast_touches_the_table_and_no_file_holds_it():
    model = random_model()
    before = model.rotary.cos.clone(), model.rotary.sin.clone()
    model.to(torch.float16).to(torch.bfloat16).double().float()
    assert torch.equal(model.rotary.cos, before[0])
    assert torch.equal(model.rotary.sin, before[1])
    assert model.rotary.cos.dtype == torch.float32
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_a_model_from_the_meta_device_has_its_table_and_its_tie():
    with torch.device("meta"):
        model = PicoDecoder(ModelConfig(**TINY, tie_embeddings=True))
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 61)
    model.to_empty(device="cpu")
    model.initialize(3)
    assert model.de_embedding_proj.weight is model.embedding_proj.weight
    other = PicoDecoder(ModelConfig(**TINY, tie_embeddings=True))
    other.initialize(3)
    assert torch.equal(model(random_ids(2, 9)), other(random_ids(2, 9)))


# ---- parameters


@pytest.mark.parametrize(
    ("d_model", "count"), [(96, 11_282_784), (384, 64_595_328), (768, 181_095_168), (1536, 569_808_384)]
)
def test_the_published_sizes(d_model, count):
    config = ModelConfig(d_model=d_model, activation_hidden_dim=4 * d_model)
    with torch.device("meta"):
        model = PicoDecoder(config)
    assert sum(p.numel() for p in model.parameters()) == count
    assert config.n_parameters == count


@pytest.mark.parametrize("tied", [False, True])
def test_the_config_counts_parameters_as_the_model_does(tied):
    config = ModelConfig(**TINY, tie_embeddings=tied)
    model = PicoDecoder(config)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    assert config.n_parameters == sum(counts.values())
    within = sum(n for name, n in counts.items() if "embedding_proj" not in name)
    assert config.n_parameters_without_embeddings == within


def test_every_module_with_a_weight_has_a_role_and_a_layer():
    model = random_model(n_layers=12)
    names = [name.removesuffix(".weight") for name in model.state_dict()]
    assert {role_of(name) for name in names} == set(ROLES.values())
    assert role_of("layers.11.swiglu.w_0") == "gate"
    assert [layer_of(f"layers.{n}.attention.v_proj") for n in (0, 1, 11)] == [0, 1, 11]
    assert layer_of("embedding_proj") is None
    assert sum(layer_of(name) == 1 for name in names) == 9


# ---- initialisation


def initialized(seed: int, **changes) -> PicoDecoder:
    sizes = {"d_model": 64, "activation_hidden_dim": 256, "vocab_size": 500}
    model = PicoDecoder(ModelConfig(**{**TINY, **sizes, **changes}))
    model.initialize(seed)
    return model


@pytest.mark.parametrize("scheme", ["normal", "torch_default"])
def test_the_seed_decides_every_weight(scheme):
    first, again, other = (initialized(seed, initialization=scheme).state_dict() for seed in (1, 1, 2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, other[name]) == name.endswith("norm.weight")
    assert not torch.equal(first["layers.0.attention.q_proj.weight"], first["layers.1.attention.q_proj.weight"])


def test_normal_initialisation():
    for name, tensor in initialized(0, init_std=0.05).state_dict().items():
        role = role_of(name.removesuffix(".weight"))
        if role.endswith("norm"):
            assert (tensor == 1).all()
            continue
        std = 0.05 / 2 if role in ("o", "down") else 0.05  # sqrt(2 * 2 layers) = 2
        assert abs(float(tensor.mean())) < 5 * std / math.sqrt(tensor.numel())
        assert float(tensor.std()) == pytest.approx(std, rel=0.05)
        assert float(tensor.abs().max()) > 3 * std  # not uniform


def test_torch_default_initialisation():
    for name, tensor in initialized(0, initialization="torch_default").state_dict().items():
        role = role_of(name.removesuffix(".weight"))
        if role.endswith("norm"):
            assert (tensor == 1).all()
        elif role == "embed":
            assert float(tensor.std()) == pytest.approx(1.0, rel=0.05)
            assert float(tensor.abs().max()) > 3
        else:
            bound = 1 / math.sqrt(256 if role == "down" else 64)
            assert 0.99 * bound < float(tensor.abs().max()) <= bound
            assert float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_initialisation_depends_on_neither_dtype_nor_global_state():
    torch.manual_seed(0)
    exact = initialized(7)
    rounded = random_model().to(torch.bfloat16)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    same = PicoDecoder(exact.config).to(torch.bfloat16)
    torch.set_rng_state(before)
    same.initialize(7)
    rounded.initialize(7)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in same.state_dict().items():
        assert torch.equal(tensor, exact.state_dict()[name].to(torch.bfloat16))


# ---- dropout and mixed precision


def test_dropout_acts_in_training_only():
    model = random_model(dropout=0.3)
    plain = random_model(dropout=0.0)
    ids = random_ids(2, 8)
    torch.manual_seed(0)
    assert not torch.equal(model(ids), model(ids))
    assert torch.equal(model.eval()(ids), plain(ids))
    before = torch.get_rng_state()
    assert torch.equal(plain.train()(ids), plain.eval()(ids))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_acts_on_the_embedding_and_on_both_branches():
    model = random_model(dropout=0.5, n_layers=1)
    torch.manual_seed(0)
    shares = []
    for module in (model.dropout, model.layers[0].dropout):
        module.register_forward_hook(lambda _, __, out: shares.append(float((out == 0).float().mean())))
    model(random_ids(8, 32))
    assert shares == pytest.approx([0.5, 0.5, 0.5], abs=0.05)  # embedding, attention, SwiGLU


def test_training_under_autocast():
    model = random_model()
    ids = random_ids(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
    assert logits.dtype == torch.bfloat16
    assert_equal_to(logits.float(), model(ids), tolerance=0.05)
    logits.float().logsumexp(-1).mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
