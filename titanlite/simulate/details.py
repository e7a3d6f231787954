"""What makes a simulation differ from the default one, in words: the end of its picture's title."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titanlite.schedule.actions import Schedule
from titanlite.simulate.engine import Plan
from titanlite.simulate.exact import simplest
from titanlite.simulate.network import Link
from titanlite.simulate.priority import PRIORITIES

_MOST_VALUES = 6


def details(plan: Plan, priority: Any = None, order: Any = None, needs: Any = None) -> list[str]:
    """The arguments of `simulate` that are not the default, a few words each."""
    return [*_order_details(plan, priority, order, needs), *_cost_details(plan)]


def _order_details(plan: Plan, priority: Any, order: Any, needs: Any) -> Iterator[str]:
    if order is not None and not isinstance(getattr(order, "__self__", None), Schedule):
        yield f"order {_name(order)}"
    if priority is not None:
        known = next((n for n, make in PRIORITIES.items() if isinstance(priority, make)), None)
        yield f"priority {known or _name(priority)}"
    if plan.max_in_flight is not None:
        yield f"{_values(plan.max_in_flight)} in flight"
    if order is None and any(plan.is_split):
        yield "split backward"
    if needs is not None:
        yield f"needs {_name(needs)}"


def _cost_details(plan: Plan) -> Iterator[str]:
    costs, ticks = plan.costs, plan.tick_costs
    for name, default in (("forward", 1), ("backward", 2), ("weight_gradient", None)):
        values = [ticks.ticks.time(value) for value in getattr(ticks, name)]
        is_default = getattr(costs, name) is None if default is None else set(values) == {default}
        if not is_default:
            yield f"{name.replace('_', ' ')} {_values(values)}"
    if costs.activation_units:
        yield f"activations {float(costs.activation_units):g}"
    if any(ticks.weight_units):
        yield f"weights {_values([simplest(units) for units in ticks.weight_units])}"
    network = costs.network
    if network is not None:
        yield from _link_details("", network.between)
        if network.inside is not None:
            yield f"nodes of {network.workers_per_node}"
            yield from _link_details("inside ", network.inside)
    if not costs.overlap_transfers:
        yield "no overlap"
    if costs.prefetch != 1:
        yield f"prefetch {costs.prefetch}"
    if costs.reduce_gradients:
        yield "gradients reduced"


def _link_details(where: str, link: Link) -> Iterator[str]:
    if link.latency_seconds:
        yield f"{where}latency {float(link.latency_seconds):g}"
    if link.seconds_per_unit:
        yield f"{where}{float(link.seconds_per_unit):g} per unit"


def _values(values: Sequence[Any]) -> str:
    """One value if all are equal, all of a few, or the range of many."""
    shown = [f"{float(value):g}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    if len(shown) <= _MOST_VALUES:
        return " ".join(shown)
    return f"{float(min(values)):g} to {float(max(values)):g}"


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "of your own" if name == "<lambda>" else str(name)
