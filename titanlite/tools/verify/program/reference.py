"""On one process: runs the plain model and records every step.

Each step's tensors go into one file, which every rank maps into memory and compares with its parts.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from titanlite import pickles
from titanlite.ranks.world import World
from titanlite.tools.verify.agreement import agreement, dense
from titanlite.tools.verify.events import Events, OperatorWatch
from titanlite.tools.verify.inspect_model import watched
from titanlite.tools.verify.program.batches import check_batches
from titanlite.tools.verify.program.building import Built, build, cast, clean_up, in_dtype
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.program.saved import watching_saved
from titanlite.tools.verify.program.weights import changed, fingerprint
from titanlite.tools.verify.record import (
    LEFT,
    Fit,
    ModelRun,
    PartFits,
    ReferenceStep,
    ReferenceTrace,
    Shares,
    WrongRows,
)
from titanlite.tools.verify.step_files import load, store
from titanlite.tools.verify.subject import LocalPart, Subject
from titanlite.tools.verify.tracing import TOLERANCES, fit, residual

# Module outputs, and as much for their gradients, are kept up to this total per step.
MOST_OUTPUT_BYTES = 1 << 29
# Parameters of one shape whose gradients are told apart.
MOST_MIXED = 8


def run_model(
    world: World, packed: bytes, folder: str, watched: int | None = None, module: str = ""
) -> ModelRun:
    """Train the reference on every batch and write a record of each step into `folder`.

    With `watched`, only up to this step; the values of the caller's lines in it are saved, too, and
    what modules return if the weights of this module, or all, are those of before the last update.
    """
    request: Request = pickles.loads(packed)
    check_batches(request.batches, request.split)
    try:
        with in_dtype(request.dtype):
            return _run(build(request, None, is_reference=True), folder, watched, module)
    finally:
        clean_up()


def _run(built: Built, folder: str, watched_step: int | None, module: str) -> ModelRun:
    request, model = built.request, built.modules[0]
    names: dict[int, list[str]] = {}
    local: dict[str, LocalPart] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(built.name_of(model, name))
        local[built.name_of(model, name)] = LocalPart(parameter.shape, parameter)
    tied = tuple(tuple(own) for own in names.values() if len(own) > 1)
    subject = Subject(
        local, built.optimizer, built.modules, [True], name_of=built.name_of, is_job=False
    )
    store({"weights": subject.whole_weights()}, folder, 0)
    record = ModelRun([ReferenceStep()], tied=tied)
    after = fingerprint(local)
    # A model that draws random numbers must not draw the same ones in each run.
    torch.manual_seed(time.monotonic_ns() % 2**32)
    for step, given in enumerate(request.batches, 1):
        batch = cast(given, request.dtype)
        kept = Events(finds_flow=step == 1)
        kept.at_start = functools.partial(fingerprint, local)
        with contextlib.ExitStack() as exits:
            narrowed: Collection[str] = ()
            if step == 1 and request.dtype == "float64":
                narrowed = exits.enter_context(watched(model))
            if request.modules:
                exits.enter_context(subject.recorded(kept))
            if step == watched_step:
                exits.enter_context(OperatorWatch(kept, keeps_values=True))
                exits.enter_context(watching_saved(kept))
            loss = built.run_step(batch) or 0.0
        record.changed[step] = changed(after, kept.start)
        record.accumulated[step] = dict(kept.accumulated)
        own = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sum((dense(g).double() ** 2).sum().item() for g in own) ** 0.5
        gradients = subject.whole_gradients()
        clipped, rate = built.clip(), built.rate
        of_step = Events()
        with contextlib.ExitStack() as exits:
            by_optimizer: Collection[str] = ()
            if step == 1:
                by_optimizer = exits.enter_context(watched(model, "the optimizer"))
            if watched_step in (step, step + 1):
                exits.enter_context(OperatorWatch(of_step, keeps_values=True))
            built.optimizer.step()
        if watched_step in (step, step + 1):
            of_step.values.save(folder, f"optimizer{step}")
        after = fingerprint(local)
        outputs, num_left_out = kept.up_to(MOST_OUTPUT_BYTES)
        of_outputs = {call: kept.gradients_of(call) for call in outputs}
        found: dict[str, dict[str, Any]] = {
            "gradients": gradients,
            **subject.whole_tensors(),
            "options": subject.options(),
            "outputs": outputs,
            "output_gradients": {n: found for n, found in of_outputs.items() if found},
        }
        store(found, folder, step)
        if step == watched_step:
            kept.values.save(folder)
            if step > 1:
                _store_outdated(built, local, subject, folder, step, module, batch)
            break
        if step == 1:
            record.narrowed = (*narrowed, *by_optimizer) if request.dtype == "float64" else ()
            record.trace = ReferenceTrace(
                tuple(outputs),
                flow={name: tuple(sources) for name, sources in kept.flow.items()},
                with_gradient=frozenset(found["output_gradients"]),
                evaluating=frozenset(kept.evaluating),
            )
        record.trace.num_left_out = num_left_out
        record.steps.append(ReferenceStep(loss, clipped if request.clip else norm, rate))
        built.optimizer.zero_grad(set_to_none=True)
    return record


def _store_outdated(
    built: Built,
    local: Mapping[str, LocalPart],
    subject: Subject,
    folder: str,
    step: int,
    module: str,
    batch: Any,
) -> None:
    """Store what modules return if those in `module` have weights of before the last update."""
    before, now = (load(folder, step - n)["weights"] for n in (2, 1))

    def put(*_: Any) -> None:
        for name, one in local.items():
            if not module or name.startswith(f"{module}."):
                one.parameter.data.copy_(before[name])

    for name, one in local.items():
        one.parameter.data.copy_(now[name])
    put()
    # What sets weights in the step itself, as an average does, has done so before.
    with subject.recorded(Events()) as old, _before_call(built, module, put):
        built.run_step(batch)
    store({"outputs": old.up_to(MOST_OUTPUT_BYTES)[0]}, folder, -step)


@contextlib.contextmanager
def _before_call(built: Built, name: str, do: Callable[..., None]) -> Iterator[None]:
    """Inside, each call of the module with this name begins with `do`."""
    model = built.modules[0]
    modules = {built.name_of(model, own): one for own, one in model.named_modules()}
    handle = modules[name].register_forward_pre_hook(do) if modules.get(name) else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def find_shares(
    world: World, packed: bytes, folder: str, step: int, files: Sequence[str], count: int = 1
) -> PartFits:
    """Write wrong gradients as weighted sums of the gradients of the ranks' parts of the batch.

    `files` are those of the ranks (code_trace.py). Each part is cut into `count` microbatches along
    dimension 0.
    """
    request: Request = pickles.loads(packed)
    saved, parts = load_parts(files, count)
    with in_dtype(request.dtype):
        built = build(request, None, is_reference=True)
        model = built.modules[0]
        before, record = load(folder, step - 1), load(folder, step)
        with built.parameters() as parameters, torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before["weights"][name])
        of_parts: dict[str, list[Tensor]] = {}
        for part in parts:
            built.run_step(part)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    of_parts.setdefault(name, []).append(parameter.grad.detach().flatten())
            model.zero_grad(set_to_none=True)
    fits: dict[int, dict[str, Fit]] = {file["rank"]: {} for file in saved}
    of_whole: Shares = ()
    for name, gradients in of_parts.items():
        whole = record["gradients"][name].flatten()
        known = fit(gradients, whole, whole) if len(gradients) == len(parts) else None
        if known is None or known[1] > LEFT or not all(known[0]):
            continue
        of_whole = of_whole or known[0]
        for file in saved:
            if name in file["gradients"]:
                own, elements = file["gradients"][name]
                found = fit([one[elements] for one in gradients], own, whole[elements])
                if found is not None:
                    relative = (a / b for a, b in zip(found[0], known[0], strict=True))
                    fits[file["rank"]][name] = tuple(relative), found[1]
    for file in saved:
        _add_undetermined(fits[file["rank"]], file["gradients"], of_parts, of_whole, record)
    clean_up()
    rows = {
        file["rank"]: _wrong_rows(
            file["gradients"], record["gradients"], of_parts, of_whole, request.batches[step - 1]
        )
        for file in saved
    }
    weights = tuple(one / sum(of_whole) for one in of_whole)
    previous, of_weights = (
        _contained(saved, record["gradients"], before.get(kind, {}))
        for kind in ("gradients", "weights")
    )
    mixed = _mixed(saved, fits, of_parts, record["gradients"])
    return PartFits(fits, weights, _counts_of(parts), rows, previous, of_weights, mixed)


def losses_of_rows(
    world: World, packed: bytes, folder: str, step: int, ways: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """For each way to cut the batch of a step, the reference's loss of the rows of each part."""
    request: Request = pickles.loads(packed)
    found = []
    with in_dtype(request.dtype):
        built, before = build(request, None, is_reference=True), load(folder, step - 1)["weights"]
        with built.parameters() as parameters, torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
        leaves, spec = tree_flatten(cast(request.batches[step - 1], request.dtype))
        for parts in ways:
            total, losses = sum(map(len, parts)), []
            for rows in parts:
                of_rows = [
                    one[list(rows)]
                    if isinstance(one, Tensor) and one.shape[:1] == (total,)
                    else one
                    for one in leaves
                ]
                losses.append(built.run_step(tree_unflatten(of_rows, spec)) or 0.0)
            found.append(losses)
    clean_up()
    return found


