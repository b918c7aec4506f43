import math

import pytest
import torch
from torch import nn

from pico_train.config import ModelConfig, OptimizationConfig
from pico_train.model.decoder import PicoDecoder
from pico_train.optim import (
    ByRole,
    adamw,
    is_block_matrix,
    load_state_by_name,
    moments_of,
    muon,
    n_moments,
    optimizer_of,
    state_by_name,
)
from pico_train.schedule import learning_rate

CURVE = {"peak": 0.1, "warmup_steps": 10, "max_steps": 110, "min_ratio": 0.1, "decay_fraction": 0.2}


def rates(schedule: str, steps: list[int]) -> list[float]:
    return [learning_rate(step, schedule=schedule, **CURVE) for step in steps]


def test_published_curve_starts_at_zero_and_ends_at_zero() -> None:
    assert rates("linear_with_warmup", [0, 5, 10, 60, 110]) == pytest.approx([0, 0.05, 0.1, 0.05, 0])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_our_curves_warm_up_from_the_first_update(schedule: str) -> None:
    assert rates(schedule, [0, 4, 9, 10]) == pytest.approx([0.01, 0.05, 0.1, 0.1])


def test_ends_of_the_curves() -> None:
    assert rates("linear", [60, 110]) == pytest.approx([0.055, 0.01])
    assert rates("cosine", [35, 60, 110]) == pytest.approx([0.01 + 0.09 * (1 + math.cos(math.pi / 4)) / 2, 0.055, 0.01])
    assert rates("wsd", [87, 88, 99, 110]) == pytest.approx([0.1, 0.1, 0.055, 0.01])
    assert rates("constant", [110]) == [0.1]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_proj = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3, bias=False)
        self.w = nn.Linear(3, 3, bias=False)
        self.de_embedding_proj = nn.Linear(3, 5, bias=False)

    def loss(self) -> torch.Tensor:
        return self.de_embedding_proj(self.w(self.norm(self.embedding_proj(torch.arange(5))))).square().sum()


def make(decay_on: str = "matrices") -> tuple[Toy, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Toy()
    return model, adamw(model, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5, decay_on=decay_on, fused=True)


def test_only_matrices_of_the_blocks_decay() -> None:
    model, optimizer = make()
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        "embedding_proj.weight": 0.0,
        "norm.weight": 0.0,
        "w.weight": 0.5,
        "de_embedding_proj.weight": 0.0,
    }
    model, optimizer = make("all")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5]


def make_muon(adjust_lr: str = "original") -> tuple[Toy, ByRole]:
    torch.manual_seed(0)
    model = Toy()
    return model, muon(
        model,
        lr_ratio=4.0,
        momentum=0.9,
        adjust_lr=adjust_lr,  # type: ignore[arg-type]
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.5,
        decay_on="matrices",
        fused=True,
    )


def one_update(model: Toy, optimizer: torch.optim.Optimizer, lr: float = 0.1) -> None:
    optimizer.zero_grad()
    model.loss().backward()
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
    optimizer.step()


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model, optimizer = make_muon()
    twin, adam = make()
    one_update(model, optimizer)
    one_update(twin, adam)
    for name in ("embedding_proj.weight", "norm.weight", "de_embedding_proj.weight"):
        assert torch.equal(model.get_parameter(name), twin.get_parameter(name))
    assert not torch.equal(model.w.weight, twin.w.weight)
    first, rest = optimizer.parts
    assert isinstance(first, torch.optim.Muon)
    assert isinstance(rest, torch.optim.AdamW)
    assert [parameter is model.w.weight for group in first.param_groups for parameter in group["params"]] == [True]


