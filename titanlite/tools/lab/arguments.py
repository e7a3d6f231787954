"""The options of experiments: the keyword parameters of their functions, as `--name value`.

An option that an experiment does not have is an error, not ignored.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from titanlite.tools.lab.table import Table

Experiment = Callable[..., Table]

MEANINGS = {
    "world": "number of ranks",
    "num_bytes": "size of the tensor",
    "repeats": "how often to measure",
    "latency_seconds": "latency of the links between ranks",
    "bytes_per_second": "bandwidth of the links between ranks; 0: that of this machine",
    "flops_per_second": "FLOP/s of each device; 0: those of this machine",
    "num_microbatches": "number of microbatches",
    "num_tokens": "number of tokens in the batch or sequence",
    "num_experts": "number of experts",
    "top_k": "experts per token",
    "pp": "number of pipeline stages",
    "x": "devices on the axis x",
    "y": "devices on the axis y",
}


def option(parameter: str) -> str:
    """The option of a parameter: `--bytes` for num_bytes."""
    return "--" + parameter.removeprefix("num_").replace("_", "-")


def parameters(experiment: Experiment) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(experiment).parameters


def add_options(parser: argparse.ArgumentParser, experiments: Mapping[str, Experiment]) -> None:
    """Add every option that an experiment has, with the experiments that have it."""
    users: dict[str, list[str]] = {}
    kinds: dict[str, type] = {}
    for name, experiment in experiments.items():
        for parameter in parameters(experiment).values():
            users.setdefault(parameter.name, []).append(f"{name} ({parameter.default})")
            kinds[parameter.name] = type(parameter.default)
    group = parser.add_argument_group(
        "options of experiments", "in parentheses: the experiments that have one, and its default"
    )
    for name, where in users.items():
        group.add_argument(
            option(name),
            dest=name,
            type=_count if kinds[name] is int else _amount,
            default=argparse.SUPPRESS,
            metavar="N" if kinds[name] is int else "X",
            help=f"{MEANINGS[name]}: {', '.join(where)}",
        )


def refused(name: str, experiment: Experiment, given: Mapping[str, Any]) -> str | None:
    """An error message for the first option that the experiment does not have."""
    known = parameters(experiment)
    for parameter in given:
        if parameter not in known:
            has = ", ".join(map(option, known)) or "no options"
            return f"{option(parameter)}: {name} has no such option; it has {has}"
    return None


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
