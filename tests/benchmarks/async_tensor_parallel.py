"""The gain of asynchronous TP: rings with and without overlap, and rings against collectives.

    python tests/benchmarks/async_tensor_parallel.py overlap [--picture FILE.png --trace FILE.json]
    python tests/benchmarks/async_tensor_parallel.py sizes [--ranks 2 4] [--compile aot_eager]

overlap: two ranks with one core and one thread each, over a link that is slowed down until the
transfer of a chunk takes as long as its product, by waits that use no CPU. A ring of two products
and one transfer takes as long as two products with overlap, and as three without. The largest
possible gain is thus 1.5, and 1.25 for a whole backward pass, which also computes the weights'
gradients (two more products). The exit status is 1 if a gain misses its target.

sizes: no delay. A feed-forward layer (two matrices, both pairs, forward and backward) with rings
and with DTensor's collectives in turn, in wall-clock seconds and CPU-seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from titanlite.ranks.launch import Place, spawn
from titanlite.schedule import Span
from titanlite.tools.figures.schedule_png import draw_png
from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.figures.trace import make_trace

TOKENS, DIM, HIDDEN = 1024, 1024, 4096
"""The sizes of `overlap`: a feed-forward layer, so that copies cost little beside products."""
TARGET, WHOLE_TARGET = 1.25, 1.12
NUM_RUNS = 15
SIZES = (
    (32, 32, 64),
    (128, 64, 128),
    (256, 128, 256),
    (512, 256, 256),
    (512, 256, 1024),
    (1024, 512, 1024),
    (2048, 1024, 1024),
)


@dataclass
class Link:
    """A link that takes `seconds_per_byte`; it records all products and transfers."""

    seconds_per_byte: float = 0.0
    waits: bool = False
    """Whether each transfer is waited for before the product that it could overlap with."""
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    """(start, end, "product" or "transfer"), in seconds of a clock that the ranks share."""

    @contextmanager
    def in_force(self) -> Iterator[Link]:
        """Rings use this link inside the block."""
        from titanlite.parallelize.async_tensor_parallel import ring_product

        multiply = ring_product.multiply

        def noted(*tensors: Any) -> None:
            start = time.perf_counter()
            multiply(*tensors)
            self.spans.append((start, time.perf_counter(), "product"))

        transfer: Any = _slow_transfer(self)
        with (
            patch.object(ring_product, "Transfer", transfer),
            patch.object(ring_product, "multiply", noted),
        ):
            yield self


def _slow_transfer(link: Link) -> type:
    import torch
    import torch.distributed as dist

    from titanlite.parallelize.async_tensor_parallel import ring_product

    class SlowTransfer(ring_product.Transfer):
        """Ends `seconds_per_byte` times its bytes after both ranks have posted it."""

        is_posted = False

        def post(self, sent: torch.Tensor, received: torch.Tensor) -> None:
            self.is_posted = True
            self.seconds = link.seconds_per_byte * received.nbytes
            self.start = time.perf_counter()
            own, self.others = torch.tensor([self.start]).double(), torch.zeros(1).double()
            self.own = own.fill_(self.start)
            super().post(sent, received)
            group, ring = self.group, self.ring
            self.pending += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.own, group=group, group_peer=ring.next),
                    dist.P2POp(dist.irecv, self.others, group=group, group_peer=ring.previous),
                ]
            )
            if link.waits:
                self._arrive()

        def wait(self) -> None:
            if self.is_posted and not link.waits:
                self._arrive()

        def _arrive(self) -> None:
            super().wait()
            start = max(self.start, self.others.item())
            # The transfer starts when both ranks have posted it.
            time.sleep(max(0.0, start + self.seconds - time.perf_counter()))
            end = start + self.seconds if link.seconds_per_byte else time.perf_counter()
            link.spans.append((start, max(end, start), "transfer"))

    return SlowTransfer


def passes(group: Any) -> dict[str, Callable[[], Any]]:
    """The timed functions: forward and backward passes of both pairs on this rank."""
    import torch

    from titanlite.parallelize.async_tensor_parallel.ring_product import (
        gather_product,
        product_scatter,
    )

    n = group.size()
    torch.manual_seed(group.rank())
    shard = torch.randn(TOKENS // n, DIM, requires_grad=True)
    by_rows = torch.randn(HIDDEN // n, DIM, requires_grad=True)
    x = torch.randn(TOKENS, HIDDEN // n, requires_grad=True)
    by_columns = torch.randn(DIM, HIDDEN // n, requires_grad=True)
    gathered = gather_product(shard * 1, by_rows * 1, 0, group)
    scattered = product_scatter(x * 1, by_columns * 1, 0, group)
    grads = torch.randn_like(gathered), torch.randn_like(scattered)

    def backward(output: Any, inputs: Any, grad: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)

    return {
        "gather and product, forward": lambda: gather_product(shard, by_rows, 0, group),
        "gather and product, backward (input)": backward(gathered, shard, grads[0]),
        "gather and product, backward (all)": backward(gathered, (shard, by_rows), grads[0]),
        "product and scatter, forward": lambda: product_scatter(x, by_columns, 0, group),
        "product and scatter, backward (input)": backward(scattered, x, grads[1]),
        "product and scatter, backward (all)": backward(scattered, (x, by_columns), grads[1]),
    }


@dataclass(frozen=True)
class Overlap:
    """Seconds of one pass with and without overlap: wall-clock time and CPU time."""

    overlapped: float
    waiting: float
    cpu_overlapped: float
    cpu_waiting: float

    @property
    def gain(self) -> float:
        return self.waiting / self.overlapped


def measure_overlap(place: Place, num_runs: int = NUM_RUNS) -> tuple[dict[str, Overlap], float]:
    """Medians over alternating runs for each of `passes`, and the transfer time of a chunk."""
    # Before any thread starts, including gloo's.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    import torch
    import torch.distributed as dist

    from titanlite.ranks.world import open_world

    with open_world(place):
        torch.set_num_threads(1)
        group = dist.group.WORLD
        seconds = _time_of_a_product(group)
        chunk_bytes = 4 * TOKENS // group.size() * DIM
        link = Link(seconds / chunk_bytes)
        found = {}
        with link.in_force():
            for name, run in passes(group).items():
                times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
                for index in range(2 * (num_runs + 1)):
                    link.waits = bool(index % 2)
                    dist.barrier()
                    start, cpu = time.perf_counter(), time.process_time()
                    run()
                    used = time.process_time() - cpu
                    dist.barrier()
                    times[link.waits].append((time.perf_counter() - start, used))
                (fast, cpu_fast), (slow, cpu_slow) = (
                    map(statistics.median, zip(*times[waits][1:], strict=True))
                    for waits in (False, True)
                )
                found[name] = Overlap(fast, slow, cpu_fast, cpu_slow)
        return found, seconds


def _time_of_a_product(group: Any) -> float:
    """Seconds of a chunk's product while all ranks multiply: the slowest rank's median."""
    import torch
    import torch.distributed as dist

    from titanlite.parallelize.async_tensor_parallel.ring_product import multiply

    n = group.size()
    chunk = torch.randn(TOKENS // n, DIM)
    weight = torch.randn(HIDDEN // n, DIM)
    out = torch.empty(TOKENS // n, HIDDEN // n)
    times = []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        multiply(chunk, weight, out)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def record_spans(place: Place, seconds_per_byte: float) -> dict[bool, list[tuple]]:
    """The spans of this rank's products and transfers, by whether the ring waits."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    import torch
    import torch.distributed as dist

    from titanlite.ranks.world import open_world

    with open_world(place):
        torch.set_num_threads(1)
        group = dist.group.WORLD
        spans = {}
        runs = [run for name, run in passes(group).items() if "(all)" not in name]
        for waits in (False, True):
            link = Link(seconds_per_byte, waits)
            with link.in_force():
                for _ in range(3):
                    link.spans.clear()
                    dist.barrier()
                    for run in runs:
                        run()
            spans[waits] = list(link.spans)
        return spans