def test_an_update_of_muon_is_that_of_its_paper() -> None:
    """A gradient of known singular vectors, the axes: five steps of the quintic on its singular values, from a matrix of norm 1."""
    model, optimizer = make_muon()
    before = model.w.weight.detach().clone()
    model.w.weight.grad = torch.tensor([3.0, 2.0, 1.0]).diag()
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * group.get("lr_ratio", 1.0)
    optimizer.step()
    sigma = torch.tensor([3.0, 2.0, 1.0]) / math.sqrt(14)  # the first momentum is a multiple of the gradient
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    expected = (
        before * (1 - 0.4 * 0.5) - 0.4 * sigma.diag()
    )  # lr 0.1 * ratio 4, weight decay 0.5; a square needs no adjustment
    torch.testing.assert_close(model.w.weight.detach(), expected, rtol=0.0, atol=0.4 * 0.03)  # computed in bf16
    assert (before * 0.8 - model.w.weight).diag().min() > 0.4 * 0.6


def test_muons_rate_matches_adamws_update_where_asked_to() -> None:
    steps = []
    for adjust_lr in ("original", "match_rms_adamw"):
        model, optimizer = make_muon(adjust_lr)
        before = model.w.weight.detach().clone() * (1 - 0.4 * 0.5)
        one_update(model, optimizer)
        steps.append(before - model.w.weight.detach())
    torch.testing.assert_close(steps[1], 0.2 * math.sqrt(3) * steps[0], rtol=1e-4, atol=1e-6)


def test_what_muon_keeps_of_a_decoder() -> None:
    config = ModelConfig(
        d_model=16, n_layers=2, vocab_size=50, attention_n_heads=4, attention_n_kv_heads=2, activation_hidden_dim=24
    )
    for name in ("adamw", "muon"):
        model = PicoDecoder(config)
        optimizer = optimizer_of(model, OptimizationConfig(optimizer=name), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = state_by_name(model, optimizer)
        assert n_moments(config, name) == sum(t.numel() for key, t in state.items() if not key.endswith(".step"))
    matrices = {key.removesuffix(".momentum_buffer") for key in state if key.endswith(".momentum_buffer")}
    assert matrices == {name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")}
    assert {name for name, p in model.named_parameters() if is_block_matrix(name, p)} == matrices
    assert len(moments_of(optimizer)) == len(list(model.parameters()))


def test_both_keep_their_state_by_name() -> None:
    model, optimizer = make_muon()
    one_update(model, optimizer)
    one_update(model, optimizer)
    stored = {name: tensor.clone() for name, tensor in state_by_name(model, optimizer).items()}
    assert len(stored) == 3 * 3 + 1
    twin, twins_optimizer = make_muon()
    twin.load_state_dict(model.state_dict())
    load_state_by_name(twin, twins_optimizer, stored)
    one_update(model, optimizer)
    one_update(twin, twins_optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name))
    with pytest.raises(
        ValueError, match=r"(?s)missing: w\.weight\.exp_avg\n.*not of this model: w\.weight\.momentum_buffer"
    ):
        load_state_by_name(*make(), stored)
    stored["w.weight.momentum_buffer"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"w\.weight\.momentum_buffer has shape \(2, 2\), not \(3, 3\)"):
        load_state_by_name(*make_muon(), stored)


def test_state_goes_out_and_in_by_name() -> None:
    model, optimizer = make()
    assert state_by_name(model, optimizer) == {}
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for _ in range(2):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    stored = {name: tensor.clone() for name, tensor in state_by_name(model, optimizer).items()}
    assert len(stored) == 4 * 3
    assert stored["w.weight.step"] == 2

    twin, twins_optimizer = make()
    twin.load_state_dict(model.state_dict())
    load_state_by_name(twin, twins_optimizer, stored)
    for m, o in ((model, optimizer), (twin, twins_optimizer)):
        for group in o.param_groups:
            group["lr"] = 0.1
        o.zero_grad()
        m.loss().backward()
        o.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name))


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    model, optimizer = make()
    model.loss().backward()
    optimizer.step()
    stored = state_by_name(model, optimizer)
    stored["other.weight.exp_avg"] = stored.pop("w.weight.exp_avg")
    with pytest.raises(ValueError, match=r"missing: w\.weight\.exp_avg\n.*not of this model: other\.weight\.exp_avg"):
        load_state_by_name(*make(), stored)
