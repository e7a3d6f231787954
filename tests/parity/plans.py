"""Plans between which checkpoints move, and a job's whole state as checksums; for the tests."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from training import DEBUG_JOB, merged

from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig, make_parallel_dims, resolve_job
from titanlite.config.degrees import DEGREES
from titanlite.job import Job, build_job
from titanlite.ranks.launch import Place
from titanlite.ranks.world import World, open_world

STEPS = 2
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "single": {},
    "tp2": {"parallelism": {"tensor_parallel_degree": 2}},
    "pp2": {"parallelism": {"pipeline_parallel_degree": 2}},
    "cp2": {"parallelism": {"context_parallel_degree": 2}},
    "ddp4": {"parallelism": {"data_parallel_replicate_degree": 4}},
    "fsdp4": {"parallelism": {"data_parallel_shard_degree": 4}},
    "hsdp2x2": {
        "parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    },
    "tp2_fsdp2": {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}},
    "pp2_fsdp2": {"parallelism": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}},
    "offload": {
        "parallelism": {"data_parallel_shard_degree": 4},
        "training": {"enable_cpu_offload": True},
    },
}
LARGE_PLANS: dict[str, dict[str, dict[str, Any]]] = {
    # Rows of the output layer: 17, by TP 9 and 8, by FSDP 3, 3, 3, 0 and 2, 2, 2, 2.
    "tp2_fsdp4": {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 4}},
    "pp2_tp2_fsdp2": {
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "data_parallel_shard_degree": 2,
        }
    },
}
EXPERT_PLANS: dict[str, dict[str, dict[str, Any]]] = {
    f"ep{ep}_{'_'.join(f'{axis}{n}' for axis, n in degrees.items())}": {
        "parallelism": {"expert_parallel_degree": ep}
        | {DEGREES[axis]: degree for axis, degree in degrees.items()}
    }
    for ep, degrees in (
        (1, {"dp_shard": 1}),
        (1, {"tp": 2}),
        (2, {"dp_shard": 2}),
        (2, {"dp_shard": 4}),
        (2, {"tp": 2, "dp_shard": 2}),
        (4, {"tp": 2, "cp": 2}),
        (4, {"dp_shard": 4}),
    )
}
"""Experts under plans "ep2_dp_shard4": EP 2 in FSDP 4, for example."""


def config_of(plan: str, folder: Path, **checkpoint: object) -> JobConfig:
    """The debug job under a plan, or one with experts, with checkpoints in `folder`."""
    job = dict(DEBUG_JOB)
    if plan in EXPERT_PLANS:
        job["model"] = {"name": "llama3", "flavor": "moe_debug"}
        job["training"] = {**job["training"], "dataset": "synthetic", "seq_len": 32}
    changes = merged(
        (PLANS | LARGE_PLANS | EXPERT_PLANS)[plan],
        {
            "training": {"local_batch_size": 2 if plan.startswith("pp2") else 1},
            "job": {"dump_folder": str(folder)},
            "checkpoint": {"enable": True, **checkpoint},
        },
    )
    return JobConfig.from_dict(merged(job, changes))


def by_num_ranks(plans: Mapping[str, object]) -> dict[int, list[str]]:
    """The plans that run in one world, by its size."""
    worlds: dict[int, list[str]] = {}
    for plan in plans:
        dims = make_parallel_dims(config_of(plan, Path()), None)
        worlds.setdefault(dims.world_size, []).append(plan)
    return worlds


def make_job(config: JobConfig, world: World) -> Job:
    return build_job(resolve_job(config, world.size), world)


def in_world(place: Place, *calls: tuple[Any, ...]) -> list[Any]:
    """Call functions of a world, one after the other: (function, argument, ...) each."""
    with open_world(place) as world:
        return [function(world, *arguments) for function, *arguments in calls]


def save_each(world: World, plans: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Train each plan for some steps and save; its state by checksums."""
    states = {}
    for plan in plans:
        job = make_job(config_of(plan, folder / plan), world)
        with Checkpoints(job) as checkpoints:
            for _ in range(STEPS):
                job.step()
            checkpoints.save(STEPS)
        states[plan] = checksums(job)
    return states


def load_each(
    world: World, plans: list[str], sources: Mapping[str, Mapping[str, Path]], folder: Path | None
) -> dict[str, dict[str, dict[str, str]]]:
    """Under each plan load each of its sources, and save again; the state by plan and source."""
    states: dict[str, dict[str, dict[str, str]]] = {}
    for plan in plans:
        states[plan] = {}
        for name, source in sources[plan].items():
            config = config_of(
                plan,
                (folder or Path("nowhere")) / f"{plan}-{name}",
                initial_load_path=str(source),
                initial_load_model_only=False,
                load_only=folder is None,
            )
            job = make_job(config, world)
            with Checkpoints(job) as checkpoints:
                assert checkpoints.first_step == STEPS + 1
                if folder is not None:
                    checkpoints.save(STEPS)
            states[plan][name] = checksums(job)
    return states


def checksums(job: Job) -> dict[str, str]:
    """Of each weight, of all that the optimizer keeps of it, and the numbers beside them."""
    kept = job.trainer.optimizer.state
    found = {name: checksum(whole) for name, whole in job.whole_parameters()}
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        of_key = job.whole(lambda parameter, key=key: kept[parameter].get(key))  # type: ignore[misc]
        found |= {f"{key} of {name}": checksum(whole) for name, whole in of_key}
    steps = {float(state["step"]) for state in kept.values() if "step" in state}
    found |= {name: checksum(buffer) for name, buffer in job.buffers.items()}
    found["steps"] = str(sorted(steps))
    found["lr"] = repr(next(group["lr"] for group in job.trainer.optimizer.param_groups))
    found["numbers"] = f"{job.trainer.scheduler.last_epoch} {job.sampler.state}"
    return found


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
