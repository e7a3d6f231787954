"""Train jobs on local ranks and keep what plan invariance is about; used by the parity tests."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titanlite.config import JobConfig, make_parallel_dims, resolve_job
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import World, open_world
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.pool import ThreadPool

Sections = Mapping[str, Mapping[str, Any]]

# What plan invariance is stated for, and how far `make test` goes: what is wrong in a plan shows at
# once, since the output layer is not zero; the longer run shows that rounding does not grow.
STEPS, FEW_STEPS = 20, 2
# Of ranks on a machine that is busy with other things too.
TIMEOUT_SECONDS = 200

# A drawn output layer: with a zero one every gradient below it is zero at the first step, and an
# odd vocabulary and a table of one row make uneven and missing shards.
DEBUG_JOB: Sections = {
    "model": {"flavor": "debug", "zero_init_output": False},
    "training": {
        "dataset": "digits",
        "dtype": "float64",
        "local_batch_size": 2,
        "global_batch_size": 8,
        "steps": STEPS,
    },
    "lr_scheduler": {"warmup_steps": 2},
    "activation_checkpoint": {"mode": "none"},
    "parallelism": {"data_parallel_shard_degree": 1},
}

# Keys of [parallelism], each on two ranks.
PP, CP, TP, SHARD, REPLICATE = (
    {"pipeline_parallel_degree": 2},
    {"context_parallel_degree": 2},
    {"tensor_parallel_degree": 2},
    {"data_parallel_shard_degree": 2},
    {"data_parallel_replicate_degree": 2},
)


@dataclass
class Training:
    """What a job did: per step loss and norm, some steps' gradients, the weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    """One a rank, of the whole weights as that rank sees them."""


def debug_config(*changes: Sections) -> JobConfig:
    """DEBUG_JOB with changes, key by key."""
    return JobConfig.from_dict(merged(DEBUG_JOB, *changes))


def merged(*changes: Sections) -> dict[str, dict[str, Any]]:
    """Sections key by key, later ones over earlier."""
    sections: dict[str, dict[str, Any]] = {}
    for change in changes:
        for name, keys in change.items():
            sections.setdefault(name, {}).update(keys)
    return sections


def on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
    threads: bool = False,
) -> list[Any]:
    """The results of `function(world, *arguments)` on new ranks, in rank order."""
    timeout = None if threads else timeout_seconds
    call = (_in_world, num_ranks, function, *arguments)
    return spawn(*call, timeout_seconds=timeout, threads=threads)


def _in_world(place: Place, function: Callable[..., Any], *arguments: Any) -> Any:
    with open_world(place) as world:
        return function(world, *arguments)


def train(configs: Sequence[JobConfig]) -> list[Training]:
    """Train each job on the same ranks, as many as they need; they need equally many."""
    (num_ranks,) = {make_parallel_dims(config, None).world_size for config in configs}
    trainings = []
    with ThreadPool(num_ranks) as pool:
        for config in configs:
            of_ranks = pool.call(train_on_rank, config)
            of_ranks[0].digests = [of_rank.digests[0] for of_rank in of_ranks]
            trainings.append(of_ranks[0])
    return trainings


def train_on_rank(world: World, config: JobConfig) -> Training:
    from titanlite.job import build_job

    # Compiled code of the job before must not be found by this one's shapes.
    torch._dynamo.reset()
    job = build_job(resolve_job(config, world.size), world)
    training = Training()
    for step in range(1, config.training.steps + 1):

        def keep_gradients(step: int = step) -> None:
            gradients = {name: whole.clone() for name, whole in job.whole_gradients()}
            training.gradients[step] = gradients if world.is_first else {}

        is_kept = step in (1, 2, config.training.steps)
        done = job.trainer.step(job.draw(), on_gradients=keep_gradients if is_kept else None)
        training.losses.append(done.loss)
        training.norms.append(done.grad_norm)
    weights = {name: whole.clone() for name, whole in job.whole_parameters()}
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].view(torch.uint8).numpy().tobytes())
    training.digests = [digest.hexdigest()]
    training.weights = weights if world.is_first else {}
    return training


def difference(tensor: Tensor, reference: Tensor) -> float:
    """max|a - b| / max|b|; where b is all zero, 0 if a is too, else infinity."""
    return agreement(tensor, reference, reference).difference


def differences(training: Training, reference: Training) -> dict[str, float]:
    """The largest difference of each kind; names of tensors have to be the same."""
    assert training.weights.keys() == reference.weights.keys()
    found = {
        "loss": max(map(_relative, training.losses, reference.losses)),
        "norm": max(map(_relative, training.norms, reference.norms)),
        "weights": max(
            difference(training.weights[name], whole) for name, whole in reference.weights.items()
        ),
    }
    for step, of_step in reference.gradients.items():
        assert training.gradients[step].keys() == of_step.keys()
        for name, whole in of_step.items():
            found[f"gradient of {name} at step {step}"] = difference(
                training.gradients[step][name], whole
            )
    return found


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)
