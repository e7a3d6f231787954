"""The cost of ring attention: CPU-seconds of all ranks relative to plain attention in one process.

    python tests/benchmarks/ring_attention.py [--lengths 3072 6144] [--ranks 4] [--layouts headtail]

Forward and backward, causal, batch 1, 8 heads of 64, float32. CPU-seconds include every thread of
every rank and all messages, and hardly depend on other load; 1.00 would mean that context
parallelism is free. The single process uses as many threads as all ranks together. The exit status
is 1 if the head-tail layout on 4 ranks misses its target.
"""

import argparse
import statistics
import sys
import time

from titanlite.ranks.launch import Place, spawn

NUM_HEADS, HEAD_DIM = 8, 64
WARM_UP_STEPS = 2


def target(num_tokens: int) -> float:
    """The largest allowed cost of head-tail on 4 ranks; merging costs more in short sequences."""
    return 1.08 if num_tokens >= 6144 else 1.15


def cpu_seconds_per_step(place: Place, num_tokens: int, layout: str, rotate: str, num_steps: int):
    """This rank's CPU-seconds of each forward and backward pass."""
    import torch
    import torch.distributed as dist

    from titanlite.parallelize.context_parallel.ring import RingAttention
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        torch.manual_seed(world.rank)
        attention = RingAttention(dist.group.WORLD, layout, rotate)
        shape = (4, 1, num_tokens // world.size, NUM_HEADS, HEAD_DIM)
        q, k, v, grad_out = (part.transpose(1, 2) for part in torch.randn(shape))
        inputs = [part.requires_grad_() for part in (q, k, v)]
        seconds = []
        for _ in range(WARM_UP_STEPS + num_steps):
            dist.barrier()
            start = time.process_time()
            torch.autograd.grad(attention(*inputs), inputs, grad_out)
            dist.barrier()
            seconds.append(time.process_time() - start)
        return seconds[WARM_UP_STEPS:]


def measure(num_ranks: int, num_tokens: int, layout: str, rotate: str, num_steps: int) -> float:
    """CPU-seconds of a step, summed over ranks: the median of `num_steps`."""
    per_rank = spawn(
        cpu_seconds_per_step, num_ranks, num_tokens, layout, rotate, num_steps, timeout_seconds=600
    )
    return statistics.median(sum(step) for step in zip(*per_rank, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[3072, 6144, 12288])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layouts", nargs="+", default=["headtail", "striped", "none"])
    parser.add_argument("--rotate-methods", nargs="+", default=["alltoall", "allgather"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()

    cases = [
        (num_ranks, layout, rotate)
        for num_ranks in options.ranks
        for layout in options.layouts
        for rotate in options.rotate_methods
    ]
    missed = 0
    print("tokens  cp  layout    rotate method  CPU-seconds  over one process")
    for num_tokens in options.lengths:
        # One process before and after each case: the speed of a shared machine drifts.
        rounds: dict[tuple, list[tuple[float, float]]] = {case: [] for case in cases}
        before = measure(1, num_tokens, "headtail", "alltoall", options.steps)
        for _ in range(options.rounds):
            for case, pairs in rounds.items():
                seconds = measure(case[0], num_tokens, *case[1:], options.steps)
                after = measure(1, num_tokens, "headtail", "alltoall", options.steps)
                pairs.append((seconds, seconds / statistics.mean((before, after))))
                before = after
        print(f"{num_tokens:6d}   1  {'':23s}  {before:11.3f}  1.00")
        for (num_ranks, layout, rotate), pairs in rounds.items():
            seconds, ratio = (statistics.median(column) for column in zip(*pairs, strict=True))
            line = f"{num_tokens:6d}  {num_ranks:2d}  {layout:8s}  {rotate:13s}  {seconds:11.3f}  "
            line += f"{ratio:.3f}"
            if (num_ranks, layout, rotate) == (4, "headtail", "alltoall"):
                met = ratio <= target(num_tokens)
                missed += not met
                line += f"  target {target(num_tokens):.2f}: {'met' if met else 'MISSED'}"
            print(line, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
