import pytest
import torch

from pico_train.config import ModelConfig
from pico_train.model.decoder import PicoDecoder
from pico_train.model.generation import generate


def tiny(**changes) -> PicoDecoder:
    sizes = {
        "d_model": 16,
        "n_layers": 2,
        "vocab_size": 61,
        "max_seq_len": 24,
        "attention_n_heads": 4,
        "attention_n_kv_heads": 2,
        "activation_hidden_dim": 40,
    }
    model = PicoDecoder(ModelConfig(**{**sizes, "init_std": 0.3, **changes}))
    model.initialize(0)
    return model


def continued(model, prompt_ids, **changes):
    return generate(
        model, prompt_ids, **{"max_new_tokens": 12, "temperature": 0.0, "seed": 0, "eos_id": None, **changes}
    )


@pytest.mark.parametrize("prompt_ids", [[3], [5, 9, 2, 44, 17]], ids=len)
def test_greedy_text_is_the_most_probable_token_of_a_full_forward_each_time(prompt_ids):
    model = tiny()
    ids = list(prompt_ids)
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert continued(model, prompt_ids) == ids[len(prompt_ids) :]
    assert len(set(ids)) > 4


def test_sampled_tokens_follow_the_softmax_at_the_temperature():
    model = tiny(vocab_size=5)
    drawn = [continued(model, [1, 2], max_new_tokens=1, temperature=0.5, seed=s)[0] for s in range(1000)]
    frequencies = torch.bincount(torch.tensor(drawn), minlength=5) / 1000
    logits = model(torch.tensor([[1, 2]]))[0, -1].detach()
    expected = (logits / 0.5).softmax(-1)
    assert float((expected - logits.softmax(-1)).abs().max()) > 0.1  # the temperature matters here
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.064)  # four standard errors, at most


def test_the_seed_decides_the_sample():
    model = tiny()
    first, again, other = (continued(model, [3], temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_text_ends_with_eos():
    model = tiny()
    text = continued(model, [3])
    eos_id = text[4]
    assert continued(model, [3], eos_id=eos_id) == text[: text.index(eos_id) + 1]


@pytest.mark.parametrize(("n_prompt", "n_new"), [(20, 4), (24, 0), (2, 12)])
def test_prompt_and_text_fit_max_seq_len(n_prompt, n_new):
    assert len(continued(tiny(), [7] * n_prompt)) == n_new


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_random_state_stay_as_they_were(training):
    model = tiny(dropout=0.5).train(training)
    plain = tiny()
    before = torch.get_rng_state()
    assert continued(model, [3], temperature=1.0) == continued(plain, [3], temperature=1.0)
    assert all(module.training == training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_continued_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match="prompt is empty"):
        continued(model, [])
    with pytest.raises(ValueError, match=r"25 tokens.*max_seq_len = 24"):
        continued(model, [1] * 25)
    with pytest.raises(ValueError, match=r"temperature is -0\.5"):
        continued(model, [1], temperature=-0.5)
