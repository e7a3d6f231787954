"""A step that is not finite changes no weight, and the rank and module it began on are named."""

import math
from typing import Any

import pytest
import torch
from test_train_script import command, metrics, run
from training import debug_config

from titanlite.config import JobConfig, resolve_job
from titanlite.errors import NonFiniteError
from titanlite.job import build_job
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import open_world
from titanlite.training.non_finite import Findings, Sighting, describe

BAD_RANK = 2
MODULE = "layers.1.feed_forward"
PARAMETER = "layers.1.feed_forward.w2.weight"

SHARDED = {"data_parallel_shard_degree": 4}
TP = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}
CP = {"context_parallel_degree": 2, "data_parallel_replicate_degree": 2}
PP = {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}
ZERO_BUBBLE = {**PP, "pipeline_parallel_schedule": "ZBVZeroBubble"}
COMPILED = {"compile": {"enable": True, "backend": "aot_eager"}}
FULL = {"activation_checkpoint": {"mode": "full"}}

Case = tuple[str, dict[str, Any], str]
QUICK: dict[str, Case] = {
    "tp2_fsdp2": ("output", {"parallelism": TP, **FULL}, "rank 2 (dp_shard 1, tp 0)"),
    "zbv": ("output", {"parallelism": ZERO_BUBBLE}, "rank 2 (pp 1, dp_shard 0), microbatch 1 of 4"),
    "backward_fsdp4": ("gradient", {"parallelism": SHARDED}, "rank 2 (dp_shard 2)"),
}
SLOW: dict[str, Case] = {
    "fsdp4": ("output", {"parallelism": SHARDED}, "rank 2 (dp_shard 2)"),
    "parameter_tp2": ("parameter", {"parallelism": TP}, "rank 2 (dp_shard 1, tp 0)"),
    "ddp4": ("output", {"parallelism": {"data_parallel_replicate_degree": 4}}, "(dp_replicate 2)"),
    "tp2_fsdp2_ac_compile": ("weight", {"parallelism": TP, **FULL, **COMPILED}, "ranks 0, 1, 2, 3"),
    "cp2_hsdp": ("output", {"parallelism": CP}, "rank 2 (dp_replicate 1, cp 0)"),
    "pp2_fsdp2": ("output", {"parallelism": PP}, "rank 2 (pp 1, dp_shard 0), microbatch 1 of 4"),
    "backward_pp2": ("gradient", {"parallelism": PP, **FULL}, "rank 2 (pp 1, dp_shard 0)"),
}
WORDS = {
    "output": f"first non-finite tensor: the output of {MODULE} on ",
    "gradient": "first non-finite tensor: in the backward pass, the gradient of the output of "
    f"{MODULE}",
    "weight": f"first non-finite tensor: the output of {MODULE}.w2 on ",
    "parameter": f"first non-finite tensor: parameter {PARAMETER} itself on ",
}


def spoil(job: Any, kind: str) -> None:
    """Have one module, on this rank alone, put out or pass back what is not a number."""
    modules = {canonical_name(n): m for part in job.parts for n, m in part.named_modules()}
    if kind == "parameter":
        weights = {canonical_name(n): p for part in job.parts for n, p in part.named_parameters()}
        local_part(weights[PARAMETER]).data.view(-1)[0] = torch.nan
    elif kind == "weight":
        # Finite, but no longer once the two are multiplied.
        weights = {canonical_name(n): p for part in job.parts for n, p in part.named_parameters()}
        for name in ("w1", "w3"):
            local_part(weights[f"{MODULE}.{name}.weight"]).data.fill_(1e200)
    elif kind == "output":
        modules[MODULE].register_forward_hook(lambda module, inputs, output: output * torch.inf)
    else:

        def spoil_gradient(module: Any, inputs: Any, output: Any) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * torch.nan)

        modules[MODULE].register_forward_hook(spoil_gradient)


def take_bad_steps(place: Place, cases: list[tuple[str, JobConfig]]) -> list[tuple[str, bool]]:
    """A good step of each job and a bad one: what was said, and whether the weights are as before.

    The bad one is taken twice, stopped at and skipped.
    """
    said = []
    with open_world(place) as world:
        for kind, config in cases:
            torch._dynamo.reset()
            job = build_job(resolve_job(config, world.size), world)
            assert math.isfinite(job.step().grad_norm)
            if world.rank == BAD_RANK:
                spoil(job, kind)
            before = [local_part(p).clone() for p in job.trainer.parameters]
            text = ""
            try:
                # A run that went on without its schedule is further than that is.
                job.step(7)
            except NonFiniteError as error:
                text = str(error)
            job.trainer.non_finite = "skip"
            assert job.step().note.endswith("the step is skipped")
            after = [local_part(p) for p in job.trainer.parameters]
            same = all(
                torch.equal(a.nan_to_num(), b.nan_to_num())
                for a, b in zip(before, after, strict=True)
            )
            said.append((text, same))
    return said


def check(cases: dict[str, Case]) -> None:
    jobs = [(kind, debug_config(sections)) for kind, sections, _ in cases.values()]
    by_rank = spawn(take_bad_steps, 4, jobs, timeout_seconds=240)
    for index, (name, (kind, _, place)) in enumerate(cases.items()):
        texts = {rank[index][0] for rank in by_rank}
        assert len(texts) == 1, f"{name}: every rank says the same"
        (text,) = texts
        assert text.startswith("step 7: loss "), name
        assert "stopped with the weights of step 6" in text, name
        assert WORDS[kind] in text, name
        assert place in text, name
        assert "\n" not in text, name
        assert all(rank[index][1] for rank in by_rank), f"{name}: weights have changed"


def test_the_first_module_and_its_rank_are_named_and_no_weight_changes():
    check(QUICK)


@pytest.mark.slow
def test_the_same_under_more_plans():
    check(SLOW)


def test_a_run_that_blows_up_ends_with_one_line(tmp_path):
    wild = {"optimizer__lr": 1e20, "parallelism__data_parallel_shard_degree": 2}
    done = run(command(tmp_path / "stop", training__steps=6, **wild))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "step 2: loss nan, gradient norm nan; first non-finite tensor: the output of "
    )
    assert "stopped with the weights of step 1" in line
    assert [row["step"] for row in metrics(tmp_path / "stop")] == [1]


def test_what_is_said_where_no_value_is_found():
    clean = [Findings(), Findings()]
    assert describe(clean, math.nan) == "every module output is finite, but the loss is not"
    assert describe(clean, 2.0).startswith(
        "a second run of the step is finite, and so are all gradients of the first"
    )


def test_the_earliest_of_all_ranks_is_named():
    late = Findings(output=Sighting("layers.3", 2, 8, (1, 0, 9), 1), num_microbatches=2)
    early = Findings(output=Sighting("layers.1", 1, 8, (1, 0, 4), 1), num_microbatches=2)
    assert describe([late, Findings(), early], math.nan, ["tp 0", "tp 1", "tp 2"]) == (
        "first non-finite tensor: the output of layers.1 on rank 2 (tp 2), microbatch 1 of 2, "
        "1 of 8 values"
    )
