"""What a sharded model does otherwise than a whole one, on real ranks over gloo: Muon, compiled blocks, the noise scale of the gradient."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import kills
import pytest
import several
import torch
import torch.distributed as dist
from kills import History
from safetensors.torch import load_file
from several import ACCUMULATION, assert_same_checkpoints, assert_same_rows, killed_at, trained
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from tracing import traced_only

from pico_train.checkpoint.format import step_folders
from pico_train.config import ModelConfig, OptimizationConfig, load_config
from pico_train.metrics_log import read_rows
from pico_train.model.decoder import PicoDecoder
from pico_train.model.huggingface import load_llama_state_dict
from pico_train.muon import Muon
from pico_train.optim import n_moments, optimizer_of, state_by_name
from pico_train.sharding import own_part, shard

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="ranks are forked from a process that has imported torch"
)

FSDP = "training.fabric.strategy=fsdp"
MUON = ("training.optimization.optimizer=muon", "training.optimization.max_grad_norm=null")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this module are, each in a folder of its own."""
    kills.preload()
    return tmp_path_factory.mktemp("sharded")


def on_ranks(n: int, folder: Path, work: Callable[[DeviceMesh], None]) -> None:
    """Let ``n`` processes do ``work`` together over gloo; what one of them raises fails here."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_member, args=(rank, n, folder, work)) for rank in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(kills.TIMEOUT_S)
        process.kill()
    failed = sorted(folder.glob("rank_*.txt"))
    assert not failed, failed[0].read_text()
    assert [process.exitcode for process in processes] == [0] * n


def _member(rank: int, n: int, folder: Path, work: Callable[[DeviceMesh], None]) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=n)
        work(init_device_mesh("cpu", (n,), mesh_dim_names=("data_parallel",)))
    except BaseException:
        (folder / f"rank_{rank}.txt").write_text(traceback.format_exc())
        raise


def _updates_of_muon(mesh: DeviceMesh) -> None:
    """Three updates of sharded matrices, and of whole ones by torch's own."""
    for shape in ((32, 16), (16, 32), (5, 7), (2, 8)):  # five rows and two are not a multiple of three ranks
        for adjust_lr in ("original", "match_rms_adamw"):
            torch.manual_seed(0)
            start, *gradients = torch.randn(4, *shape)
            whole = torch.nn.Parameter(start.clone())
            part = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
            options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": adjust_lr}
            theirs, ours = torch.optim.Muon([whole], **options), Muon([part], **options)
            for gradient in gradients:
                whole.grad, part.grad = gradient.clone(), distribute_tensor(gradient, mesh, [Shard(0)])
                theirs.step()
                with CommDebugMode() as sent:
                    ours.step()
                assert sent.get_total_counts() == 1
            momentum = ours.state[part]["momentum_buffer"]
            assert isinstance(momentum, DTensor)
            assert momentum.to_local().shape == part.to_local().shape
            assert torch.equal(part.full_tensor(), whole)
            assert torch.equal(momentum.full_tensor(), theirs.state[whole]["momentum_buffer"])