def load_parts(files: Sequence[str], count: int = 1) -> tuple[list[dict[str, Any]], list[Any]]:
    """What the ranks have saved, and the distinct parts of the batch in it, each cut into `count`
    microbatches.
    """
    saved = [torch.load(file, weights_only=False) for file in files]
    wholes = {file["digest"]: file["batch"] for file in saved}
    sizes = {file["digest"]: file["sizes"].get(count) for file in saved}
    return saved, [
        part for d, whole in wholes.items() for part in _microbatches(whole, count, sizes[d])
    ]


def _mixed(
    saved: Sequence[Mapping[str, Any]],
    fits: Mapping[int, Mapping[str, Fit]],
    of_parts: Mapping[str, list[Tensor]],
    known: Mapping[str, Tensor],
) -> dict[str, tuple[str, ...]]:
    """Gradients that are sums of the parts' gradients of several parameters of one shape."""
    mixed: dict[str, set[str]] = {}
    for file in saved:
        for name, (own, elements) in file["gradients"].items():
            whole, left = known[name], fits[file["rank"]].get(name, ((), 1.0))[1]
            others = [n for n in of_parts if n in known and known[n].shape == whole.shape]
            named = [(n, one[elements]) for n in others for one in of_parts[n]]
            found = None
            if left > LEFT and 1 < len(others) <= MOST_MIXED:
                found = fit([one for _, one in named], own, whole.flatten()[elements])
            if found is not None and found[1] < LEFT:
                shares = zip(named, found[0], strict=True)
                mixed.setdefault(name, set()).update(n for (n, _), one in shares if abs(one) > LEFT)
    return {name: tuple(sorted(own - {name})) for name, own in mixed.items() if own - {name}}


