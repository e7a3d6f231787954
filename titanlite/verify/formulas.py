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

from titanlite.batch import IGNORE_INDEX, call_model
from titanlite.data.sampler import read_batch
from titanlite.job import Job
from titanlite.ranks.account import recorded_calls
from titanlite.training.loss import NEXT_TOKEN
from titanlite.training.shards import local_part

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


def wrong_validation(job: Job, shown: float) -> Iterator[str]:
    """Whether a validation loss is the mean over each sample once, for the next token's loss."""
    dataset, section = job.validation_dataset, job.config.validation
    # Scales in float8 are of a batch: other batches have another loss.
    has_mean = job.trainer.loss.count is NEXT_TOKEN.count and not job.config.converts_to_float8
    if not has_mean or dataset is None:
        return
    sizes = [dataset.num_samples, section.steps * job.resolved.global_batch_size]
    num_samples = min(size for size in sizes if size is not None and size > 0)
    total, count, at_once = 0.0, 0, section.local_batch_size
    model = job.parts[0].eval()
    with torch.no_grad():
        for first in range(0, num_samples, at_once):
            indices = range(first, min(first + at_once, num_samples))
            batch = read_batch(dataset, indices, job.data.fields).to(job.world.device)
            total += job.trainer.loss.total(call_model(model, batch), batch).item()
            count += int((batch.targets != IGNORE_INDEX).sum())
    model.train()
    if not math.isclose(total / count, shown, rel_tol=1e-6):
        yield (
            f"on one process too, the validation loss is {shown:.6g}, and the {count} targets of "
            f"its {num_samples} samples have a mean loss of {total / count:.6g}"
        )


def evaluate_unchanged(job: Job, problems: list[str]) -> float:
    """The validation loss; adds to `problems` what of the training the validation has changed."""
    before = _training_state(job)
    loss = job.evaluate()
    after = _training_state(job)
    for what, value in before.items():
        if any(a is not b and a != b for a, b in zip(value, after[what], strict=True)):
            problems.append(f"a validation changes {what}, which training goes on with")
    return loss


def _training_state(job: Job) -> dict[str, list[Any]]:
    trainer = job.trainer
    return {
        "the position in the training data": [job.sampler.state],
        "the learning-rate schedule": [
            trainer.scheduler.last_epoch,
            *(group["lr"] for group in trainer.optimizer.param_groups),
        ],
        "which modules are in training mode": [m.training for p in job.parts for m in p.modules()],
        "gradients": [parameter.grad is None for parameter in job.parameters.values()],
        # FSDP registers others while parameters are gathered. Compared by identity.
        "the tensors that are the model's parameters": [id(p) for p in job.parameters.values()],
    }


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
