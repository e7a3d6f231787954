"""The cost of fault detection: CPU-seconds of a step over all ranks, with and without checks.

    python tests/benchmarks/fault_overhead.py [--steps 15]

Steps with and without comm.mode = "debug" alternate in one world, with the job of
plan_overhead.py. The watch thread cannot be disabled; its CPU clock is read instead.
"""

import argparse
import statistics
import threading
import time

from plan_overhead import PLANS, plan_config

from titanlite.config import resolve_job
from titanlite.ranks.launch import Place, spawn

PLAN = "tp2_fsdp2"


def take_turns(place: Place, steps: int) -> tuple[list[float], list[float], float]:
    """CPU-seconds of this rank's steps without and with checks, and of its watch per second."""
    import torch.distributed as dist

    from titanlite.job import build_job
    from titanlite.ranks.order import OrderCheck
    from titanlite.ranks.world import open_world

    config = plan_config("image", PLANS[PLAN])
    with open_world(place) as world:
        job = build_job(resolve_job(config, world.size), world)
        check = OrderCheck(job.meshes.axes_of_groups())
        # The check reads the whole flight recorder, so fill it first, as in a long run.
        while not job.trainer.optimizer.state:
            job.step()
        for _ in range(2000):
            dist.barrier()
        check()
        watch = next(thread for thread in threading.enumerate() if thread.name == "fault watch")
        assert watch.ident is not None
        clock = time.pthread_getcpuclockid(watch.ident)
        watched, began = time.clock_gettime(clock), time.monotonic()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for index in range(2 * steps):
            job.trainer.before_update = check if index % 2 else None
            dist.barrier()
            start = time.process_time()
            job.step()
            seconds[bool(index % 2)].append(time.process_time() - start)
        a_second = (time.clock_gettime(clock) - watched) / (time.monotonic() - began)
    return seconds[False], seconds[True], a_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    by_rank = spawn(take_turns, 4, parser.parse_args().steps)
    without, with_check = (
        [sum(of_ranks) for of_ranks in zip(*(rank[kind] for rank in by_rank), strict=True)]
        for kind in (0, 1)
    )
    ratios = [b / a for a, b in zip(without, with_check, strict=True)]
    print(f"{PLAN}, medians of {len(ratios)} alternating steps, CPU-seconds over 4 ranks")
    print(f"default  {statistics.median(without):.3f}")
    print(f"debug    {statistics.median(with_check):.3f}")
    print(f"ratio    {statistics.median(ratios):.3f}")
    print(f"the watch: {1000 * max(rank[2] for rank in by_rank):.2f} CPU-ms per second and rank")


if __name__ == "__main__":
    main()
