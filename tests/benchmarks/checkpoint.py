"""The cost of checkpoints: seconds and bytes of saves and loads, and how long training waits.

    python tests/benchmarks/checkpoint.py [--dim D] [--blocks N] [--ranks R] [--repeats K]

The state is the weights and AdamW's state. One process writes it with plain torch.save (flushed to
disk, like a checkpoint) and reads it with torch.load. Then ranks that shard it save it as a
checkpoint, in every async_mode. Times are medians of the repeats. "blocked" is how long training
waits for the save; "beside a save" is the next step, while the rest of the save runs in the
background.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlite.config import JobConfig, override, resolve_job
from titanlite.ranks.launch import Place, spawn

MIB = 2**20


def measure(place: Place, config: Any, repeats: int) -> dict[str, float]:
    """Seconds of saves and loads of one job on this rank, and the checkpoint's bytes."""
    import torch
    import torch.distributed as dist

    from titanlite.checkpoint.run import Checkpoints
    from titanlite.job import build_job
    from titanlite.ranks.world import open_world
    from titanlite.tools.convert.stored import find_checkpoint

    def timed(function: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    found: dict[str, float] = {}
    with open_world(place) as world:
        job = build_job(resolve_job(config, world.size), world)
        for _ in range(2):
            job.step()
        found["step"] = statistics.median(timed(job.step) for _ in range(repeats + 2))
        with Checkpoints(job) as checkpoints:
            waits, besides = [], []
            for index in range(repeats):
                save = functools.partial(checkpoints.save, 3 + index, in_background=True)
                waits.append(timed(save))
                besides.append(timed(job.step))
                checkpoints.wait()
            found["waits"] = statistics.median(waits)
            found["beside"] = statistics.median(besides)
            path, manifest = find_checkpoint(Path(config.job.dump_folder) / "checkpoint")
            found["bytes"] = manifest.size_bytes
        again = override(config, {"checkpoint.load_only": True})
        loads = []
        for _ in range(repeats):
            job.config = again
            opened = Checkpoints(job)
            loads.append(timed(opened.__enter__))
            opened.__exit__(None, None, None)
        found["load"] = statistics.median(loads)
        if world.size == 1:
            optimizer = job.trainer.optimizer
            whole = {"model": job.parts[0].state_dict(), "optimizer": optimizer.state_dict()}
            file = path.parent / "plain.pt"
            found["plain save"] = statistics.median(
                timed(lambda: plain_save(whole, file)) for _ in range(repeats)
            )
            found["plain load"] = statistics.median(
                timed(lambda: torch.load(file, weights_only=True)) for _ in range(repeats)
            )
            found["plain bytes"] = file.stat().st_size
    return found


def plain_save(state: Any, file: Path) -> None:
    import torch

    with file.open("wb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    rows = []
    for num_ranks in dict.fromkeys((1, asked.ranks)):
        for mode in ("disabled", "async", "async_with_pinned_mem"):
            with tempfile.TemporaryDirectory() as folder:
                config = JobConfig.from_dict(
                    {
                        "model": {
                            "dim": asked.dim,
                            "num_layers": asked.blocks,
                            "ffn_hidden_dim": 4 * asked.dim,
                        },
                        "job": {"dump_folder": folder},
                        "training": {"local_batch_size": 2},
                        "activation_checkpoint": {"mode": "none"},
                        "parallelism": {"data_parallel_shard_degree": num_ranks},
                        "checkpoint": {"enable": True, "async_mode": mode, "keep_latest_k": 1},
                    }
                )
                of_ranks = spawn(measure, num_ranks, config, asked.repeats)
            # Training waits for the slowest rank.
            most = {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}
            rows.append((num_ranks, mode, most))
    plain = rows[0][2]
    print(
        f"torch.save   {plain['plain bytes'] / MIB:6.1f} MiB  "
        f"save {plain['plain save']:.2f} s  load {plain['plain load']:.2f} s"
    )
    for num_ranks, mode, most in rows:
        print(
            f"{num_ranks} {'rank ' if num_ranks == 1 else 'ranks'}  {mode:<22} "
            f"{most['bytes'] / MIB:6.1f} MiB  blocked {most['waits']:.2f} s  "
            f"load {most['load']:.2f} s  step {most['step']:.2f} s, beside a save "
            f"{most['beside']:.2f} s"
        )


if __name__ == "__main__":
    main()
