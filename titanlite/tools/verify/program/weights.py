"""What happened to weights that are wrong, though the gradients are right.

fingerprint      on a rank: are the weights those of the step before?
save_update      on a rank: its parts of the wrong weights, before and after the step
judge_updates    on one process: how often the reference's update that is, and whether it is that of
                 a shard, taken for the whole tensor
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titanlite import pickles
from titanlite.modules.shards import local_part
from titanlite.ranks.temporary import save_temporary
from titanlite.ranks.world import World
from titanlite.tools.verify.agreement import agreement, dense
from titanlite.tools.verify.evidence import WRONG
from titanlite.tools.verify.program.building import in_dtype, make_optimizer
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.record import Update
from titanlite.tools.verify.step_files import load
from titanlite.tools.verify.subject import LocalParts
from titanlite.tools.verify.wording import is_near, listed

# Larger weights are not looked at.
MOST_ELEMENTS = 1 << 24
# The epsilon in an update's divisor does not scale with it.
SCALED = 1e-4

Fingerprint = dict[str, tuple[float, float]]


def fingerprint(local: LocalParts) -> Fingerprint:
    """Two numbers for this rank's part of each weight, by which a change is seen."""
    found: Fingerprint = {}
    for name, one in local.items():
        own = local_part(one.parameter.detach()).double()
        found[name] = own.sum().item(), own.square().sum().item()
    return found


def changed(before: Fingerprint | None, after: Fingerprint | None) -> tuple[str, ...]:
    """The weights that are others; none if a fingerprint was not taken."""
    return tuple(name for name, own in (after or {}).items() if own != (before or {}).get(name))


