"""The head in chunks against torch's own functions over all logits: loss, gradients, masks, precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pico_train.capture import CaptureRule, recording
from pico_train.config import ModelConfig
from pico_train.data.batches import Batch
from pico_train.model.decoder import PicoDecoder
from pico_train.model.head import head_chunk, head_loss
from pico_train.objectives import next_token

N, D, V = 37, 12, 61


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    labels = torch.randint(V, (N,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def chunked_and_plain(chunk: int, dtype: torch.dtype, masked: slice | None = None, scale: float = 1.0) -> list[Tensor]:
    """The largest differences, as shares of the largest magnitude: of the loss and of both gradients."""
    results = []
    for head in (lambda *args: head_loss(*args, chunk), plain_loss):
        hidden, weight, labels = inputs(dtype)
        if masked is not None:
            labels[masked] = -100
        loss = head(hidden, weight, labels)
        (loss * scale).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for mine, plain in zip(*results, strict=True):
        assert mine.dtype == plain.dtype
    return [float((mine - plain).abs().max() / plain.abs().max()) for mine, plain in zip(*results, strict=True)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000])
@pytest.mark.parametrize("masked", [None, slice(0, N, 3), slice(0, 10)], ids=str)
def test_chunks_give_the_numbers_of_the_plain_head(
    dtype: torch.dtype, tolerance: float, chunk: int, masked: slice | None
) -> None:
    assert max(chunked_and_plain(chunk, dtype, masked, scale=0.375)) <= tolerance


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**16)], ids=["bf16", "fp16"])
def test_under_autocast_it_is_as_near_to_fp32_as_the_plain_head(dtype: torch.dtype, scale: float) -> None:
    exact = [x.detach() for x in inputs(torch.float32)]
    errors: dict[str, list[float]] = {}
    wanted = [x.requires_grad_() for x in exact[:2]]
    plain_loss(*wanted, exact[2]).backward()
    for name, head in {"chunked": lambda *args: head_loss(*args, 8), "plain": plain_loss}.items():
        hidden, weight, labels = inputs(torch.float32)
        with torch.autocast("cpu", dtype):
            loss = head(hidden, weight, labels)
        assert loss.dtype == torch.float32
        (loss * scale).backward()
        pairs = ((hidden.grad, wanted[0].grad), (weight.grad, wanted[1].grad))
        errors[name] = [float((mine / scale - best).norm() / best.norm()) for mine, best in pairs]  # type: ignore[operator, union-attr]
    for chunked, plain in zip(errors["chunked"], errors["plain"], strict=True):
        assert chunked <= 1.2 * plain
        assert plain < 0.01


def test_a_loss_beyond_the_range_of_exp_is_exact() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [-200.0]]).requires_grad_()
    loss = head_loss(hidden, weight, torch.tensor([1]), chunk=64)
    loss.backward()
    assert loss.item() == 200
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [1, -1]


def test_what_is_not_finite_stays_so() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        hidden[3, 4] = torch.inf
    assert not head_loss(hidden, weight, labels, chunk=8).isfinite()
    assert head_loss(hidden, weight, torch.full_like(labels, -100), chunk=8).isnan()


def test_without_gradients_it_is_the_same_loss() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = head_loss(hidden, weight, labels, chunk=8)
    with torch.no_grad():
        assert head_loss(hidden, weight, labels, chunk=8).item() == loss.item()


def test_the_gradient_of_the_weight_is_handed_over_without_a_copy() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = head_loss(hidden, weight, labels, chunk=8)
    address = loss.grad_fn.made[1].data_ptr()  # type: ignore[union-attr]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == address


def test_chunks_of_the_measured_shapes() -> None:
    assert head_chunk(50304, "cpu") == 64
    assert head_chunk(4096, "cpu") == 512
    assert head_chunk(50304, "cuda") == 1334


CONFIG = {
    "d_model": 16,
    "n_layers": 2,
    "vocab_size": 50,
    "max_seq_len": 8,
    "attention_n_heads": 4,
    "attention_n_kv_heads": 2,
    "activation_hidden_dim": 24,
}


def model_and_batch(tied: bool) -> tuple[PicoDecoder, Batch]:
    model = PicoDecoder(ModelConfig(**CONFIG, tie_embeddings=tied))  # type: ignore[arg-type]
    model.initialize(0)
    ids = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    return model, Batch(step=0, input_ids=ids, sample_ids=torch.arange(3))


@pytest.mark.parametrize("tied", [False, True])
def test_the_objective_is_the_cross_entropy_of_the_logits(tied: bool) -> None:
    (model, batch), (twin, _) = model_and_batch(tied), model_and_batch(tied)
    loss = next_token(model, batch, step=0)
    loss.backward()
    expected = F.cross_entropy(twin(batch.inputs).flatten(0, 1), batch.labels.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-8, msg=name)


def test_a_captured_head_gives_its_logits_and_changes_no_bit() -> None:
    model, batch = model_and_batch(tied=False)
    next_token(model, batch, step=0).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    with recording(model, CaptureRule("all", ("de_embedding_proj",)), None) as activations:
        next_token(model, batch, step=0).backward()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))  # type: ignore[arg-type]
    torch.testing.assert_close(
        activations["de_embedding_proj"], model(batch.inputs).flatten(0, 1).detach(), rtol=1e-6, atol=1e-7
    )
