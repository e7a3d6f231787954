"""The effect of float8 on training on digits, and the cost of its emulation on CPU.

    python tests/benchmarks/float8.py [--steps 400] [--seeds 0 1 2] [--picture FILE.svg]

One process trains the digits model in float32, and with each recipe in float8 (every linear layer
of every block), from equal weights on equal batches. The jobs take turns step by step, so that
other load on the machine affects all of them equally. Prints the held-out losses and the
CPU-seconds per step. Seeds can run separately, each with --json FILE, and be joined with
--join FILE ...
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config import JobConfig, resolve_job
from titanlite.ranks.launch import ALONE

FORMATS = ("float32", "tensorwise", "rowwise", "rowwise_with_gw_hp")
COLOURS = {
    "float32": "#1c1c1c",
    "tensorwise": "#d55e00",
    "rowwise": "#0072b2",
    "rowwise_with_gw_hp": "#009e73",
}
Curve = list[tuple[int, float]]
"""(steps trained, held-out loss in nats per pixel), in order."""


def job_of(name: str, seed: int, steps: int, batch: int) -> Any:
    """The job of configs/single.toml with `steps` and `batch`, in the format `name` of FORMATS."""
    is_float8 = name != "float32"
    return JobConfig.from_dict(
        {
            "model": {
                "flavor": "digits",
                "converters": ["quantize.linear.float8"] if is_float8 else [],
            },
            "quantize": {"linear": {"float8": {"recipe_name": name} if is_float8 else {}}},
            "training": {
                "dataset": "digits",
                "global_batch_size": batch,
                "local_batch_size": batch,
                "steps": steps,
            },
            "optimizer": {"lr": 3e-3, "beta2": 0.99},
            "lr_scheduler": {"warmup_steps": 30, "decay_type": "cosine"},
            "parallelism": {"data_parallel_shard_degree": 1},
            "activation_checkpoint": {"mode": "none"},
            "validation": {"enable": True, "local_batch_size": 64},
            "debug": {"seed": seed},
        }
    )


def train(
    formats: list[str], seed: int, steps: int, every: int, batch: int
) -> dict[str, tuple[Curve, list[float]]]:
    """Each format's held-out losses, and the CPU-seconds of its steps without the first."""
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found: dict[str, tuple[Curve, list[float]]] = {name: ([], []) for name in formats}
    with open_world(ALONE) as world:
        # On a busy machine, threads that wait for each other also use CPU time.
        torch.set_num_threads(1)
        jobs = {n: build_job(resolve_job(job_of(n, seed, steps, batch), 1), world) for n in formats}
        for step in range(1, steps + 1):
            for name, job in jobs.items():
                start = time.process_time()
                job.step()
                found[name][1].append(time.process_time() - start)
                if step % every == 0 or step == steps:
                    found[name][0].append((step, job.evaluate()))
            if step % every == 0:
                losses = ", ".join(f"{n} {found[n][0][-1][1]:.4f}" for n in formats)
                print(f"seed {seed}, step {step}: {losses}", flush=True)
    return {name: (curve, seconds[1:]) for name, (curve, seconds) in found.items()}


def draw(path: Path, curves: Mapping[str, list[Curve]]) -> None:
    """Draw the last held-out loss of each recipe against float32's from the same seed."""
    from titanlite.tools.figures.figure import GRID, make_figure, save_figure

    figure = make_figure(8.5, 2.4)
    axes = figure.add_subplot()
    base = [curve[-1][1] for curve in curves["float32"]]
    recipes = [name for name in curves if name != "float32"]
    for row, name in enumerate(recipes):
        for seed, curve in enumerate(curves[name]):
            change = 100 * (curve[-1][1] / base[seed] - 1)
            axes.plot(change, -row, "o", color=COLOURS[name], markersize=9, zorder=3)
            axes.annotate(
                f"seed {seed}",
                (change, -row),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=10,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
    axes.axvline(0, color="#767676", linestyle=":")
    axes.margins(x=0.1)
    axes.set_ylim(-len(recipes) + 0.4, 0.6)
    axes.set_yticks([-row for row in range(len(recipes))], recipes, fontsize=11)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0f}%".replace("+0%", "0%"))
    axes.set_xlabel(f"held-out loss at step {curves['float32'][0][-1][0]}, against float32's")
    axes.set_title("digits, every linear layer of every block in float8", loc="left", fontsize=11)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=25, help="steps between validations")
    parser.add_argument("--recipes", nargs="*", default=["tensorwise", "rowwise"])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--join", type=Path, nargs="*", help="read such files instead of training")
    arguments = parser.parse_args()
    if arguments.join:
        kept = [json.loads(path.read_text()) for path in arguments.join]
        formats = list(kept[0]["curves"])
        curves = {name: [c for one in kept for c in one["curves"][name]] for name in formats}
        seconds = {name: [s for one in kept for s in one["seconds"][name]] for name in formats}
    else:
        formats = ["float32", *arguments.recipes]
        curves, seconds = {name: [] for name in formats}, {name: [] for name in formats}
        for seed in arguments.seeds:
            found = train(formats, seed, arguments.steps, arguments.every, arguments.batch)
            for name, (curve, of_steps) in found.items():
                curves[name].append(curve)
                seconds[name] += of_steps
    if arguments.json:
        arguments.json.write_text(json.dumps({"curves": curves, "seconds": seconds}))
    if arguments.picture:
        draw(arguments.picture, curves)
    base = statistics.median(seconds["float32"])
    for name in formats:
        cost = statistics.median(seconds[name])
        print(f"{name}: {cost:.3f} CPU-seconds a step, {cost / base:.2f} times float32's")
        for place, (curve, plain) in enumerate(zip(curves[name], curves["float32"], strict=True)):
            loss, of_float32 = curve[-1][1], plain[-1][1]
            print(f"  run {place}: {loss:.4f} at step {curve[-1][0]}, {loss / of_float32 - 1:+.2%}")


if __name__ == "__main__":
    main()
