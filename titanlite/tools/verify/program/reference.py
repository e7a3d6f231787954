"""On one process: runs the plain model and records every step.

Each step's tensors go into one file, which every rank maps into memory and compares with its parts.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from titanlite.ranks.world import World
from titanlite.tools.verify.inspect_model import narrowed_in
from titanlite.tools.verify.outputs import Outputs, recorded
from titanlite.tools.verify.program.batches import digest_of_batch
from titanlite.tools.verify.program.building import Built, build, cast, in_dtype
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.record import ReferenceStep
from titanlite.tools.verify.step_files import load, store

# Module outputs are kept up to this total per step.
MOST_OUTPUT_BYTES = 1 << 30


@dataclass
class ReferenceRecord:
    """The numbers of the reference's steps, the first of which is the start."""

    steps: list[ReferenceStep]
    modules: tuple[str, ...] = ()
    """Calls of modules in forward order."""
    narrowed: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of one parameter."""
    num_left_out: int = 0
    """The number of outputs that were too large to keep."""
    batches: list[str] = field(default_factory=list)
    """A digest of each batch."""


def run_reference(world: World, packed: bytes, folder: str) -> ReferenceRecord:
    """Train the reference on every batch and write a record of each step into `folder`."""
    request: Request = cloudpickle.loads(packed)
    try:
        with in_dtype(request.dtype):
            return _run(build(request, None, is_reference=True), folder)
    finally:
        gc.collect()


def _run(built: Built, folder: str) -> ReferenceRecord:
    request, model = built.request, built.modules[0]
    names: dict[int, list[str]] = {}
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(built.name_of(model, name))
        weights[built.name_of(model, name)] = parameter
    tied = tuple(tuple(own) for own in names.values() if len(own) > 1)
    store({"weights": _copies(weights)}, folder, 0)
    record = ReferenceRecord([ReferenceStep()], tied=tied)
    # A model that draws random numbers must not draw the same ones in each run.
    torch.manual_seed(time.monotonic_ns() % 2**32)
    for step, given in enumerate(request.batches, 1):
        batch = cast(given, request.dtype)
        record.batches.append(digest_of_batch(batch))
        if step == 1 and request.dtype == "float64":
            record.narrowed = _narrowed(built, model, batch)
        with _recorded(built) as kept:
            loss = built.run_step(batch) or 0.0
        gradients = {
            name: (p.grad if p.grad is not None else torch.zeros_like(p))
            for name, p in weights.items()
            if p.requires_grad
        }
        own = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sum((g.double() ** 2).sum().item() for g in own) ** 0.5
        gradients = _copies(gradients)
        clipped = built.clip()
        built.optimizer.step()
        outputs, of_outputs, record.num_left_out = _kept_outputs(kept)
        found = {
            "gradients": gradients,
            "weights": _copies(weights),
            "buffers": _copies(built.buffers),
            "state": _state(built, weights),
            "outputs": outputs,
            "output_gradients": of_outputs,
        }
        store(found, folder, step)
        record.modules = record.modules or tuple(outputs)
        record.steps.append(ReferenceStep(loss, clipped if request.clip else norm))
        built.optimizer.zero_grad(set_to_none=True)
    return record


def _recorded(built: Built) -> contextlib.AbstractContextManager[Outputs]:
    if not built.request.modules:
        return contextlib.nullcontext(Outputs())
    return recorded(built.modules, [True] * len(built.modules), built.name_of)


def _narrowed(built: Built, model: nn.Module, batch: Any) -> tuple[str, ...]:
    """The modules that round to a narrower dtype; the run that finds them leaves no trace."""
    before = _copies(dict(model.named_buffers()))
    with torch.random.fork_rng():
        found = narrowed_in(model, lambda: built.request.loss(model, batch))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before:
                buffer.copy_(before[name])
    return found


def _kept_outputs(kept: Outputs) -> tuple[dict[str, Any], dict[str, Any], int]:
    outputs: dict[str, list[Tensor]] = {}
    gradients: dict[str, list[Tensor]] = {}
    num_bytes = left_out = 0
    for call, tensors in kept.first.items():
        num_bytes += 2 * sum(t.numel() * t.element_size() for t in tensors)
        if num_bytes > MOST_OUTPUT_BYTES:
            left_out += 1
            continue
        outputs[call] = tensors
        of_call = kept.gradients_of(call)
        if of_call is not None:
            gradients[call] = of_call
    return outputs, gradients, left_out


def _state(built: Built, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = built.optimizer.state
    return {
        f"{name}.{key}": value.detach().cpu().clone()
        for name, parameter in weights.items()
        for key, value in state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


PartShares = dict[int, dict[str, tuple[tuple[float, ...], float]]]
"""Rank -> gradient -> the weight of each part's own gradient in it, and the relative residual."""


def find_shares(
    world: World, packed: bytes, folder: str, step: int, files: Sequence[str]
) -> tuple[PartShares, dict[str, tuple[tuple[float, ...], float]]]:
    """Write wrong gradients as weighted sums of the gradients of the ranks' parts of the batch.

    `files` are those of the ranks (tracing.py), one per distinct part first. Also returns the
    weights that the reference's own gradients have.
    """
    request: Request = cloudpickle.loads(packed)
    saved = [torch.load(file, weights_only=False) for file in files]
    with in_dtype(request.dtype):
        built = build(request, None, is_reference=True)
        model = built.modules[0]
        before, record = load(folder, step - 1), load(folder, step)
        with built.parameters() as parameters, torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before["weights"][name])
        parts = {file["digest"]: file["batch"] for file in saved}
        cells: dict[str, list[Tensor]] = {}
        for part in parts.values():
            built.run_step(part)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    cells.setdefault(name, []).append(parameter.grad.detach().double().flatten())
            model.zero_grad(set_to_none=True)
    shares: PartShares = {}
    for file in saved:
        of_rank = shares.setdefault(file["rank"], {})
        for name, (own, elements) in file["gradients"].items():
            if len(cells.get(name, ())) == len(parts):
                chosen = torch.stack([cell[elements] for cell in cells[name]], 1)
                fit = _fit(chosen, own.double())
                if fit is not None:
                    of_rank[name] = fit
    expected = {}
    for name in {name for of_rank in shares.values() for name in of_rank}:
        fit = _fit(torch.stack(cells[name], 1), record["gradients"][name].double().flatten())
        if fit is not None:
            expected[name] = fit
    gc.collect()
    return shares, expected


def _fit(cells: Tensor, own: Tensor) -> tuple[tuple[float, ...], float] | None:
    if len(own) < 2 * cells.size(1) or not own.isfinite().all() or not own.norm():
        return None
    weights = torch.linalg.lstsq(cells, own[:, None], driver="gelsd").solution[:, 0]
    left = ((cells @ weights - own).norm() / own.norm()).item()
    return tuple(weights.tolist()), left
