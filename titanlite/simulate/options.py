"""Read and check options of a command: which were given, numbers, names of output files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from titanlite.simulate.result import Simulation
from titanlite.simulate.work import SimulationError

LEAST_WIDTH = 30


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which tells which options were given."""

    def error(self, message: str) -> NoReturn:
        raise SimulationError(message.removeprefix("argument "))

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
        """All options, and the spelling of those that were given, by name."""
        defaults = vars(self.parse_args([]))
        unset = object()
        found = self.parse_args(arguments, argparse.Namespace(**dict.fromkeys(defaults, unset)))
        values = {name: value for name, value in vars(found).items() if value is not unset}
        spelled = {a.dest: a.option_strings[-1] for a in self._actions if a.option_strings}
        given = {name: spelled[name] for name in values if name in spelled}
        return argparse.Namespace(**{**defaults, **values}), given

    def type_of(self, name: str) -> Callable[[str], object] | None:
        """How one value of the option is read; None if it takes none."""
        for action in self._actions:
            if action.dest == name and action.nargs != 0:
                if action.choices is not None:
                    return _chosen_from(list(action.choices))
                return action.type if callable(action.type) else str
        return None


def whole(text: str) -> int:
    """An integer, for an option's type."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def characters(text: str) -> int:
    """The width of a picture in the terminal, for an option's type."""
    if whole(text) < LEAST_WIDTH:
        raise argparse.ArgumentTypeError(f"{text} is too narrow; give at least {LEAST_WIDTH}")
    return whole(text)


def _chosen_from(choices: Collection[str]) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return choose


def check_outputs(options: argparse.Namespace, extensions: Mapping[str, Sequence[str]]) -> None:
    """Raise SimulationError unless the files of the options in `extensions` can be written."""
    for name, known in extensions.items():
        file = getattr(options, name)
        if file is None:
            continue
        path = Path(file)
        if path.suffix.lower() not in known:
            raise SimulationError(f"--{name}: the name {file!r} must end in {' or '.join(known)}")
        if path.is_dir():
            raise SimulationError(f"--{name}: {file} is a folder; give a file")
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise SimulationError(f"--{name}: {file} cannot be written: {folder} is no folder")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise SimulationError(f"--{name}: {file} cannot be written (no permission)")


# Why an option of one run has no effect, if no simulation uses it.
UNUSED = {
    "group_size": "only LoopedPipeline and FSDPLoopedPipeline have groups",
    "weight_gradient": "no backward pass is split; --split-backward splits those of a strategy",
    "latency": "nothing is sent",
    "time_per_unit": "nothing is sent that has a size; --activation-units and --weight-units give "
    "sizes",
    "workers_per_node": "links inside a node are as all others; --inside-latency and "
    "--inside-time-per-unit change them",
    "inside_latency": "no two workers are in one node; --workers-per-node gives their number",
    "inside_time_per_unit": "no two workers are in one node, or nothing sent has a size",
    "overlap": "nothing is sent that takes time",
    "bandwidth": "nothing is sent that has a size; --activation-units and --weight-units give "
    "sizes",
    "inside_bandwidth": "no two workers are in one node, or nothing sent has a size",
    "prefetch": "no weights are fetched that take time",
    "fetch_contention": "no weights are fetched that take time",
    "reduce_gradients": "no stage has several workers and a size; --weight-units gives it one",
}


def check_used(given: Mapping[str, str], used: Collection[str], schemes: Collection[str]) -> None:
    """Raise SimulationError for an option that was given, but that no simulation has used."""
    for name, option in given.items():
        if name in UNUSED and name not in used:
            names = ", ".join(dict.fromkeys(schemes))
            raise SimulationError(f"{option}: has no effect on {names}: {UNUSED[name]}")


def used_options(simulation: Simulation) -> set[str]:
    """Those of UNUSED that a simulation depends on."""
    costs = simulation.costs
    used = {"group_size"} if simulation.title in GROUPED else set()
    if simulation.is_split:
        used.add("weight_gradient")
    network = costs.network
    if network is None:
        return used
    sends, fetches = any(simulation.activation_transmissions), any(simulation.weight_transmissions)
    sized = any(costs.per_stage("weight_units", simulation.num_stages)[0])
    if sends:
        used |= {"latency", "overlap"}
    if (sends and costs.activation_units) or (sized and (fetches or simulation.reductions)):
        used |= {"time_per_unit", "bandwidth"}
    if sized and fetches:
        used |= {"latency", "prefetch", "fetch_contention"}
    if simulation.reductions:
        used |= {"latency", "overlap", "reduce_gradients"}
    if network.workers_per_node > 1 and network.inside is not None:
        inside = {"latency", "time_per_unit", "bandwidth"} & used
        used |= {"workers_per_node", *(f"inside_{name}" for name in inside)}
    return used


GROUPED = ("LoopedPipeline", "FSDPLoopedPipeline")
