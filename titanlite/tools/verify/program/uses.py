"""On one process: what each use of a parameter adds to its gradient.

A weight that is tied, or of a layer that runs several times, has the sum over its uses as gradient.
Each operator that reads it gets a view of its own, whose gradient is that of this use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from titanlite import pickles
from titanlite.ranks.world import World
from titanlite.tools.verify.caller_lines import FOREIGN, line_of_caller
from titanlite.tools.verify.program.building import build, clean_up, in_dtype
from titanlite.tools.verify.program.reference import load_parts
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.record import LEFT, Shares, UseFit
from titanlite.tools.verify.step_files import load
from titanlite.tools.verify.tracing import fit, residual

# Methods of a tensor for which a view is none, and the properties that give one.
OWN = ("register_", "requires_grad", "detach", "backward", "retain_grad")
VIEWS = ("T", "mT", "H", "mH")
# What else a gradient has, such as of a custom autograd function, is a use if it is larger.
LEAST = 1e-9


class Uses(TorchFunctionMode):
    """Inside, `lines` and `gradients` get each use of these parameters, in forward order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.names = {id(one): name for name, one in parameters.items()}
        self.lines: dict[str, list[str]] = defaultdict(list)
        self.gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            reads = getattr(func.__self__, "__name__", "") in VIEWS
        else:
            reads = not name.startswith(OWN) and name != "__set__"
        if reads and torch.is_grad_enabled():
            args, kwargs = tree_map(self._view, (args, kwargs))
        return func(*args, **kwargs)

    def _view(self, leaf: Any) -> Any:
        name = self.names.get(id(leaf))
        if name is None or not leaf.requires_grad:
            return leaf
        own, place = leaf.view_as(leaf), len(self.lines[name])
        self.lines[name].append(line_of_caller(FOREIGN))
        found = self.gradients[name]

        def keep(gradient: Tensor) -> None:
            found[place] = found.get(place, 0) + gradient.detach()

        own.register_hook(keep)
        return own

    def of(self, name: str, total: Tensor) -> dict[str, Tensor]:
        """The flat gradients of the uses of a parameter with this gradient, by place and line."""
        found = {f"{i} {self.lines[name][i]}": g for i, g in sorted(self.gradients[name].items())}
        rest = total - sum(found.values())
        found |= (
            {"- in an autograd function": rest}
            if rest.abs().max() > LEAST * total.abs().max()
            else {}
        )
        return {place: gradient.flatten() for place, gradient in found.items()}


def find_uses(
    world: World, packed: bytes, folder: str, step: int, files: Sequence[str], names: Sequence[str]
) -> dict[int, dict[str, UseFit]]:
    """For each rank the wrong gradients `names` that are sums of those of single uses.

    `files` are those of the ranks (code_trace.py).
    """
    request: Request = pickles.loads(packed)
    saved, parts = load_parts(files)
    with in_dtype(request.dtype):
        weights = load(folder, step - 1)["weights"]
        lines, of_uses = _contributions(request, weights, parts, names)
    clean_up()
    known, found = load(folder, step)["gradients"], {}
    totals = {
        n: [torch.stack(of_part).sum(0) for of_part in zip(*uses, strict=True)]
        for n, uses in of_uses.items()
    }
    wholes = (
        fit(one, known[name].flatten(), known[name].flatten()) for name, one in totals.items()
    )
    of_whole = next((one[0] for one in wholes if one and one[1] < LEFT and all(one[0])), ())
    for file in saved if of_whole else ():
        fits = found[file["rank"]] = dict[str, UseFit]()
        # Large ones first: they say of which uses smaller ones are sums.
        some = sorted(of_uses.keys() & file["gradients"].keys(), key=lambda n: -known[n].numel())
        for name in some:
            own, elements = file["gradients"][name]
            each = [
                [w * part[elements] for w, part in zip(of_whole, of_use, strict=True)]
                for of_use in of_uses[name]
            ]
            for uses in ([[torch.stack(of_use).sum(0)] for of_use in each], each):
                flat, right = [*chain(*uses)], known[name].flatten()[elements]
                others = [tuple(chain(*one.counts)) for one in fits.values()]
                if (counts := _counts(flat, own, right, others)) is not None:
                    of_each = zip(*[iter(counts)] * len(uses[0]), strict=True)
                    fits[name] = UseFit(tuple(lines[name]), tuple(of_each))
                    break
    return found


def _counts(
    parts: Sequence[Tensor], own: Tensor, right: Tensor, known: Sequence[Shares]
) -> Shares | None:
    """How often each of the parts is in a gradient, or as often as in another one; or None."""
    found = fit(parts, own, right)
    if found is not None:
        return found[0] if found[1] < LEFT else None
    for counts in known:
        if len(counts) == len(parts) and residual(parts, counts, own, right) < LEFT:
            return counts
    return None


def _contributions(
    request: Request, weights: Mapping[str, Tensor], parts: Sequence[Any], names: Sequence[str]
) -> tuple[dict[str, list[str]], dict[str, list[list[Tensor]]]]:
    """Parameter -> the lines of its uses, and of each use the gradient of each part of the batch.

    Only those that are used several times, in the same lines for each part.
    """
    built = build(request, None, is_reference=True)
    every: list[dict[str, dict[str, Tensor]]] = []
    with built.parameters() as parameters:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        # A hook of a parameter sees the sum alone.
        read = {n: p for n in names if (p := parameters.get(n)) is not None}
        for part in parts:
            built.modules[0].zero_grad(set_to_none=True)
            with Uses({n: p for n, p in read.items() if not p._backward_hooks}) as uses:
                built.run_step(part)
            every.append({name: uses.of(name, read[name].grad) for name in uses.gradients})
    first = {name: list(found) for name, found in every[0].items() if len(found) > 1}
    same = [n for n, own in first.items() if all(list(one.get(n, ())) == own for one in every)]
    lines = {name: [key.partition(" ")[2] for key in first[name]] for name in same}
    return lines, {
        name: [[one[name][key] for one in every] for key in first[name]] for name in same
    }
