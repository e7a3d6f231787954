"""On a rank: what part of a wrong gradient comes back through each line of the caller's code.

The step is run once more for every line between a tensor and what is computed from it next. Each
time the gradient of what that line computes is set to zero; what is then missing in the gradient of
the tensor came back through this line. So it shows whether that part has to be summed over an axis,
or scaled, for all to be right.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from titanlite import pickles
from titanlite.ranks.world import World
from titanlite.tools.verify.program.gradient_modes import Lines
from titanlite.tools.verify.program.parallel import Measuring
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.record import ModelRun, Through, around, is_input, module_of
from titanlite.tools.verify.step_files import load
from titanlite.tools.verify.tracing import fit, gathered, sum_over_axes

# Of more lines between two tensors, the last.
MOST_LINES = 16


def gradients_through(
    world: World,
    packed: bytes,
    folder: str,
    record: ModelRun,
    step: int,
    event: str,
    until: Collection[str],
) -> list[Through]:
    """For each line between `event` and `until`, or the loss: what comes back through it.

    Every rank of the world must call this.
    """
    request: Request = pickles.loads(packed)

    def run(watch: Lines) -> list[tuple[Tensor, Tensor]]:
        measuring = Measuring(world, request, folder, record, traces=False, watched=step)
        measuring.through = watch
        measuring.run()
        return watch.gradients

    first = Lines(event, until)
    pairs = run(first)
    every = dict.fromkeys(key for of_rank in gathered(list(first.last)) for key in of_rank)
    # What modules between the two compute comes back through the lines that call them.
    module = module_of(event)
    outside = {*around(module), "", *[module] * is_input(event)}
    keys = [key for key in every if module_of(key[0]) in outside] or list(every)
    found = []
    for key in keys[-MOST_LINES:]:
        blocked = Lines(event, until, key, first.last.get(key, ""))
        without = run(blocked)
        own, rest, part = (
            torch.cat([one.double().flatten() for one in some] or [torch.zeros(0)])
            for some in ([o for o, _ in pairs], [o for o, _ in without], [p for _, p in pairs])
        )
        share = own - rest if own.shape == rest.shape else torch.zeros_like(own)
        shapes = gathered(tuple(own.shape) if len(own) else None)
        sums = sum_over_axes(blocked.subject, shapes, share.clone)
        arriving = first.arriving.get(key, [])
        arrived = sum(arriving, torch.zeros(()))
        is_there = gathered(tuple(arrived.shape) if arriving else None)
        whole = load(folder, step)["output_gradients"].get(event, [torch.zeros(())])[0]
        totals = sum_over_axes(blocked.subject, is_there, arrived.clone)
        found.append(
            Through(
                *key,
                function=first.functions.get(key, ""),
                arrived={a: fit([one], whole, whole) for a, one in totals.items()},
                digest=first.digests.get(key, ""),
                scales=tuple(
                    fit([rest, own - rest], part, part) if (own - rest).any() else None
                    for (own, part), (rest, _) in zip(pairs, without, strict=False)
                ),
                sums={axis: fit([rest + one], part, part) for axis, one in sums.items()},
            )
        )
    return found
