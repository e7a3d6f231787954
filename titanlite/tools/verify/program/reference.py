"""On one process: runs the plain model and records every step.

Each step's tensors go into one file, which every rank maps into memory and compares with its parts.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from titanlite import pickles
from titanlite.ranks.world import World
from titanlite.tools.verify.inspect_model import narrowed_in
from titanlite.tools.verify.outputs import Outputs
from titanlite.tools.verify.program.building import Built, build, cast, in_dtype
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.record import Fit, ModelRun, ReferenceStep, Shares
from titanlite.tools.verify.shares import LEFT
from titanlite.tools.verify.step_files import load, store
from titanlite.tools.verify.subject import HeldPart, Subject
from titanlite.tools.verify.tracing import fit

# Module outputs, and as much for their gradients, are kept up to this total per step.
MOST_OUTPUT_BYTES = 1 << 29


def run_model(world: World, packed: bytes, folder: str) -> ModelRun:
    """Train the reference on every batch and write a record of each step into `folder`."""
    request: Request = pickles.loads(packed)
    try:
        with in_dtype(request.dtype):
            return _run(build(request, None, is_reference=True), folder)
    finally:
        gc.collect()


def _run(built: Built, folder: str) -> ModelRun:
    request, model = built.request, built.modules[0]
    names: dict[int, list[str]] = {}
    held: dict[str, HeldPart] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(built.name_of(model, name))
        held[built.name_of(model, name)] = HeldPart(parameter.shape, parameter)
    tied = tuple(tuple(own) for own in names.values() if len(own) > 1)
    subject = Subject(
        held, built.optimizer, built.modules, [True], name_of=built.name_of, is_job=False
    )
    store({"weights": subject.whole_weights()}, folder, 0)
    record = ModelRun([ReferenceStep()], tied=tied)
    # A model that draws random numbers must not draw the same ones in each run.
    torch.manual_seed(time.monotonic_ns() % 2**32)
    for step, given in enumerate(request.batches, 1):
        batch = cast(given, request.dtype)
        if step == 1 and request.dtype == "float64":
            # The run that finds them leaves no trace.
            with torch.random.fork_rng():
                record.narrowed = narrowed_in(model, functools.partial(request.loss, model, batch))
        with subject.recorded() if request.modules else nullcontext(Outputs()) as kept:
            loss = built.run_step(batch) or 0.0
        own = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sum((g.double() ** 2).sum().item() for g in own) ** 0.5
        gradients = subject.whole_gradients()
        clipped = built.clip()
        built.optimizer.step()
        outputs, record.num_left_out = kept.up_to(MOST_OUTPUT_BYTES)
        of_outputs = {call: kept.gradients_of(call) for call in outputs}
        found = {
            "gradients": gradients,
            **subject.whole_tensors(),
            "outputs": outputs,
            "output_gradients": {n: found for n, found in of_outputs.items() if found},
        }
        store(found, folder, step)
        record.modules = record.modules or tuple(outputs)
        record.steps.append(ReferenceStep(loss, clipped if request.clip else norm))
        built.optimizer.zero_grad(set_to_none=True)
    return record


def find_shares(
    world: World, packed: bytes, folder: str, step: int, files: Sequence[str]
) -> tuple[dict[int, dict[str, Fit]], Shares]:
    """Write wrong gradients as weighted sums of the gradients of the ranks' parts of the batch.

    `files` are those of the ranks (code_trace.py). Returns these sums by rank and name, relative to
    the reference's own, and each part's share of the whole mean.
    """
    request: Request = pickles.loads(packed)
    saved = [torch.load(file, weights_only=False) for file in files]
    with in_dtype(request.dtype):
        built = build(request, None, is_reference=True)
        model = built.modules[0]
        before, record = load(folder, step - 1), load(folder, step)
        with built.parameters() as parameters, torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before["weights"][name])
        parts = {file["digest"]: file["batch"] for file in saved}
        of_parts: dict[str, list[Tensor]] = {}
        for part in parts.values():
            built.run_step(part)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    of_parts.setdefault(name, []).append(parameter.grad.detach().flatten())
            model.zero_grad(set_to_none=True)
    fits: dict[int, dict[str, Fit]] = {file["rank"]: {} for file in saved}
    shares: Shares = ()
    for name, gradients in of_parts.items():
        whole = record["gradients"][name].flatten()
        known = fit(gradients, whole, whole) if len(gradients) == len(parts) else None
        if known is None or known[1] > LEFT or not all(known[0]):
            continue
        shares = shares or tuple(one / sum(known[0]) for one in known[0])
        for file in saved:
            if name in file["gradients"]:
                own, elements = file["gradients"][name]
                found = fit([one[elements] for one in gradients], own, whole[elements])
                if found is not None:
                    relative = (a / b for a, b in zip(found[0], known[0], strict=True))
                    fits[file["rank"]][name] = tuple(relative), found[1]
    gc.collect()
    return fits, shares