def options_apart(
    own: Mapping[str, Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[str, ...]]:
    """For each parameter what the optimizer has otherwise for it than on one process, in words."""
    return {
        name: found
        for name, of_own in own.items()
        if (
            found := tuple(
                f"{option} {_shown(of_own[option])} instead of {_shown(value)}"
                for option, value in known.get(name, {}).items()
                if option in of_own and of_own[option] != value
            )
        )
    }


def _shown(value: Any) -> str:
    return (listed(value, 3) or "nothing") if isinstance(value, list) else str(value)


def save_update(path: Path, local: LocalParts, wrong: Sequence[str], folder: str, step: int) -> str:
    """Save this rank's parts of wrong weights for `judge_updates`; returns the file."""
    before, after = load(folder, step - 1)["weights"], load(folder, step)["weights"]
    parts: dict[str, tuple[Tensor, ...]] = {}
    num_elements = 0
    for name in sorted(wrong, key=lambda name: local[name].shape.numel()):
        one, gradient = local[name], local[name].parameter.grad
        num_elements += one.shape.numel()
        if num_elements > MOST_ELEMENTS:
            break
        # Where FSDP1 gathers parameters, it does not gather gradients.
        gradient = torch.empty(0) if gradient is None else dense(local_part(gradient.detach()))
        own = local_part(one.parameter.detach()), gradient
        parts[name] = (
            one.part_of(before[name]).clone(),
            one.part_of(after[name]).clone(),
            *(tensor.cpu().clone() for tensor in own),
            torch.tensor(own[0].numel() < one.shape.numel()),
        )
    save_temporary(parts, path)
    return str(path)


def judge_updates(
    world: World, packed: bytes, step: int, files: Sequence[str]
) -> list[dict[str, Update]]:
    """For each rank's file its wrong weights, and what the step did to them."""
    request: Request = pickles.loads(packed)
    with in_dtype(request.dtype):
        return [_judge(request, step, torch.load(file, weights_only=True)) for file in files]


def _stepped(
    request: Request, parts: Mapping[str, tuple[Tensor, ...]], share: int
) -> dict[str, Tensor]:
    """What a first step makes of parts that have a gradient, or of the first half of their rows."""
    alone = {}
    for name, (before, _, _, gradient, _) in parts.items():
        if gradient.shape == before.shape and before.ndim:
            rows = -(-len(before) // share)
            alone[name] = nn.Parameter(before[:rows].clone())
            alone[name].grad = gradient[:rows].to(before.dtype)
    if not alone or (optimizer := _optimizer_of(request, list(alone.values()))) is None:
        return {}
    optimizer.step()
    return {name: parameter.detach() for name, parameter in alone.items()}


def _optimizer_of(request: Request, some: list[nn.Parameter]) -> Any:
    """The optimizer of some parameters; None if the caller's function needs all of them."""
    with contextlib.suppress(Exception):
        return make_optimizer(request, some)
    return None


def _judge(
    request: Request, step: int, parts: Mapping[str, tuple[Tensor, ...]]
) -> dict[str, Update]:
    # Later the optimizer has a state, too.
    alone, halves = ((_stepped(request, parts, n) if step == 1 else {}) for n in (1, 2))
    found = {}
    for name, (before, known, own, _, is_shard) in parts.items():
        if own.shape == before.shape:
            fit = agreement(own - before, known - before, known - before)
            is_alone = bool(is_shard) and name in alone
            if is_alone:
                # What steps element by element gives the same for each part of a tensor.
                is_alone = agreement(own, alone[name], known).difference < WRONG
                is_alone = is_alone and not torch.equal(
                    halves[name], alone[name][: len(halves[name])]
                )
            is_wrong = (own - known).abs() > WRONG * known.abs().max()
            num_kept = 0 if (own - before)[is_wrong].any() else int(is_wrong.sum())
            num_zero = 0 if known[is_wrong].any() else int(is_wrong.sum())
            decay = agreement(own - known, before, before)
            scale = _scale(own - before, known - before, before)
            adam_step = None if scale is None else _adam_step(request, step, scale)
            found[name] = Update(
                *(fit, is_alone, decay, num_kept, num_zero),
                is_unchanged=torch.equal(known, before),
                scale=scale,
                adam_step=adam_step,
                scales=_scales_of_rows(own - before, known - before),
            )
    return found


def _scale(own: Tensor, known: Tensor, before: Tensor) -> float | None:
    """How often the change `known` of a weight is in `own`, beside a part of the weight itself."""
    if own.numel() < 4 or not (own - known).any():
        return None
    of_both = torch.stack([t.double().flatten() for t in (known, before)], 1)
    solved = torch.linalg.lstsq(of_both, own.double().flatten()[:, None], driver="gelsd").solution
    left = of_both @ solved - own.double().flatten()[:, None]
    return solved[0].item() if left.norm() < SCALED * own.norm() else None


def _scales_of_rows(own: Tensor, known: Tensor) -> tuple[float, ...]:
    """How often the change `known` of a weight is in each run of rows of `own`; () if it is not."""
    if not own.ndim or not own.numel():
        return ()
    a, b = (tensor.double().reshape(len(tensor), -1) for tensor in (own, known))
    scales = (a * b).sum(1) / (b * b).sum(1)
    if not (a - scales[:, None] * b).norm() < SCALED * a.norm():
        return ()
    runs = itertools.groupby(scales.tolist(), lambda scale: round(scale, 3))
    return tuple(scale for scale, _ in runs)


def _adam_step(request: Request, step: int, scale: float) -> int | None:
    """The other step of which Adam's bias correction gives this scale."""
    optimizer = _optimizer_of(request, [nn.Parameter(torch.zeros(1))])
    betas = getattr(optimizer, "defaults", {}).get("betas", ())
    if len(betas) != 2 or not all(isinstance(beta, float) for beta in betas):
        return None
    correction = {n: (1 - betas[1] ** n) ** 0.5 / (1 - betas[0] ** n) for n in range(1, step + 9)}
    near = [n for n in correction if is_near(scale, correction[n] / correction[step], SCALED)]
    return near[0] if near and near[0] != step else None
