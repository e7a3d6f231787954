"""On a rank: checks a run against its settings and against formulas.

The reference runs the same optimizer, clipping and loss as the plan, so a bug in these is in both
and no number differs. Each check here returns or yields sentences about what is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.batch import IGNORE_INDEX, Batch, call_model
from titanlite.job import Job
from titanlite.ranks.account import recorded_calls
from titanlite.training.loss import NEXT_TOKEN
from titanlite.training.shards import local_part
from titanlite.verify.compare import NOISE
from titanlite.verify.record import ReferenceStep

# Reductions of at most this many elements are losses, norms and counts, not gradients.
MOST_NUMBERS = 16


def optimizer_problems(job: Job) -> tuple[str, ...]:
    """Where the optimizer's parameters or options do not match the job."""
    section, optimizer = job.config.optimizer, job.trainer.optimizer
    counts = Counter(p for group in optimizer.param_groups for p in group["params"])
    problems = []
    wanted = {name: p for name, p in job.parameters.items() if p.requires_grad}
    if missing := [name for name, parameter in wanted.items() if parameter not in counts]:
        more = f" and {len(missing) - 1} others are" if len(missing) > 1 else " is"
        problems.append(f"{missing[0]}{more} in no parameter group")
    if twice := [name for name, parameter in wanted.items() if counts[parameter] > 1]:
        problems.append(f"{twice[0]} is in {counts[wanted[twice[0]]]} parameter groups")
    if strange := set(counts) - set(wanted.values()):
        problems.append(f"{len(strange)} tensors in its groups are not model parameters")
    if type(optimizer).__name__ != section.name:
        problems.append(f"it is {type(optimizer).__name__}, not {section.name}")
    options: dict[str, Any] = {"weight_decay": section.weight_decay}
    if section.name == "SGD":
        options["momentum"] = section.momentum
    else:
        options |= {"betas": (section.beta1, section.beta2), "eps": section.eps}
    for group in optimizer.param_groups:
        problems += [
            f"{key} is {group[key]} instead of {value} for {len(group['params'])} parameters"
            for key, value in options.items()
            if group[key] != value
        ]
    start = "the optimizer does not match the job: "
    return tuple(f"{start}{problem}" for problem in dict.fromkeys(problems))


def wrong_count(job: Job, batches: list[Batch], counted: int) -> Iterator[str]:
    """Whether the step divides by its number of targets; not checked for a custom count."""
    if job.trainer.loss.count is not NEXT_TOKEN.count:
        return
    own = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    if own != counted:
        yield (
            f"even on one process, a step with {own} targets divides its loss by {counted}: masked "
            "targets must not be counted"
        )


def wrong_validation(job: Job, shown: float) -> Iterator[str]:
    """Whether the validation loss is the mean over targets; only for the next-token loss."""
    if job.trainer.loss.count is not NEXT_TOKEN.count:
        return
    total, count = 0.0, 0
    model = job.parts[0].eval()
    with torch.no_grad():
        for batch in job.validation_batches():
            total += job.trainer.loss.total(call_model(model, batch), batch).item()
            count += int((batch.targets != IGNORE_INDEX).sum())
    model.train()
    if not math.isclose(total / count, shown, rel_tol=1e-6):
        yield (
            f"even on one process, the validation loss is {shown:.6g}, but its {count} targets "
            f"have a mean loss of {total / count:.6g}: the sum or its divisor is wrong"
        )