def make_timeline(of_ranks: list[dict[bool, list[tuple]]]) -> Timeline:
    """A row per rank, its transfers below its products: with overlap above, without below."""
    rows, spans = [], []
    for waits in (False, True):
        start = min(span[0] for rank in of_ranks for span in rank[waits])
        for rank, of_rank in enumerate(of_ranks):
            for what in ("product", "transfer"):
                own = [span for span in of_rank[waits] if span[2] == what]
                for i, (first, last, _) in enumerate(own):
                    # Two products of a pass: forward and backward of a pair, then of the other.
                    kind = "FB"[i // 2 % 2] if what == "product" else "EXCHANGE"
                    times = 1e3 * (first - start), 1e3 * (last - start)
                    spans.append(Span(len(rows), *times, kind, 0, i))
            rows.append(f"{'waits' if waits else 'overlaps'}, rank {rank}")
    return Timeline(
        "Asynchronous TP: two pairs of products, on two ranks",
        rows,
        spans,
        unit="ms",
        batches_are="product",
        caption="above, a chunk travels while the one before is multiplied; below, before it is",
    )


def time_layer(
    place: Place, sizes: list[tuple[int, int, int]], num_runs: int, backend: str = ""
) -> list[dict]:
    """Median seconds and CPU-seconds of a layer for each size, with rings and with collectives.

    The layer is compiled if `backend` is given.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from titanlite.parallelize import apply_tp
    from titanlite.parallelize.tensor_parallel.styles import GatherColwise, RowwiseLocal
    from titanlite.ranks.world import open_world

    class Inner(nn.Module):
        def __init__(self, dim: int, hidden: int) -> None:
            super().__init__()
            self.w1 = nn.Linear(dim, hidden, bias=False)
            self.w2 = nn.Linear(hidden, dim, bias=False)

        def forward(self, x):
            return self.w2(torch.relu(self.w1(x)))

    class Block(nn.Module):
        def __init__(self, dim: int, hidden: int) -> None:
            super().__init__()
            self.ffn = Inner(dim, hidden)

        def forward(self, x):
            return self.ffn(x)

    with open_world(place) as world:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        results = []
        for tokens, dim, hidden in sizes:
            layers: dict[bool, Any] = {}
            for rings in (True, False):
                layers[rings] = Block(dim, hidden)
                plan = {"ffn": GatherColwise(0, "w1"), "ffn.w2": RowwiseLocal(0)}
                apply_tp(layers[rings], mesh, plan, rings=rings)
                if backend:
                    torch._dynamo.reset()
                    layers[rings] = torch.compile(layers[rings], backend=backend, fullgraph=True)
            x = torch.randn(tokens // world.size, dim, requires_grad=True)
            times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for index in range(2 * (num_runs + 3)):
                rings = bool(index % 2)
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                layers[rings](x).sum().backward()
                used = time.process_time() - cpu
                dist.barrier()
                times[rings].append((time.perf_counter() - start, used))
            results.append(
                {
                    rings: tuple(map(statistics.median, zip(*times[rings][3:], strict=True)))
                    for rings in times
                }
            )
        return results


def show_overlap(options: argparse.Namespace) -> int:
    found, seconds = spawn(measure_overlap, 2, options.runs, timeout_seconds=600)[0]
    print(f"a chunk's product and its transfer take {1e3 * seconds:.1f} ms each")
    print(f"{'pass':38} {'overlaps':>9} {'waits':>9} {'gain':>5} {'CPU':>9} {'CPU':>9}")
    is_met = True
    for name, one in found.items():
        is_met &= one.gain >= (WHOLE_TARGET if "(all)" in name else TARGET)
        print(
            f"{name:38} {1e3 * one.overlapped:6.1f} ms {1e3 * one.waiting:6.1f} ms "
            f"{one.gain:5.2f} {1e3 * one.cpu_overlapped:6.1f} ms {1e3 * one.cpu_waiting:6.1f} ms"
        )
    sums = [
        sum(getattr(one, key) for name, one in found.items() if "(input)" not in name)
        for key in ("waiting", "overlapped")
    ]
    print(f"forward and backward of both: {sums[0] / sums[1]:.2f}")
    if options.picture or options.trace:
        chunk_bytes = 4 * TOKENS // 2 * DIM
        timeline = make_timeline(spawn(record_spans, 2, seconds / chunk_bytes))
        if options.picture:
            draw_png(timeline, options.picture)
        if options.trace:
            Path(options.trace).write_text(make_trace(timeline))
    print("met" if is_met else "MISSED")
    return 0 if is_met else 1


def show_sizes(options: argparse.Namespace) -> int:
    print(
        "tokens    dim  hidden  ranks      rings  collectives  ratio  CPU of rings  of collectives"
    )
    for num_ranks in options.ranks:
        of_ranks = spawn(
            time_layer, num_ranks, list(SIZES), options.runs, options.compile, timeout_seconds=600
        )
        for size, *results in zip(SIZES, *of_ranks, strict=True):
            wall = {r: statistics.mean(result[r][0] for result in results) for r in (True, False)}
            cpu = {r: sum(result[r][1] for result in results) for r in (True, False)}
            print(
                f"{size[0]:6} {size[1]:6} {size[2]:7} {num_ranks:6} {1e3 * wall[True]:7.1f} ms "
                f"{1e3 * wall[False]:9.1f} ms {wall[True] / wall[False]:6.2f} "
                f"{1e3 * cpu[True]:10.1f} ms {1e3 * cpu[False]:12.1f} ms",
                flush=True,
            )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("overlap", "sizes"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--compile", default="", help="sizes: a compiler, such as aot_eager")
    parser.add_argument("--picture")
    parser.add_argument("--trace")
    options = parser.parse_args()
    return show_overlap(options) if options.what == "overlap" else show_sizes(options)


if __name__ == "__main__":
    sys.exit(main())
