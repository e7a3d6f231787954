"""The experiments that measure time: each repeats, and gives the median and the range.

Where all ranks share the cores of one machine, communication takes CPU time itself, so overlap
gains little. Slow links and devices (link.py) take time without a core.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import titanlite.tools.lab as lab
from titanlite.errors import TitanliteError
from titanlite.tools.lab.link import Link
from titanlite.tools.lab.table import Samples, Table, compared

# The first step is a warmup, and not timed.
NUM_STEPS = 2


def bandwidth(
    *,
    world: int = 4,
    num_bytes: int = 1 << 24,
    repeats: int = 5,
    latency_seconds: float = 0.0,
    bytes_per_second: float = 0.0,
) -> Table:
    """bandwidth of collectives, torch's and by hand: bytes * 2 (W-1) / (W t)"""
    if world < 2:
        raise TitanliteError("world: a single rank sends nothing; use at least 2")
    if num_bytes % (4 * world):
        raise TitanliteError(
            f"bytes: {num_bytes} bytes of float32 are not {world} equal parts; "
            f"use a multiple of {4 * world}"
        )
    link = _link(latency_seconds, bytes_per_second)

    def measure(device: Any, kind: str, form: str) -> Any:
        return lab.measure_bandwidth(device, kind, num_bytes, form=form, num_trials=repeats)

    rows = []
    with lab.VirtualCluster(lab.Mesh(rank=world), link=link) as cluster:
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            # Links do not delay torch's collectives.
            for form in ("torch", "naive", "ring") if link is None else ("naive", "ring"):
                measured = cluster.run(measure, kind, form)
                # A collective has ended when it has ended on all ranks.
                trials = zip(*(each.trial_seconds for each in measured), strict=True)
                speeds = Samples(tuple(measured[0].sent_bytes / max(trial) for trial in trials))
                cpu_seconds = sum(each.cpu_seconds for each in measured)
                rows.append((kind, form, speeds.text(1e-9, 3), f"{cpu_seconds * 1e3:.0f}"))
    return Table(
        f"{world} ranks, {num_bytes} bytes of float32{_on(link)}; median of {repeats} trials and "
        "range, each on the slowest rank.",
        ("collective", "form", "GB/s", "CPU-ms, all ranks"),
        rows,
    )


def overlap(
    *,
    world: int = 2,
    repeats: int = 5,
    latency_seconds: float = 2e-4,
    bytes_per_second: float = 1.5e6,
    flops_per_second: float = 1e8,
) -> Table:
    """overlapped communication on slow links and devices: step time with and without"""
    import torch

    num_layers, dim, batch = max(4, world), 128, 128
    if world < 2 or num_layers % world or dim % world:
        raise TitanliteError(
            f"world: {num_layers} layers of {dim} x {dim} do not divide among {world} ranks; "
            "use a power of two from 2 to 128"
        )
    inputs = torch.randn(batch, dim)
    steps = {"num_steps": NUM_STEPS}
    data = partial(lab.data_parallelism_main, **steps)
    zero = partial(lab.zero_parallelism_main, **steps)
    pipeline = partial(lab.pipeline_parallelism_main, num_micro_batches=8, **steps)
    mains = {
        "data parallel": data,
        "... 2 layers a bucket": partial(data, bucket_bytes=2 * dim * dim * 4),
        "ZeRO 2": partial(zero, stage=2),
        "ZeRO 3": partial(zero, stage=3),
        "tensor parallel": partial(lab.tensor_parallelism_main, **steps),
        "pipeline gpipe": partial(pipeline, schedule="gpipe"),
        "pipeline 1f1b": pipeline,
    }
    link = _link(latency_seconds, bytes_per_second)
    speed = flops_per_second or math.inf
    rows = []
    with lab.VirtualCluster(
        lab.Mesh(rank=world), algorithm="ring", link=link, flops_per_second=speed
    ) as cluster:
        for name, main in mains.items():
            without, overlapped = step_times(cluster, main, (inputs, num_layers), repeats)
            verdict = compared(without[0], overlapped[0])
            cells = [samples.text(1e3, 0) for pair in (without, overlapped) for samples in pair]
            rows.append((name, *cells, verdict))
    devices = f", devices of {speed / 1e6:g} MFLOP/s" if flops_per_second else ""
    return Table(
        f"Wall ms per step and rank{_on(link)}{devices}; {world} ranks, {num_layers} layers of "
        f"{dim} x {dim}, batch {batch}.\nMedian and range of {repeats} runs. Faster or "
        "slower: every run with overlap is.",
        ("", "step", "waiting", "step, overlapped", "waiting, overlapped", "overlap is"),
        rows,
    )


def step_times(
    cluster: Any, main: Callable[..., Any], inputs: tuple[Any, ...], repeats: int
) -> tuple[tuple[Samples, ...], tuple[Samples, ...]]:
    """Seconds per step, and seconds of waiting, of `main` without and with overlap.

    Runs alternate, so that a busy machine slows down both sides. Each sample is a mean over ranks
    and steps, without the first step.
    """
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(repeats):
        for overlapped, samples in times.items():
            records = cluster.run(lab.over_channels(main, overlap=overlapped), *inputs)
            num_steps = sum(record.num_steps - 1 for record in records)
            seconds = sum(record.seconds for record in records) / num_steps
            waited = sum(record.waited_seconds for record in records) / num_steps
            samples.append((seconds, waited))
    without, overlapping = (
        tuple(map(Samples, zip(*times[is_overlapped], strict=True)))
        for is_overlapped in (False, True)
    )
    return without, overlapping


def _link(latency_seconds: float, bytes_per_second: float) -> Link | None:
    """The link of these options; no bandwidth means an infinite one."""
    if not latency_seconds and not bytes_per_second:
        return None
    return lab.Link(latency_seconds, bytes_per_second or math.inf)


def _on(link: Link | None) -> str:
    if link is None:
        return ""
    latency, speed = link.latency_seconds * 1e3, link.bytes_per_second / 1e6
    return f", on links of {latency:g} ms and {speed:g} MB/s"
