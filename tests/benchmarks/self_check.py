"""The cost of the self-check: CPU-seconds of it over all ranks, as a share of a run of 100 steps.

    python tests/benchmarks/self_check.py [--steps 10]

A run compares its copies at the start and after its first step, and before each checkpoint; here
one is saved. The jobs are those of plan_overhead.py.
"""

import argparse
import statistics
import time

from plan_overhead import PLANS, plan_config

from titanlite.config import resolve_job
from titanlite.ranks.launch import Place, spawn

NUM_STEPS, NUM_CHECKS = 100, 3


def measure(place: Place, plan: str, steps: int) -> tuple[list[float], list[float]]:
    """CPU-seconds of this rank's steps, and of its checks after them."""
    import torch.distributed as dist

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world
    from titanlite.self_check import check_copies

    with open_world(place) as world:
        job = build_job(resolve_job(plan_config("image", PLANS[plan]), world.size), world)
        while not job.trainer.optimizer.state:
            job.step()
        check_copies(job, "before the turns")
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(steps):
            for kind, call in enumerate((job.step, lambda: check_copies(job, "after a step"))):
                dist.barrier()
                start = time.process_time()
                call()
                seconds[kind].append(time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    for plan in ("ddp4", "fsdp4", "tp2_fsdp2", "tp4"):
        by_rank = spawn(measure, 4, plan, steps)
        step, check = (
            statistics.median(
                sum(of_rank[kind][turn] for of_rank in by_rank) for turn in range(steps)
            )
            for kind in (0, 1)
        )
        share = NUM_CHECKS * check / (NUM_STEPS * step)
        print(f"{plan}: a step {step:.3f} s, a check {check:.4f} s, {share:.3%} of the run")


if __name__ == "__main__":
    main()
