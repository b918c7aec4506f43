import math

import pytest
import torch
from torch import nn

from pico_train.optim import adamw, load_state_by_name, state_by_name
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