def _contained(
    saved: Sequence[Mapping[str, Any]], known: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, float]:
    """Gradients that are right but for a multiple of what the step before has left."""
    found: dict[str, set[float]] = {}
    for file in saved:
        for name, (own, elements) in file["gradients"].items():
            # One number is a multiple of any other.
            if name in before and name in known and own.numel() > 1:
                right, old = (some[name].flatten()[elements] for some in (known, before))
                one = agreement(own - right, old, right)
                factor = one.ab / one.bb if one.bb else 0.0
                is_so = one.aa and one.aa - factor * one.ab <= LEFT**2 * one.aa
                found.setdefault(name, set()).add(round(factor, 6) if is_so else 0.0)
    return {name: min(own) for name, own in found.items() if len(own) == 1 and min(own)}


def _add_undetermined(
    fits: dict[str, Fit],
    gradients: Mapping[str, tuple[Tensor, Tensor]],
    of_parts: Mapping[str, list[Tensor]],
    of_whole: Shares,
    record: Mapping[str, Any],
) -> None:
    """Gradients from which no coefficients follow have those of another, if these fit."""
    shares = next((shares for shares, left in fits.values() if left < LEFT), None)
    if shares is None:
        return
    weights = [own * whole for own, whole in zip(shares, of_whole, strict=True)]
    for name in gradients.keys() & of_parts.keys() - fits.keys():
        own, elements = gradients[name]
        parts, known = [one[elements] for one in of_parts[name]], record["gradients"][name]
        if len(parts) == len(weights):
            left = residual(parts, weights, own, known.flatten()[elements])
            fits |= {name: (shares, left)} if left < LEFT else {}


