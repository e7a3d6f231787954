"""Published step times against predicted ones.

    python -m tests.benchmarks.published [--fit]

published_megatron.py has the runs on A100, published_llama.py those on H100 and H200. The rows of
the fitted figures are Korthikanti et al. 2022, table 5, and TorchTitan's Llama 3 8B in bfloat16.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tests.benchmarks import published_llama
from tests.benchmarks.published_llama import FITTED, PREDICTED, RINGS, TITAN
from tests.benchmarks.published_megatron import (
    KORTHIKANTI,
    KORTHIKANTI_ACTIVATIONS,
    NARAYANAN,
    kept_activation_bytes,
    korthikanti_runs,
    predict_narayanan,
    step_seconds,
)
from titanlite.tools.planner.hardware import Hardware, load_hardware

# The figures of the A100 that are fitted, with their bounds.
A100_FIGURES = {
    "products.share": (0.6, 1.0),
    "memory.share": (0.4, 0.95),
    "node.share": (0.4, 0.95),
}


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


LLAMA_FIGURES = {"products.share": (0.3, 1.0), "memory.share": (0.4, 0.95)}


def fit(
    hardware: Hardware,
    bounds: dict[str, tuple[float, float]],
    ratios: Callable[[Hardware], list[float]],
) -> dict[str, float]:
    """The figures with the least squares of the logarithms of predicted over published."""
    import numpy as np
    from scipy.optimize import least_squares

    keys = list(bounds)
    low, high = (np.array([bounds[key][side] for key in keys]) for side in (0, 1))

    def errors(values: Any) -> Any:
        figures = dict(zip(keys, map(float, values), strict=True))
        return np.log(ratios(with_figures(hardware, figures)))

    start = low + 0.6 * (high - low)
    found = least_squares(errors, start, bounds=(low, high), x_scale=high - low, diff_step=1e-3)
    return dict(zip(keys, map(float, found.x), strict=True))


def show(title: str, rows: Iterable[tuple[str, float, float]]) -> None:
    """A table of (name, published, predicted)."""
    print(title)
    errors = []
    for name, published, predicted in rows:
        errors.append(abs(predicted / published - 1))
        print(f"  {name:28}{published:9.5g}{predicted:9.4g}{predicted / published - 1:+8.1%}")
    print(f"  mean error {statistics.fmean(errors):.1%}, worst {max(errors):.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the figures again")
    arguments = parser.parse_args()
    a100, titan = load_hardware("a100"), load_hardware(TITAN)
    runs = korthikanti_runs()
    if arguments.fit:
        of_a100 = fit(a100, A100_FIGURES, lambda of: [step_seconds(run, of) / s for run, s in runs])
        of_titan = fit(
            titan,
            LLAMA_FIGURES,
            lambda of: [published_llama.predict(row, of) / row.published for row in FITTED],
        )
        print(of_a100, of_titan)
        a100, titan = with_figures(a100, of_a100), with_figures(titan, of_titan)
    show(
        "A100, fitted: Korthikanti et al. 2022, table 5, seconds a step",
        (
            (f"{run.name}, {'full' if run.recomputes else 'selective'}", s, step_seconds(run, a100))
            for run, s in runs
        ),
    )
    narayanan = ((predict_narayanan(run, a100), measured) for run, measured in NARAYANAN)
    show(
        "A100, predicted: Narayanan et al. 2021, table 1, TFLOP/s of a GPU",
        (
            (f"{best.name}, microbatch {best.microbatch}", measured, predicted)
            for (best, predicted), measured in narayanan
        ),
    )
    show(
        "Korthikanti et al. 2022: GiB of activations",
        (
            (
                f"{run.name}, {'less' if saves else 'all'} kept",
                KORTHIKANTI_ACTIVATIONS[run.name][saves],
                kept_activation_bytes(run, saves_memory=saves) / 2**30,
            )
            for run, *_ in KORTHIKANTI
            for saves in (False, True)
        ),
    )
    show(
        "H100, fitted: TorchTitan, tokens/s of a GPU",
        ((row.name, row.published, published_llama.predict(row, titan)) for row in FITTED),
    )
    for title, rows in (
        ("H100 and H200, predicted: TorchTitan, tokens/s; Llama 3, TFLOP/s of a GPU", PREDICTED),
        ("H100, predicted: TorchTitan's context parallelism, tokens/s", RINGS),
        (
            "the same, if it had titanlite's ring",
            [replace(row, has_torch_ring=False) for row in RINGS],
        ),
        (
            "the same as the first, if the ring were not balanced",
            [published_llama.unbalanced(row) for row in RINGS],
        ),
    ):
        show(title, ((row.name, row.published, published_llama.predict(row)) for row in rows))


if __name__ == "__main__":
    main()
