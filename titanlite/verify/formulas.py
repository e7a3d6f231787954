"""On a rank: what a job does, held against what it asks for and against formulas.

A plan is compared with one process, which runs the same optimizer, clipping and loss, and would be
wrong alike. What is found here is a sentence, whatever numbers come of it.
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

# What a rank reduces beside gradients (losses, norms, counts) has no more elements.
MOST_NUMBERS = 16


def optimizer_problems(job: Job) -> tuple[str, ...]:
    """How the optimizer is not the one that the job asks for: its parameters, its options."""
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
        problems.append(f"{len(strange)} tensors in its groups are no parameters of the model")
    if type(optimizer).__name__ != section.name:
        problems.append(f"it is {type(optimizer).__name__}, not {section.name}")
    options: dict[str, Any] = {"weight_decay": section.weight_decay}
    if section.name == "SGD":
        options["momentum"] = section.momentum
    else:
        options |= {"betas": (section.beta1, section.beta2), "eps": section.eps}
    for group in optimizer.param_groups:
        problems += [
            f"{key} is {group[key]} for {len(group['params'])} parameters, not {value}"
            for key, value in options.items()
            if group[key] != value
        ]
    start = "the optimizer is not the one that the job asks for: "
    return tuple(f"{start}{problem}" for problem in dict.fromkeys(problems))


def wrong_count(job: Job, batches: list[Batch], counted: int) -> Iterator[str]:
    """Whether the step divides by the targets that it has; a loss of its own may count others."""
    if job.trainer.loss.count is not NEXT_TOKEN.count:
        return
    own = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    if own != counted:
        yield (
            f"on one process too, a step with {own} targets divides its loss by {counted}: those "
            "that are left out must not count"
        )


def wrong_validation(job: Job, shown: float) -> Iterator[str]:
    """Whether a validation is the sum of its losses over its targets, for the next token's loss."""
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
            f"on one process too, the validation loss is {shown:.6g}, and its {count} targets "
            f"have a mean loss of {total / count:.6g}"
        )


def wrong_updates(
    job: Job, start: Mapping[str, Tensor], record: Any, step: ReferenceStep
) -> Iterator[str]:
    """How the first step on one process is not what clipping and the optimizer's formula give.

    A plan is compared with that process, which would be wrong alike. In float64 alone: a formula
    rounds otherwise than a kernel.
    """
    config, gradients = job.config, record["gradients"]
    if config.training.dtype != "float64" or config.training.param_dtype != "float64":
        return
    norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in gradients.values()))
    if not math.isclose(norm, step.norm, rel_tol=1e-9):
        yield f"on one process too, the norm is {step.norm:.6g}, of gradients of {norm:.6g}"
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
            f"on one process too, the optimizer is given gradients {factors[0]:.6g} times as large "
            f"as clipping to {config.training.max_norm:g} makes them of a norm of {norm:.6g}: "
            "clipping is wrong"
        )
        return
    for name, gradient in gradients.items():
        expected = _first_update(section, lr, start[name].double(), scale * gradient.double())
        error = (record["weights"][name].double() - expected).abs().max().item()
        if error > 1e-9 * max(expected.abs().max().item(), lr):
            yield (
                f"on one process too, the first step is not {section.name}'s: {name} is "
                f"{error:.1e} off the formula of a learning rate of {lr:.6g} and a weight decay of "
                f"{section.weight_decay:g}: the update is wrong"
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
    # Both moments, freed of their bias, are the first gradient and its square.
    return weight - lr * gradient / (gradient.abs() + section.eps)


def left_over_gradients(job: Job, step: int) -> Iterator[str]:
    """Whether a step leaves gradients behind, which the next one would add its own to."""
    left = [
        name
        for name, parameter in job.parameters.items()
        if parameter.grad is not None and local_part(parameter.grad).any()
    ]
    if left:
        more = f" and {len(left) - 1} others" if len(left) > 1 else ""
        yield (
            f"step {step} leaves the gradients of {left[0]}{more} behind, and the next step adds "
            "its own to them: they are not cleared"
        )


def wrong_formats(job: Job) -> Iterator[str]:
    """Weights, and what the optimizer keeps of them, in another dtype than training.dtype."""
    wanted = job.config.training.dtype
    state = job.trainer.optimizer.state
    for what, tensors in (
        ("weights are kept", job.parameters.items()),
        (
            "the optimizer's state is kept",
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
                f"{what} in another dtype than training.dtype {wanted}: {len(wrong)} of "
                f"{len(dtypes)}, {name} in {dtype}"
            )


def wrong_reductions(job: Job, before: Mapping[str, int]) -> list[str]:
    """Gradients that are reduced in another number format than the job asks for.

    `before` is how many calls each group had when the job began: groups are used again.
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
        f"gradients are reduced in another dtype than {wanted}, which the job asks for: "
        f"{count} times {what}"
        for what, count in found.items()
    ]
