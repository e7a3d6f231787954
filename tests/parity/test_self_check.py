"""A run compares the copies of a tensor that must be equal, and stops if one of them differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_tensor_account import config
from torch import Tensor
from training import CP, PP, REPLICATE, SHARD, TP

from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig, resolve_job
from titanlite.errors import TitanliteError
from titanlite.job import Job, build_job
from titanlite.modules.shards import local_part
from titanlite.observe.metrics import read_metrics
from titanlite.ranks.launch import spawn
from titanlite.ranks.world import World
from titanlite.run import train_on_rank
from titanlite.self_check import check_copies
from titanlite.tools.verify.verify import Verifier

AXES = {"tp": TP, "dp_replicate": REPLICATE, "dp_shard": SHARD, "cp": CP, "pp": PP}


def of_kind(job: Job, kind: str) -> tuple[str, Tensor]:
    """A tensor of a kind of which every rank has a copy, and its name in a message."""
    scale = job.parameters["logit_scale"]
    if kind == "buffer":
        return "offset", job.buffers["offset"]
    if kind == "parameter":
        return "logit_scale", scale
    name = "the optimizer state of logit_scale"
    return name, job.trainer.optimizer.state[scale][kind]


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit of the last element."""
    kind = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    with torch.no_grad():
        local_part(tensor).view(kind).reshape(-1)[-1:].bitwise_xor_(1 << bit)


@pytest.mark.parametrize("axis", AXES)
def test_one_flipped_bit_is_found_and_named(verifier: Verifier, axis: str) -> None:
    for lines in verifier.pool(2).call(lines_of_flips, config("scaled", AXES[axis])):
        for name, line in lines.items():
            assert line.startswith(f"{name}: its copies along {axis} differ after a flip: ")
            assert "ranks 0, 1 have 2 different values; " in line


def lines_of_flips(world: World, job_config: JobConfig) -> dict[str, str]:
    job = build_job(resolve_job(job_config, world.size), world)
    assert check_copies(job, "at the start") == ""
    job.step()
    assert check_copies(job, "after step 1") == ""
    lines = {}
    for kind in ("parameter", "exp_avg", "exp_avg_sq", "step", "buffer"):
        name, tensor = of_kind(job, kind)
        for bit in (0, 8 * tensor.element_size() - 2):
            if world.rank == 1:
                flip(tensor, bit)
            with pytest.raises(TitanliteError) as caught:
                check_copies(job, "after a flip")
            lines[name] = str(caught.value)
            if world.rank == 1:
                flip(tensor, bit)
    assert check_copies(job, "at the end") == ""
    return lines


def test_a_style_is_compared_too_and_the_odd_rank_named(verifier: Verifier) -> None:
    plan = {"tensor_parallel_degree": 4}
    for line in verifier.pool(4).call(line_of_norm, config("many_heads", plan)):
        assert line.startswith("layers.1.ffn_norm.weight (and 1 more tensor): its copies along tp ")
        assert ": rank 2 has another value than ranks 0, 1, 3; " in line


def line_of_norm(world: World, job_config: JobConfig) -> str:
    job = build_job(resolve_job(job_config, world.size), world)
    if world.rank == 2:
        flip(job.parameters["layers.1.ffn_norm.weight"], 3)
        flip(job.parameters["norm.weight"], 3)
    with pytest.raises(TitanliteError) as caught:
        check_copies(job, "at the start")
    return str(caught.value)


def test_within_rounding_it_is_a_warning_on_gpus(verifier: Verifier) -> None:
    for small, large in verifier.pool(2).call(warnings_of_rounding, config("scaled", TP)):
        assert small == ""
        assert large.startswith("offset: its copies, by more than rounding, along tp differ later")


def warnings_of_rounding(world: World, job_config: JobConfig) -> tuple[str, str]:
    import titanlite.self_check as module

    job = build_job(resolve_job(job_config, world.size), world)
    job.step()
    found = []
    for factor in (1 + 1e-12, 1.5):
        if world.rank == 1:
            job.buffers["offset"].mul_(factor)
        # As on a GPU: this machine has none.
        prints = module._fingerprints(job, is_exact=False)
        names = module._compare(job, "tp", prints, is_exact=False)
        differing = module._everyones(job, [("tp", names)] if names else [], prints)
        found.append(module._explain(job, differing, "later", False) if differing else "")
    return found[0], found[1]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("undeclared_sp", "shift (and 1 more tensor): its copies along tp differ after step 1: "),
        ("drifting", "mean: its copies along tp differ after step 1: "),
    ],
)
def test_a_run_stops_at_its_first_step(tmp_path: Path, model: str, said: str) -> None:
    with pytest.raises(TitanliteError) as caught:
        run(tmp_path, config(model, TP))
    assert said in str(caught.value)
    hint = "local_buffers" if model == "drifting" else "partial_gradients"
    assert hint in str(caught.value)


def test_a_run_whose_copies_differ_at_the_start_does_not_train(tmp_path: Path) -> None:
    with pytest.raises(TitanliteError) as caught:
        run(tmp_path, config("uneven", TP))
    first = "shift: its copies along tp differ before the first step: ranks 0, 1 have 2 different"
    assert str(caught.value).startswith(first)
    assert read_metrics(tmp_path) == []


def run(folder: Path, job_config: JobConfig, **changes: Any) -> Any:
    values = job_config.model_dump(exclude_unset=True)
    values["job"] = {"dump_folder": str(folder)}
    values["sampling"] = {"num_samples": 0}
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    changed = type(job_config).model_validate(values)
    resolved = resolve_job(changed)
    return spawn(train_on_rank, 2, resolved, "cpu", timeout_seconds=100)[0]


def test_the_key_turns_it_off(tmp_path: Path) -> None:
    done = run(tmp_path, config("undeclared_sp", TP), debug={"check_copies": False})
    assert len(done.losses) == 2


def test_statistics_of_the_batch_may_differ_and_the_first_ranks_are_saved(
    verifier: Verifier, tmp_path: Path
) -> None:
    checkpoints = {"checkpoint": {"enable": True}, "job": {"dump_folder": str(tmp_path)}}
    job_config = config("statistics", REPLICATE, **checkpoints)
    saved, own = zip(*verifier.pool(2).call(saved_statistics, job_config), strict=True)
    assert own[0] != own[1]
    assert set(saved) == {own[0]}


def saved_statistics(world: World, job_config: JobConfig) -> tuple[float, float]:
    job = build_job(resolve_job(job_config, world.size), world)
    job.step()
    own = float(job.buffers["seen.running_mean"].sum())
    with Checkpoints(job) as checkpoints:
        checkpoints.save(1)
    again = build_job(resolve_job(job_config, world.size), world)
    with Checkpoints(again):
        pass
    return float(again.buffers["seen.running_mean"].sum()), own


def test_copies_are_compared_before_a_checkpoint_is_saved(
    verifier: Verifier, tmp_path: Path
) -> None:
    more = {"checkpoint": {"enable": True}, "job": {"dump_folder": str(tmp_path)}}
    for line in verifier.pool(2).call(line_of_save, config("scaled", PP, **more)):
        assert line.startswith("shift: its copies along pp differ before step-1 is saved: ")
    assert not list(tmp_path.glob("checkpoint/step-*"))


def line_of_save(world: World, job_config: JobConfig) -> str:
    job = build_job(resolve_job(job_config, world.size), world)
    job.step()
    if world.rank == 1:
        flip(job.parameters["shift"], 1)
    with Checkpoints(job) as checkpoints, pytest.raises(TitanliteError) as caught:
        checkpoints.save(1)
    return str(caught.value)
