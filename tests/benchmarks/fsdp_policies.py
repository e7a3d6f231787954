"""The savings of keeping weights gathered: CPU-seconds of a step under each FSDP2 policy.

    python tests/benchmarks/fsdp_policies.py [--rounds 30]

Four ranks, and weights that take longer to gather than to compute with. Jobs with all policies run
in one world and take turns step by step, so that other load on the machine affects all of them
equally. "last block freed" is "default", but the last block is freed like the others.
"""

import argparse
import statistics
import time
from typing import Any

from titanlite.config import JobConfig, resolve_job
from titanlite.ranks.launch import Place, spawn

NUM_RANKS = 4
JOB: dict[str, dict[str, Any]] = {
    "model": {"flavor": "digits", "dim": 768, "num_heads": 12, "ffn_hidden_dim": 2048},
    "training": {"dataset": "digits", "global_batch_size": 4, "local_batch_size": 1},
    "activation_checkpoint": {"mode": "none"},
}
POLICIES = {"last block freed": "default", "default": "default", "never": "never"}


def take_turns(place: Place, rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of each step of this rank, by policy."""
    import torch.distributed as dist

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        jobs = {}
        for name, policy in POLICIES.items():
            plan = {"data_parallel_shard_degree": NUM_RANKS, "fsdp_reshard_after_forward": policy}
            config = JobConfig.from_dict({**JOB, "parallelism": plan})
            jobs[name] = build_job(resolve_job(config, world.size), world)
        blocks: list[Any] = list(jobs["last block freed"].parts[0].layers.values())
        blocks[-1].set_reshard_after_forward(True)
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for index in range(rounds + 1):
            names = list(jobs)[index % len(jobs) :] + list(jobs)[: index % len(jobs)]
            for name in names:
                dist.barrier()
                start = time.process_time()
                jobs[name].step()
                seconds[name].append(time.process_time() - start)
        return {name: steps[1:] for name, steps in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    by_rank = spawn(take_turns, NUM_RANKS, arguments.rounds)
    totals = {
        name: [sum(step) for step in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in POLICIES
    }
    print(f"medians of {arguments.rounds} rounds, CPU-seconds over all ranks")
    never = totals["never"]
    for name, steps in totals.items():
        more = statistics.median(a - b for a, b in zip(steps, never, strict=True))
        print(f"{name:17} {statistics.median(steps):7.3f}, {more:+7.4f} over never")
    freed = totals["last block freed"]
    recovered = statistics.median(a - b for a, b in zip(freed, totals["default"], strict=True))
    # "never" keeps the four blocks and the embeddings, which are far smaller.
    a_block = statistics.median(a - b for a, b in zip(freed, never, strict=True)) / 4
    print(f"the last block recovers {recovered:.4f} of {a_block:.4f} that `never` saves a block: "
          f"{recovered / a_block:.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
