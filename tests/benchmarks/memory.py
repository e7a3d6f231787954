"""The memory of a plan in bytes on rank 0, measured and not estimated.

    python tests/benchmarks/memory.py [--flavor digits] [--batch 32] [plan ...]

parameters, gradients and optimizer: this rank's shards. activations: the memory allocated by a
forward pass and still held at its end. This is all that the backward pass reads, including
parameters that FSDP has gathered and not freed. peak: the most that a training step holds beyond
the shards of parameters and optimizer state. FLOPs: those of the products in a step, relative to a
step without checkpointing; recomputed products count again. Plans have the names of
communication.py; "one" is a single rank.
"""

import argparse
from functools import partial
from typing import Any

from allocator import allocations, peak_bounds
from communication import CHECKPOINTING, PARALLELISM, REPLICATE, SHARD, TRAINING

from titanlite.config import JobConfig, make_parallel_dims, resolve_job
from titanlite.ranks.launch import Place, spawn

PLANS = ["one", "one+2", "one+op", "one+full", "ddp4", "fsdp4", "fsdp4_never", "hsdp2x2"]
PLANS += ["tp4", "tp4_gathered", "tp2_fsdp2", "tp2_fsdp2+full"]
REPEATS = 4


def make_job_config(plan: str, flavor: str, batch: int) -> Any:
    """The job of a plan, with all images of a step in one microbatch."""
    parallelism, _, checkpointing = plan.partition("+")
    degrees = {SHARD: 1} if parallelism == "one" else PARALLELISM[parallelism]
    dp = degrees.get(REPLICATE, 1) * degrees[SHARD]
    return JobConfig.from_dict(
        {
            "model": {"flavor": flavor},
            "training": {
                "dataset": "synthetic",
                "global_batch_size": batch,
                "local_batch_size": batch // dp,
                **TRAINING.get(parallelism, {}),
            },
            "parallelism": degrees,
            "activation_checkpoint": CHECKPOINTING[checkpointing],
        }
    )


def measure(place: Place, config: Any) -> dict[str, int]:
    """The memory of one job on this rank, in bytes."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from titanlite.job import build_job
    from titanlite.modules.shards import local_part
    from titanlite.ranks.world import open_world

    def num_bytes(tensors: Any) -> int:
        return sum(local_part(t).numel() * t.element_size() for t in tensors)

    with open_world(place) as world:
        job = build_job(resolve_job(config, world.size), world)
        for _ in range(2):
            job.step()
        states = job.trainer.optimizer.state.values()
        found = {
            "parameters": num_bytes(job.parts[0].parameters()),
            "optimizer": num_bytes(
                value
                for state in states
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.ndim
            ),
        }
        _, found["peak"] = peak_bounds(job.step)

        def count_gradients() -> None:
            found["gradients"] = num_bytes(p.grad for p in job.parts[0].parameters())

        with FlopCounterMode(display=False) as counter:
            job.trainer.step(job.draw(), on_gradients=count_gradients)
        found["flops"] = counter.get_total_flops()
        kept = []
        for _ in range(REPEATS):
            batch = job.draw()[0]
            forward = partial(job.parts[0], batch.tokens, positions=batch.positions)
            kept.append(allocations(forward)[-1])
            job.step()  # frees the parameters that FSDP has gathered for the backward pass
        found["activations"] = min(kept)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flavor", default="digits")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("plans", nargs="*", default=PLANS)
    arguments = parser.parse_args()
    columns = ("parameters", "gradients", "optimizer", "activations", "peak")
    print(f"{'plan':16}" + "".join(f"{name:>13}" for name in (*columns, "FLOPs")))
    base = {}
    for plan in arguments.plans:
        config = make_job_config(plan, arguments.flavor, arguments.batch)
        num_ranks = make_parallel_dims(config, None).world_size
        found = spawn(measure, num_ranks, config)[0]
        base.setdefault(plan.partition("+")[0], found["flops"])
        ratio = found["flops"] / base[plan.partition("+")[0]]
        print(f"{plan:16}" + "".join(f"{found[name]:13,}" for name in columns) + f"{ratio:13.3f}")


if __name__ == "__main__":
    main()
