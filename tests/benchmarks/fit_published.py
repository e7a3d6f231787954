"""Fit the figures under [fitted] of hardware files to the rows marked so: configs/plan/published.

    python -m tests.benchmarks.fit_published a100
    python -m tests.benchmarks.fit_published h100_96gb

Each row is planned as `titanlite plan` plans it; what changes is the hardware's figures.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from titanlite.tools.planner.cache import load_pieces
from titanlite.tools.planner.command import PUBLISHED
from titanlite.tools.planner.compose import compose
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.hardware import Hardware, load_hardware
from titanlite.tools.planner.planning import resolve
from titanlite.tools.planner.predict import predict
from titanlite.tools.planner.published import PublishedRun, read_rows

BOUNDS = {"products.share": (0.3, 1.0), "memory.share": (0.4, 0.95), "node.share": (0.4, 0.95)}


def with_figures(hardware: Hardware, figures: dict[str, float]) -> Hardware:
    """The hardware with other figures; a curve is scaled to reach the figure."""
    for key, value in figures.items():
        section, name = key.split(".")
        of: Any = getattr(hardware, section)
        old = getattr(of, name)
        new: Any = value
        if hasattr(old, "points"):
            scale = value / old.points[-1][1]
            new = replace(old, points=tuple((x, y * scale) for x, y in old.points))
        hardware = replace(hardware, **{section: replace(of, **{name: new})})
    return hardware


def timer(row: PublishedRun) -> Callable[[dict[str, float]], float]:
    """A function of the figures: planned over published speed."""
    device = load_hardware(row.hardware)
    job, _, *keys = row.command("")
    resolved, _ = resolve([job, *keys], device)
    pieces = load_pieces(resolved, device.software)
    compositions = compose(resolved, pieces)
    is_compiled = resolved.config.compile.enable

    def ratio(figures: dict[str, float]) -> float:
        hardware = with_figures(device, figures)
        head_dim = getattr(resolved.model, "head_dim", 128)
        cost = Cost(hardware, resolved.dims, is_compiled, head_dim)
        step = predict(resolved, compositions, cost, pieces, keeps_actions=False).step
        if row.unit == "seconds":
            return row.speed / step.seconds
        return step.tokens_per_second / row.speed

    return ratio


def main(name: str) -> None:
    shipped = load_hardware(name)
    rows = [row for row in read_rows(Path(PUBLISHED)) if row.fitted]
    rows = [row for row in rows if load_hardware(row.hardware).name == shipped.name]
    timers, keys = [timer(row) for row in rows], list(shipped.fitted)
    low, high = (np.array([BOUNDS[key][side] for key in keys]) for side in (0, 1))

    def errors(values: Any) -> Any:
        figures = dict(zip(keys, map(float, values), strict=True))
        found = np.log([one(figures) for one in timers])
        print(figures, f"{np.abs(found).max():.2%}", file=sys.stderr)
        return found

    start = low + 0.6 * (high - low)
    found = least_squares(errors, start, bounds=(low, high), x_scale=high - low, diff_step=1e-3)
    for key, value in zip(keys, found.x, strict=True):
        print(f"{key} = {value:.4f}")
    for row, error in zip(rows, found.fun, strict=True):
        print(f"{row.name:40}{np.exp(error) - 1:+8.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
