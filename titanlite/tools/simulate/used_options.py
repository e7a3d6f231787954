"""Options that were given, but that no simulation of a run has used, are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from titanlite.tools.simulate.result import Simulation
from titanlite.tools.simulate.work import SimulationError

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
    used = {"group_size"} if simulation.title.endswith("LoopedPipeline") else set()
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