def _wrong_rows(
    gradients: Mapping[str, tuple[Tensor, Tensor]],
    known: Mapping[str, Tensor],
    of_parts: Mapping[str, list[Tensor]],
    of_whole: Shares,
    batch: Any,
) -> dict[str, WrongRows]:
    """The rows of a rank's gradients, its values and the numbers of its elements, that differ."""
    found = {}
    for name, (own, elements) in gradients.items():
        whole = known[name]
        right = whole.flatten()[elements]
        is_wrong = (own - right).abs() > TOLERANCES[torch.float64] * whole.abs().max()
        if whole.ndim < 2 or not is_wrong.any():
            continue
        zeros = [not tensor[is_wrong].any() for tensor in (own, right)]
        rows, all_rows = (some // whole[0].numel() for some in (elements[is_wrong], elements))
        rows, all_rows, of_row = rows.unique(), all_rows.unique(), all_rows
        times = _times(own, right, of_row, rows)
        is_in = torch.isin(of_row, rows)
        parts = [part[elements[is_in]] for part in of_parts.get(name, ())]
        summed = fit(parts, own[is_in], right[is_in]) if len(parts) == len(of_whole) > 1 else None
        shares = () if summed is None or summed[1] > LEFT else summed[0]
        if times or shares or len(rows) <= len(all_rows) // 4:
            is_first = len(all_rows) < whole.size(0) and torch.equal(rows, all_rows[:1])
            relative = tuple(a / b for a, b in zip(shares, of_whole, strict=False))
            numbers = tuple(rows.tolist())
            counted = _counted(batch, numbers, times)
            found[name] = WrongRows(
                *(numbers, whole.size(0), zeros[0], zeros[1], is_first),
                times=times,
                counted=counted,
                shares=relative,
            )
        elif right.any() and zeros[1]:
            found[name] = WrongRows((), int(is_wrong.sum()), zeros[0], zeros[1])
    return found


def _times(own: Tensor, right: Tensor, of_row: Tensor, rows: Tensor) -> tuple[int, ...]:
    """How often the right row is in each of the wrong rows, if that is an integer; or nothing."""
    found = []
    for row in rows:
        fits = agreement(own[of_row == row], right[of_row == row], right)
        factor = fits.ab / fits.bb if fits.bb else 0.0
        number = round(factor)
        if number < 2 or abs(factor - number) > LEFT or fits.aa - factor * fits.ab > LEFT * fits.aa:
            return ()
        found.append(number)
    # All by one factor is another subject.
    return tuple(found) if len(set(found)) > 1 else ()


def _counted(batch: Any, rows: Sequence[int], times: Sequence[int]) -> str:
    """The tensor of the batch in which each row's index occurs so many times; or ""."""
    for path, leaf in tree_flatten_with_path(batch)[0] if times else ():
        is_index = isinstance(leaf, Tensor) and not leaf.is_floating_point()
        if is_index and [int((leaf == row).sum()) for row in rows] == list(times):
            return keystr(path) or "the batch"
    return ""


def _microbatches(batch: Any, count: int, sizes: Sequence[int] | None) -> list[Any]:
    """Parts of a batch along dimension 0, equal ones or of these sizes; raises ValueError if there
    are no equal parts.
    """
    leaves, spec = tree_flatten(batch)
    cut = []
    for leaf in leaves:
        is_cut = isinstance(leaf, Tensor) and leaf.ndim > 0
        if is_cut and sizes is not None and sum(sizes) == leaf.size(0):
            cut.append(leaf.split(list(sizes)))
            continue
        if is_cut and leaf.size(0) % count:
            raise ValueError(f"{leaf.size(0)} rows are no {count} equal parts")
        cut.append(leaf.chunk(count) if is_cut else [leaf] * count)
    return [tree_unflatten(list(leaves), spec) for leaves in zip(*cut, strict=True)]


def _counts_of(parts: Sequence[Any]) -> dict[str, Shares]:
    """The numbers of elements, and of those that are not negative, in each part, by tensor."""
    found: dict[str, Shares] = {}
    for one in parts:
        for path, leaf in tree_flatten_with_path(one)[0]:
            if isinstance(leaf, Tensor) and not leaf.is_floating_point():
                name = keystr(path) or "the batch"
                number = float((leaf >= 0).sum()) if leaf.dtype != torch.bool else float(leaf.sum())
                found[name] = (*found.get(name, ()), number)
    return {name: numbers for name, numbers in found.items() if len(numbers) == len(parts)}
