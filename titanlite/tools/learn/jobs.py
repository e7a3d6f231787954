"""The small jobs that the topics plan and run: what a step sends, holds and computes.

`planned` traces a step of a job in a fake world, as `titanlite plan` does; `measured` records the
same step on real ranks. Both count with the same recorder, so their figures can be compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config import JobConfig, resolve_job
from titanlite.config.model import load_model_spec
from titanlite.ranks.launch import Place, spawn
from titanlite.tools.planner.events import Allocation, Communication, Event, Operator, Trace
from titanlite.tools.simulate.network import bytes_sent

NUM_RANKS = 4
GLOBAL_BATCH_SIZE = 8
EXPERT_TOKENS = 32  # of a sequence of the model with experts

_ONE_SHARD = {"data_parallel_shard_degree": 1}
_DDP = {"data_parallel_replicate_degree": NUM_RANKS, **_ONE_SHARD}
JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"parallelism": _DDP},
    "recompute": {"parallelism": _DDP, "activation_checkpoint": {"mode": "full"}},
    "fsdp": {
        "parallelism": {
            "data_parallel_shard_degree": NUM_RANKS,
            "fsdp_reshard_after_forward": "always",
        }
    },
    "tp": {"parallelism": {"tensor_parallel_degree": NUM_RANKS, **_ONE_SHARD}},
    "cp": {"parallelism": {"context_parallel_degree": NUM_RANKS, **_ONE_SHARD}},
    "ep": {
        "model": {"name": "llama3", "flavor": "moe_debug"},
        "training": {"seq_len": EXPERT_TOKENS},
        "parallelism": {
            "data_parallel_shard_degree": NUM_RANKS,
            "expert_parallel_degree": NUM_RANKS,
        },
    },
}
"""Each job on four ranks, as sections of its TOML."""


@dataclass(frozen=True)
class Figures:
    """One step of one rank: bytes sent by (kind, axis), bytes held by category, operations."""

    sent: Mapping[tuple[str, str], float]
    held: Mapping[str, int]
    flops: int

    def sent_by(self, *kinds: str, axis: str | None = None) -> float:
        """The bytes that the rank sends in collectives and messages of these kinds."""
        return sum(
            num_bytes
            for (kind, of), num_bytes in self.sent.items()
            if kind in kinds and axis in (None, of)
        )


def make_job(name: str) -> JobConfig:
    sections = JOBS[name]
    degrees = sections["parallelism"]
    dp = degrees.get("data_parallel_replicate_degree", 1) * degrees["data_parallel_shard_degree"]
    training = {
        "dataset": "synthetic",
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "local_batch_size": GLOBAL_BATCH_SIZE // dp,
    }
    return JobConfig.from_dict(
        {
            "model": {"flavor": "debug"},
            "activation_checkpoint": {"mode": "none"},
            **sections,
            "training": {**training, **sections.get("training", {})},
        }
    )


def parameter_shapes(name: str) -> list[tuple[int, ...]]:
    """The shapes of the whole parameters of the job's model."""
    import torch

    from titanlite.models.build import build_model

    resolved = resolve_job(make_job(name), NUM_RANKS)
    with torch.device("meta"):
        model = build_model(load_model_spec(resolved.config), resolved.model, torch.float32)
    return [tuple(parameter.shape) for parameter in model.parameters()]


def planned(name: str, rank: int = 0) -> Figures:
    """The figures of a rank, without running the job."""
    from titanlite.tools.planner.trace import trace_rank

    trace = trace_rank(resolve_job(make_job(name), NUM_RANKS), rank)
    held = {what: trace.held[what] for what in ("parameters", "optimizer state")}
    held["gradients"] = most_bytes(trace, "gradients")
    return Figures(_sent(trace.events), held, _flops(trace.events))


def most_bytes(trace: Trace, category: str) -> int:
    """The most bytes of a category of memory that a step holds at the same time."""
    sizes: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if isinstance(event, Allocation) and trace.category_of[event.block] == category:
            sizes[event.block] = event.num_bytes
            most = max(most, sum(sizes.values()))
    return most


def measured(names: Sequence[str]) -> dict[str, list[Figures]]:
    """The figures of each rank, of real runs of these jobs on four gloo ranks."""
    by_rank = spawn(_run_jobs, NUM_RANKS, list(names), timeout_seconds=240)
    return {name: [rank[index] for rank in by_rank] for index, name in enumerate(names)}


def _run_jobs(place: Place, names: list[str]) -> list[Figures]:
    from titanlite.job import build_job
    from titanlite.modules.shards import local_part
    from titanlite.ranks.world import open_world
    from titanlite.tools.planner.recorder import StepRecorder
    from titanlite.tools.planner.trace import axes_of_groups

    def num_bytes(tensors: Iterable[Any]) -> int:
        return sum(local_part(t).nbytes for t in tensors if hasattr(t, "nbytes"))

    found = []
    with open_world(place) as world:
        for name in names:
            job = build_job(resolve_job(make_job(name), world.size), world)
            job.step()
            held: dict[str, int] = {}

            def note_gradients(job: Any = job, held: dict[str, int] = held) -> None:
                gradients = [p.grad for p in job.parameters.values() if p.grad is not None]
                held["gradients"] = num_bytes(gradients)

            with StepRecorder(axes_of_groups(job), is_fake=False) as recorder:
                job.trainer.step(job.draw(), on_gradients=note_gradients)
            states = job.trainer.optimizer.state.values()
            buffers = [buffer for part in job.parts for buffer in part.buffers()]
            held["parameters"] = num_bytes([*job.parameters.values(), *buffers])
            held["optimizer state"] = sum(num_bytes(state.values()) for state in states)
            found.append(Figures(_sent(recorder.events), held, _flops(recorder.events)))
    return found


def _sent(events: Iterable[Event]) -> dict[tuple[str, str], float]:
    sent: dict[tuple[str, str], float] = {}
    for event in events:
        if isinstance(event, Communication):
            key = event.kind, event.axis
            num_bytes = bytes_sent(event.kind, event.num_bytes, event.num_ranks)
            sent[key] = sent.get(key, 0) + num_bytes
    return sent


def _flops(events: Iterable[Event]) -> int:
    return sum(event.flops for event in events if isinstance(event, Operator))
