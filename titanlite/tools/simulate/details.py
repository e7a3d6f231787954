"""What makes a simulation differ from the default one, in words: the end of its picture's title."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titanlite.schedule.actions import Schedule
from titanlite.tools.simulate.costs import Costs
from titanlite.tools.simulate.exact import simplest
from titanlite.tools.simulate.network import Link
from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.priority import PRIORITIES
from titanlite.tools.simulate.quantity import show_size, show_time

_MOST_VALUES = 6


def details(plan: Plan, priority: Any, order: Any, needs: Any) -> Iterator[str]:
    """The arguments of `simulate` that are not the default, a few words each."""
    if order is not None and not isinstance(getattr(order, "__self__", None), Schedule):
        yield _named("order", order)
    if priority is not None:
        known = next((n for n, make in PRIORITIES.items() if isinstance(priority, make)), None)
        yield f"priority {known}" if known else _named("priority", priority)
    if plan.max_in_flight is not None:
        yield f"{_values(plan.max_in_flight)} in flight"
    if order is None and any(plan.is_split):
        yield "split backward"
    if needs is not None:
        yield _named("needs", needs)
    yield from _cost_details(plan)


def _cost_details(plan: Plan) -> Iterator[str]:
    costs, tick_costs = plan.costs, plan.tick_costs

    def time(value: Any) -> str:
        return show_time(value, costs.time_unit)

    def size(value: Any) -> str:
        return show_size(value, costs.size_unit)

    for name, default in (("forward", 1), ("backward", 2), ("weight_gradient", None)):
        values = [tick_costs.ticks.time(ticks) for ticks in getattr(tick_costs, name)]
        is_default = getattr(costs, name) is None if default is None else set(values) == {default}
        if not is_default:
            yield f"{name.replace('_', ' ')} {_values(values, time)}"
    if costs.activation_units:
        yield f"activations {size(costs.activation_units)}"
    if any(tick_costs.weight_units):
        yield f"weights {_values([simplest(units) for units in tick_costs.weight_units], size)}"
    for name in ("gradient", "optimizer", "kept"):
        if getattr(costs, f"{name}_units") not in (None, 0):
            sizes = costs.per_stage(f"{name}_units", plan.num_stages)[0]
            yield f"{name} {_values([simplest(units) for units in sizes], size)}"
    network = costs.network
    if network is not None:
        yield from _link_details("", network.between, costs)
        if network.inside is not None:
            yield f"nodes of {network.workers_per_node}"
            yield from _link_details("inside ", network.inside, costs)
    if not costs.overlap_transfers:
        yield "no overlap"
    if costs.prefetch != 1:
        yield f"prefetch {costs.prefetch}"
    if not costs.fetch_contention:
        yield "fetches at once"
    if costs.reduce_gradients:
        yield "gradients reduced"


def _link_details(where: str, link: Link, costs: Costs) -> Iterator[str]:
    if link.latency_seconds:
        yield f"{where}latency {show_time(link.seconds(0), costs.time_unit)}"
    if link.seconds_per_unit and costs.time_unit and costs.size_unit:
        yield f"{where}{show_size(1 / float(link.seconds_per_unit), costs.size_unit)}/s"
    elif link.seconds_per_unit:
        yield f"{where}{float(link.seconds_per_unit):g} per unit"


def _values(values: Sequence[Any], show: Callable[[Any], str] = str) -> str:
    """One value if all are equal, all of a few, or the range of many."""
    if len(set(values)) == 1:
        return show(values[0])
    if len(values) <= _MOST_VALUES:
        return " ".join(map(show, values))
    return f"{show(min(values))} to {show(max(values))}"


def _named(what: str, function: Callable[..., Any]) -> str:
    """An argument with its function's name, if that says more than the argument."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{what} of your own" if name in ("<lambda>", what) else f"{what} {name}"