def wrong_updates(
    job: Job, start: Mapping[str, Tensor], record: Any, step: ReferenceStep
) -> Iterator[str]:
    """Where the first step on one process does not follow the formulas of clipping and optimizer.

    Only in float64, where the different rounding of formula and kernel does not matter.
    """
    config, gradients = job.config, record["gradients"]
    if config.training.dtype != "float64" or config.training.param_dtype != "float64":
        return
    norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in gradients.values()))
    if not math.isclose(norm, step.norm, rel_tol=1e-9):
        yield (
            f"even on one process, the gradient norm is {step.norm:.6g}, but that of the gradients "
            f"is {norm:.6g}: the norm is computed wrongly"
        )
    scale = min(1.0, config.training.max_norm / (norm + 1e-6))
    section, lr = config.optimizer, record["lr"]
    factors = []
    for name, gradient in gradients.items():
        moment = record["state"].get(f"{name}.exp_avg")
        if moment is not None and not (section.name == "Adam" and section.weight_decay):
            wanted = (1 - section.beta1) * scale * gradient
            size = (wanted * wanted).sum().item()
            if size > (NOISE * norm) ** 2:
                factors.append(((moment * wanted).sum() / size).item())
    if factors and not all(math.isclose(f, 1.0, rel_tol=1e-9) for f in factors):
        yield (
            f"even on one process, the optimizer receives gradients {factors[0]:.6g} times as "
            f"large as clipping a norm of {norm:.6g} to {config.training.max_norm:g} gives: "
            "clipping is wrong"
        )
        return
    for name, gradient in gradients.items():
        expected = _first_update(section, lr, start[name].double(), scale * gradient.double())
        error = (record["weights"][name].double() - expected).abs().max().item()
        if error > 1e-9 * max(expected.abs().max().item(), lr):
            yield (
                f"even on one process, the first update is not that of {section.name}: {name} "
                f"differs by {error:.1e} from the formula with a learning rate of {lr:.6g} and a "
                f"weight decay of {section.weight_decay:g}"
            )
            return


def _first_update(section: Any, lr: float, weight: Tensor, gradient: Tensor) -> Tensor:
    """A weight after the first step of AdamW (arXiv 1711.05101), Adam or SGD."""
    decay = section.weight_decay
    if section.name == "SGD":
        return weight - lr * (gradient + decay * weight)
    if section.name == "Adam":
        gradient = gradient + decay * weight
    else:
        weight = weight * (1 - lr * decay)
    # After bias correction the two moments are the first gradient and its square.
    return weight - lr * gradient / (gradient.abs() + section.eps)


def left_over_gradients(job: Job, step: int) -> Iterator[str]:
    """Whether gradients are left after a step, so that the next step adds to them."""
    left = [
        name
        for name, parameter in job.parameters.items()
        if parameter.grad is not None and local_part(parameter.grad).any()
    ]
    if left:
        more = f" and {len(left) - 1} others" if len(left) > 1 else ""
        yield (
            f"step {step} does not clear the gradients of {left[0]}{more}, so the next step adds "
            "to them. Call zero_grad() after every optimizer step"
        )


def wrong_formats(job: Job) -> Iterator[str]:
    """Weights and optimizer state whose dtype is not training.dtype."""
    wanted = job.config.training.dtype
    state = job.trainer.optimizer.state
    for what, tensors in (
        ("weights", job.parameters.items()),
        (
            "optimizer states",
            (
                (f"{name}.{key}", value)
                for name, parameter in job.parameters.items()
                for key, value in state.get(parameter, {}).items()
                if isinstance(value, Tensor) and value.ndim > 0
            ),
        ),
    ):
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors}
        wrong = {name: dtype for name, dtype in dtypes.items() if dtype != wanted}
        if wrong:
            name, dtype = next(iter(wrong.items()))
            yield (
                f"{len(wrong)} of {len(dtypes)} {what} are not in training.dtype {wanted}: {name} "
                f"is in {dtype}"
            )


def wrong_reductions(job: Job, before: Mapping[str, int]) -> list[str]:
    """Gradient reductions whose dtype is not the job's reduce dtype.

    `before` is the number of the last call of each group before the job, since groups are reused.
    """
    wanted = job.config.training.reduce_dtype
    mesh = job.meshes.dp
    axes = {str(mesh.get_group(axis).group_name): axis for axis in mesh.mesh_dim_names or ()}
    found: dict[str, int] = {}
    for call in recorded_calls():
        axis = axes.get(call.group.partition("@")[0])
        is_reduction = "reduce" in call.operation and call.num_elements > MOST_NUMBERS
        if call.number <= before.get(call.group, -1):
            continue
        if axis is not None and is_reduction and call.dtype != wanted:
            what = f"{call.operation} over {axis} is in {call.dtype}"
            found[what] = found.get(what, 0) + 1
    return [
        f"gradients are not reduced in the job's dtype {wanted}: {what} ({count} calls)"
        for what, count in found.items()
    ]
