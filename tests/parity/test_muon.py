"""Muon trains the same under every plan, and as torch's own; optimizers and schedules of a user."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import PP, SHARD, TP, Sections, debug_config, differences, train

import titanlite
from titanlite.errors import ConfigError, RankError
from titanlite.registry import OPTIMIZERS, SCHEDULERS
from titanlite.tools.verify.jobs import scheduled_lr
from titanlite.tools.verify.verify import Verifier
from titanlite.training.muon import find_matrices
from titanlite.training.optimizer import Rule, build_optimizer

MUON: Sections = {
    "optimizer": {"name": "Muon", "ns_dtype": "float64", "lr": 3e-3},
    "training": {"steps": 2},
}
EP = {**SHARD, "expert_parallel_degree": 2}


def check(*plans: dict[str, Any], job: Sections = MUON) -> None:
    (reference,) = train([debug_config(job)])
    for plan, training in zip(
        plans, train([debug_config(job, {"parallelism": p}) for p in plans]), strict=True
    ):
        for what, difference in differences(training, reference).items():
            assert difference < 1e-9, f"{plan}: {what}: {difference:.1e}"


def test_plans_of_two_ranks() -> None:
    check(TP, PP)


@pytest.mark.slow
def test_more_plans_of_two_ranks() -> None:
    check(SHARD, {"context_parallel_degree": 2})


@pytest.mark.slow
def test_plans_of_four_ranks() -> None:
    check({**TP, **SHARD}, {**SHARD, "data_parallel_replicate_degree": 2})


def test_verify_knows_muon_and_its_experts(verifier: Verifier) -> None:
    config = titanlite.JobConfig.from_dict(
        {
            "model": {"name": "llama3", "flavor": "moe_debug", "n_layers": 2},
            "training": {"dataset": "synthetic", "seq_len": 32, "global_batch_size": 16},
            "optimizer": {
                "name": "Muon",
                "adjust_lr_fn": "original",
                "no_weight_decay": ["*norm*"],
            },
            "parallelism": {**TP, **EP},
        }
    )
    found = verifier.verify(config, steps=2, reloads=True)
    assert found.agrees, found.findings


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    def run(folder: str, plan: dict[str, Any], steps: int) -> list[float]:
        job = debug_config(
            MUON,
            {
                "job": {"dump_folder": str(tmp_path / folder)},
                "lr_scheduler": {"total_steps": 4},
                "training": {"steps": steps},
                "parallelism": plan,
                "sampling": {"num_samples": 0},
                "checkpoint": {"enable": True, "last_save_model_only": False},
            },
        )
        return titanlite.train(job, threads=True).losses

    alone = run("alone", {}, 4)
    moved = run("moved", {**TP, **SHARD}, 2) + run("moved", {**PP, **SHARD}, 4)
    assert moved == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_a_step_is_that_of_torch(shape: tuple[int, int], adjust_lr_fn: str) -> None:
    torch.manual_seed(0)
    own, theirs = (nn.Parameter(x.clone()) for x in [torch.randn(shape)] * 2)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "nesterov": True}
    options |= {"ns_steps": 5, "adjust_lr_fn": adjust_lr_fn}
    optimizers = (
        build_optimizer(
            [own], name="Muon", rules={own: Rule(matrices="matrix")}, ns_dtype="bfloat16", **options
        ),
        torch.optim.Muon([theirs], **options),
    )
    for _ in range(3):
        own.grad = torch.randn(shape)
        theirs.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    # In bfloat16 the order of the sums counts.
    torch.testing.assert_close(own, theirs, rtol=0, atol=0.02 * 0.1 * max(shape) ** 0.5)


def test_what_is_a_matrix() -> None:
    class Joined(nn.Module):
        is_one_matrix = True

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.stack = (nn.Parameter(torch.empty(2, 3, 4)) for _ in range(2))
            self.bias = nn.Parameter(torch.empty(3, 4))

    block = nn.ModuleDict({"a": nn.Linear(2, 3), "b": Joined(), "c": nn.Conv1d(2, 2, 1)})
    block["b"].register_parameter("frozen", nn.Parameter(torch.empty(2, 2), requires_grad=False))
    model = nn.ModuleDict({"emb": nn.Embedding(3, 2), "blocks": nn.ModuleList([block])})
    model["stack"] = nn.Module()
    model["stack"].w = nn.Parameter(torch.empty(2, 2, 2))
    found = find_matrices(model, lambda name: name.startswith("blocks."), ())
    assert found == {
        "blocks.0.a.weight": "matrix",
        "blocks.0.b.weight": "matrix",
        "blocks.0.b.stack": "matrix",
    }
    found = find_matrices(model, lambda name: False, ("blocks.*",))
    assert found == {"emb.weight": "matrix", "stack.w": "stack"}


def test_nothing_left_to_muon_ends_the_run() -> None:
    with pytest.raises((ConfigError, RankError), match=r"optimizer.adamw: no weight is left"):
        train([debug_config(MUON, {"optimizer": {"adamw": ["*"]}})])


class Signs(torch.optim.Optimizer):
    """A step along the sign of the mean gradient of all steps."""

    def __init__(self, groups: list[dict[str, Any]], settings: Any) -> None:
        super().__init__(groups, {"lr": settings.lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"], state["count"] = torch.zeros_like(parameter), torch.tensor(0.0)
                state["sum"] += parameter.grad
                state["count"] += 1
                parameter -= group["lr"] * (1e4 * state["sum"] / state["count"]).tanh()


def stairs(step: int, *, warmup_steps: int, **_: Any) -> float:
    return 0.5 ** (step // warmup_steps)


def test_an_optimizer_and_a_schedule_of_a_user(verifier: Verifier) -> None:
    titanlite.register_optimizer("signs", Signs)
    titanlite.register_scheduler("stairs", stairs)
    own = {"optimizer": {"name": "signs"}, "lr_scheduler": {"decay_type": "stairs"}}
    try:
        config = debug_config(own, {"parallelism": {**TP, **SHARD}})
        assert scheduled_lr(config, 3) == config.optimizer.lr / 2
        found = verifier.verify(config, steps=2, reloads=True)
    finally:
        del OPTIMIZERS["signs"], SCHEDULERS["stairs"]
    assert found.agrees, found.findings
