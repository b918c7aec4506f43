import pytest
import torch

from pico_train.capture import CaptureRule, modules_to_capture, probe_pass, recording
from pico_train.config import ModelConfig
from pico_train.data.batches import Batch
from pico_train.errors import PicoError, UserError
from pico_train.model.decoder import PicoDecoder

CONFIG = ModelConfig(
    d_model=16,
    n_layers=2,
    vocab_size=50,
    max_seq_len=8,
    attention_n_heads=4,
    attention_n_kv_heads=2,
    activation_hidden_dim=24,
    dropout=0.2,
)


def make_model() -> PicoDecoder:
    model = PicoDecoder(CONFIG)
    model.initialize(0)
    return model


def make_batch(n: int = 4) -> Batch:
    ids = torch.randint(50, (n, 9), generator=torch.Generator().manual_seed(1))
    return Batch(step=0, input_ids=ids, sample_ids=torch.arange(10, 10 + n))


ACTIVATION = torch.arange(2 * 3 * 2.0).view(2, 3, 2)  # (B, T, F)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (CaptureRule("last", ("m",)), [[4, 5], [10, 11]]),
        (CaptureRule("position", ("m",), position=0), [[0, 1], [6, 7]]),
        (CaptureRule("position", ("m",), position=-2), [[2, 3], [8, 9]]),
        (CaptureRule("mean", ("m",)), [[2, 3], [8, 9]]),
        (CaptureRule("all", ("m",)), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
    ],
)
def test_rows_of_a_rule(rule: CaptureRule, expected: list[list[float]]) -> None:
    assert rule.rows(ACTIVATION, None).tolist() == expected


def test_rows_of_rule_sample() -> None:
    rule = CaptureRule("sample", ("m",), tokens_per_sequence=2)
    positions = torch.tensor([[0, 2], [1, 2]])
    assert rule.rows(ACTIVATION, positions).tolist() == [[0, 1], [4, 5], [8, 9], [10, 11]]


def test_sampled_positions_depend_on_seed_and_sample_alone() -> None:
    rule = CaptureRule("sample", ("m",), tokens_per_sequence=3)
    batch = make_batch()
    whole = rule.positions(batch, seed=5)
    assert whole is not None
    parts = [rule.positions(part, seed=5) for part in batch.split(1)]
    assert torch.equal(whole, torch.cat([part for part in parts if part is not None]))
    other = rule.positions(batch, seed=6)
    assert other is not None
    assert not torch.equal(whole, other)


def test_mean_is_taken_in_fp32_and_stored_in_the_dtype_of_the_activation() -> None:
    x = torch.full((1, 1000, 1), 1.0078125, dtype=torch.bfloat16)  # summed in bf16 it would stall at 256
    rows = CaptureRule("mean", ("m",)).rows(x, None)
    assert rows.dtype == torch.bfloat16
    assert rows.item() == 1.0078125


def test_modules_are_matched_at_a_dot() -> None:
    model = make_model()
    assert modules_to_capture(model, ["v_proj", "swiglu.w_2", "output_norm"]) == (
        "layers.0.attention.v_proj",
        "layers.0.swiglu.w_2",
        "layers.1.attention.v_proj",
        "layers.1.swiglu.w_2",
        "output_norm",
    )
    with pytest.raises(UserError, match=r"'_proj' matches no module; there are: .*attention\.k_proj.*swiglu\.w_0"):
        modules_to_capture(model, ["_proj"])


@pytest.mark.parametrize("rule_name", ["last", "all", "sample"])
def test_recording_is_the_same_in_any_micro_batches(rule_name: str) -> None:
    model, batch = make_model().eval(), make_batch()
    rule = CaptureRule(rule_name, modules_to_capture(model, ["v_proj", "w_2"]), tokens_per_sequence=3)  # type: ignore[arg-type]
    positions = rule.positions(batch, seed=0)
    recorded = []
    for size in (4, 3, 1):
        with recording(model, rule, positions) as activations:
            for micro in batch.split(size):
                model(micro.inputs)
        recorded.append(activations)
    for other in recorded[1:]:
        for name, rows in recorded[0].items():
            torch.testing.assert_close(other[name], rows, rtol=1e-6, atol=1e-7)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("tied", [False, True])
def test_activation_checkpointing_changes_no_bit_and_is_recorded_once(tied: bool) -> None:
    """Forward and backward in two micro-batches with dropout, with and without."""
    found = []
    for checkpointing in (False, True):
        model = PicoDecoder(CONFIG.model_copy(update={"tie_embeddings": tied}))
        model.initialize(0)
        model.activation_checkpointing = checkpointing
        calls = 0

        def count(*args: object) -> None:
            nonlocal calls
            calls += 1

        model.layers[0].attention.v_proj.register_forward_hook(count)
        rule = CaptureRule("all", modules_to_capture(model, ["v_proj", "w_2", "output_norm"]))
        torch.manual_seed(7)
        with recording(model, rule, None) as activations:
            for part in make_batch().split(2):
                torch.nn.functional.cross_entropy(model(part.inputs).flatten(0, 1), part.labels.flatten()).backward()
        found.append((activations, [parameter.grad for parameter in model.parameters()]))
        assert calls == (4 if checkpointing else 2)
    (plain_rows, plain), (rows, gradients) = found
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    assert rows.keys() == plain_rows.keys()
    assert all(torch.equal(rows[name], plain_rows[name]) for name in rows)


def test_a_module_that_the_pass_does_not_call_is_named() -> None:
    model = make_model()
    rule = CaptureRule("last", modules_to_capture(model, ["v_proj", "de_embedding_proj"]))
    with pytest.raises(PicoError, match="de_embedding_proj was never called"), recording(model, rule, None):
        model.hidden_states(make_batch().inputs)


def test_hooks_are_gone_after_an_error() -> None:
    model = make_model()
    rule = CaptureRule("last", modules_to_capture(model, ["v_proj"]))
    with pytest.raises(ZeroDivisionError), recording(model, rule, None):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())


def test_the_probe_leaves_no_trace() -> None:
    model, batch = make_model().train(), make_batch()
    rule = CaptureRule("last", modules_to_capture(model, ["v_proj"]))
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index)
    before = [parameter.grad for parameter in model.parameters()]
    random_state = torch.get_rng_state()

    def forward_backward() -> None:
        torch.manual_seed(3)
        logits = model(batch.inputs)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()

    first = probe_pass(model, batch, rule, forward_backward)
    second = probe_pass(model, batch, rule, forward_backward)
    for index, (parameter, gradient) in enumerate(zip(model.parameters(), before, strict=True)):
        assert parameter.grad is gradient
        assert (gradient == index).all()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name])
        assert gradient.abs().sum() > 0