def _moments_of_muon(mesh: DeviceMesh) -> None:
    """Each rank keeps its part of the moments: a third, where all rows divide by three."""
    config = ModelConfig(
        d_model=12, n_layers=2, vocab_size=30, attention_n_heads=2, attention_n_kv_heads=1, activation_hidden_dim=24
    )
    with torch.device("meta"):
        model = PicoDecoder(config)
    shard(model, mesh)
    model.initialize(0)
    optimizer = optimizer_of(model, OptimizationConfig(optimizer="muon"), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(own_part(t).numel() for key, t in state_by_name(model, optimizer).items() if not key.endswith(".step"))
    assert 3 * kept == n_moments(config, "muon")


def _muon(mesh: DeviceMesh) -> None:
    _updates_of_muon(mesh)
    _moments_of_muon(mesh)


def test_muon_moves_sharded_matrices_as_torch_moves_whole_ones(folder: Path) -> None:
    (folder / "muon").mkdir()
    on_ranks(3, folder / "muon", _muon)


@pytest.fixture(scope="module")
def one(folder: Path) -> History:
    """A run under Muon as one process, its gradients the sum of two parts: what two ranks sum is then the same bit for bit."""
    return trained(folder, "one", 1, *MUON, parts=2)


def test_two_ranks_under_muon_are_one_bit_for_bit(one: History, folder: Path) -> None:
    two = trained(folder, "two", 2, *MUON, FSDP, parts=2)
    assert_same_checkpoints(one, two, tolerance=0.0)
    assert_same_rows(one, two)
    stored = load_file(two.run / "checkpoints" / "step_14" / "training_state" / "optimizer.safetensors")
    assert {key.rpartition(".")[2] for key in stored} == {"exp_avg", "exp_avg_sq", "step", "momentum_buffer"}


def test_a_run_under_muon_goes_on_with_another_number_of_ranks(one: History, folder: Path) -> None:
    """One rank, two that share the model, two that each hold it, one: the first three are ended by the loss of a rank."""
    for number, (n, strategy) in enumerate([(1, "auto"), (2, "fsdp"), (2, "ddp"), (1, "auto")]):
        overrides = (*MUON, f"training.fabric.strategy={strategy}", f"{ACCUMULATION}={2 // n}")
        history = History(folder / "ways", (*overrides, "checkpointing.restart.every_n_steps=2"))
        prepare = killed_at(4, rank=n - 1) if number < 3 else None
        ranks = several.run(history.words(), history.folder, n, prepare)
        assert ranks.codes[n - 1] == (-signal.SIGKILL if number < 3 else 0), ranks.printed(0)
    assert ranks.printed(0).count("; 2 ranks by fsdp") == ranks.printed(0).count("; 2 ranks by ddp") == 1
    assert_same_checkpoints(one, history, tolerance=0.0)
    assert_same_rows(one, history)


def test_a_rank_may_hold_no_row_of_a_norm(folder: Path) -> None:
    """Three ranks, norms of two numbers, and matrices whose rows do not divide by three."""
    small = ("model.d_model=2", "model.attention_n_heads=1", "model.attention_n_kv_heads=1", "model.dropout=0.0")
    size = ("data.dataloader.batch_size=6", "model.activation_hidden_dim=5", "training.optimization.optimizer=muon")
    whole, three = (trained(folder, f"small-{n}", n, *small, *size, FSDP, parts=3) for n in (1, 3))
    # 1e-6 as a rule; thirds are summed in another order, and one number that bf16 rounds the other way is 2^-8 of it
    assert_same_checkpoints(whole, three, tolerance=1e-2)
    assert_same_rows(whole, three, tolerance=1e-3)


def test_the_noise_scale_is_that_of_the_micro_batches_that_go_together(folder: Path) -> None:
    """Of two ranks with two micro-batches of two sequences each: the gradients of four sequences, 0, 1, 4, 5 and 2, 3, 6, 7."""
    run = trained(folder, "noise", 2, FSDP, "monitoring.gradient_noise_scale=true", "model.dropout=0.0").run
    rows, seen = read_rows(run / "metrics.jsonl"), 0
    model = PicoDecoder(load_config(run / "config.yaml").model)
    for step, checkpoint in step_folders(run / "checkpoints").items():
        load_llama_state_dict(model, load_file(checkpoint / "model.safetensors"))
        batch = load_file(checkpoint / "learning_dynamics" / "train_batch.safetensors")["input_ids"].long()
        squares = [squared_gradient(model, batch[ids]) for ids in ([0, 1, 4, 5], [2, 3, 6, 7], range(8))]
        small, big = sum(squares[:2]) / 2, squares[2]
        strength, noise = 2 * big - small, 8 * (small - big)  # E small = |G|^2 + tr / 4, E big = |G|^2 + tr / 8
        expected = noise / strength if strength > 0 else None
        assert rows[step]["noise_scale"] == (None if expected is None else pytest.approx(expected, rel=1e-3))
        seen += expected is not None
    assert seen > 3


def _traced(rank: int) -> None:
    torch._dynamo.config.recompile_limit = 2  # fewer than blocks: they share what is compiled
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.compile = traced_only(torch.compile)


def test_a_compiled_sharded_model_trains_as_a_plain_whole_one(folder: Path) -> None:
    """With dropout, capture of a part that is in no block, several micro-batches, and a probe or activation checkpointing."""
    looks = "checkpointing.learning_dynamics"
    for recomputed, probe in (("false", "held_out"), ("true", "null")):
        look = (f"{looks}.layer_suffixes=[embedding_proj,attention.v_proj]", f"{looks}.eval_data={probe}")
        plain = trained(folder, f"plain-{recomputed}", 1, "model.n_layers=3", *look)
        more = (FSDP, "training.compile=true", f"training.activation_checkpointing={recomputed}")
        fast = trained(folder, f"compiled-{recomputed}", 2, "model.n_layers=3", *look, *more, prepare=_traced)
        assert_same_checkpoints(plain, fast, tolerance=1e-4)  # norms and rotations are computed by other formulas
        assert_same_rows(plain, fast, tolerance=1e-4)
        [said] = [line for line in (fast.run / "train.log").read_text().splitlines() if "compiled the pass in" in line]
        assert float(said.split(" differs by ")[1].split()[0]) < 1e-5


def squared_gradient(model: PicoDecoder, ids: torch.Tensor) -> float:
    """The squared norm of the gradient of the mean loss over the sequences ``ids`` (B, T + 1)."""
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    return sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
