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

from titanlite.data.sampler import read_batch
from titanlite.job import Job
from titanlite.modules.batch import IGNORE_INDEX, call_model
from titanlite.modules.shards import local_part
from titanlite.parallelize.steps import depends_on_microbatch
from titanlite.ranks.hang_state import recorded_calls
from titanlite.registry import OPTIMIZERS
from titanlite.tools.verify.jobs import is_named, own_decay, own_multiplier
from titanlite.tools.verify.opened import subject_of
from titanlite.training.averaging import AVERAGE, is_average
from titanlite.training.loss import NEXT_TOKEN
from titanlite.training.metrics import ValidationResult

# Reductions of at most this many elements are losses, norms and counts, not gradients.
MOST_NUMBERS = 16
TENSORS = "the tensors that are the model's parameters"


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
    if frozen := [n for n, p in job.parameters.items() if p in counts and not p.requires_grad]:
        problems.append(f"the frozen {frozen[0]} is in a parameter group")
    if strange := set(counts) - set(job.parameters.values()):
        problems.append(f"{len(strange)} tensors in its groups are not model parameters")
    is_known = OPTIMIZERS.is_built_in(section.name)
    if is_known and type(optimizer).__name__ != section.name:
        problems.append(f"it is {type(optimizer).__name__}, not {section.name}")
    for group in optimizer.param_groups:
        options: dict[str, Any] = {"betas": (section.beta1, section.beta2), "eps": section.eps}
        if section.name == "SGD" or group.get("matrices"):
            options = {"momentum": section.used_momentum}
        if group.get("matrices"):
            options |= {
                key: getattr(section, key)
                for key in ("nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn")
            }
        problems += [
            f"{key} is {group[key]} instead of {value} for {len(group['params'])} parameters"
            for key, value in options.items()
            if is_known and group[key] != value
        ]
    names = {parameter: name for name, parameter in job.parameters.items()}
    wrong: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for name in [names[p] for p in group["params"] if p in names]:
            expected = {
                "weight_decay": own_decay(job.config, name),
                "initial_lr": section.lr * own_multiplier(job.config, name),
            }
            wrong.update(
                f"{key} is {group[key]:g} instead of {value:g}"
                for key, value in expected.items()
                if not math.isclose(group[key], value, rel_tol=1e-12)
            )
    problems += [f"{line} for {count} parameters" for line, count in wrong.items()]
    problems += [
        f"{name} is updated by {'Muon' if is_muon else 'AdamW'}"
        for group in optimizer.param_groups
        for is_muon in [bool(group.get("matrices"))]
        for name in [names[p] for p in group["params"] if p in names]
        if section.name == "Muon" and _is_misplaced(job, name, is_muon)
    ]
    start = "the optimizer does not match the job: "
    return tuple(f"{start}{problem}" for problem in dict.fromkeys(problems))


def _is_misplaced(job: Job, name: str, is_muon: bool) -> bool:
    """Whether Muon updates what is AdamW's by the keys, or AdamW a linear layer that is Muon's."""
    parameter, patterns = job.parameters[name], job.config.optimizer.adamw
    is_adamw = is_named(name, patterns) if patterns else not job.plan.is_in_block(name)
    is_adamw = is_adamw or parameter.ndim < 2 or name.endswith("bias")
    linear = (m for part in job.parts for m in part.modules() if isinstance(m, torch.nn.Linear))
    return is_adamw if is_muon else not is_adamw and any(m.weight is parameter for m in linear)


def wrong_validation(job: Job, shown: float) -> Iterator[str]:
    """Whether a validation loss is the mean over all samples; only for the next-token loss."""
    dataset, section = job.validation_dataset, job.config.validation
    # In float8, for example, splitting the samples differently changes the loss.
    is_mean = job.trainer.loss.count is NEXT_TOKEN.count and not depends_on_microbatch(job.config)
    if not is_mean or dataset is None:
        return
    sizes = [dataset.num_samples, section.steps * job.resolved.global_batch_size]
    num_samples = min(size for size in sizes if size is not None and size > 0)
    total, count, at_once = 0.0, 0, section.local_batch_size
    model, state = job.parts[0].eval(), subject_of(job).state()
    # Where FSDP has gathered a parameter, the model has another tensor than here.
    averaged = [
        (local := local_part(parameter.detach()), local.clone(), local_part(average))
        for name, parameter in job.parameters.items()
        if (average := state.get(f"{name}.{AVERAGE}")) is not None
    ]
    with torch.no_grad():
        for local, _, average in averaged:
            local.copy_(average)
        for first in range(0, num_samples, at_once):
            indices = range(first, min(first + at_once, num_samples))
            batch = read_batch(dataset, indices, job.data.fields)
            batch = batch.to(job.world.device, getattr(torch, job.config.training.dtype))
            total += job.trainer.loss.total(call_model(model, batch), batch).item()
            count += int((batch.targets != IGNORE_INDEX).sum())
        for local, own, _ in averaged:
            local.copy_(own)
    model.train()
    if not math.isclose(total / count, shown, rel_tol=1e-6):
        yield (
            f"even on one process, the validation loss is {shown:.6g}, but the {count} targets of "
            f"its {num_samples} samples have a mean loss of {total / count:.6g}: the samples, the "
            "sum or its divisor is wrong"
        )


def stale_parameters(
    job: Job, step: int, parameters: Mapping[str, torch.nn.Parameter]
) -> Iterator[str]:
    """Whether modules use other tensors than before the first step, or than the optimizer's.

    `parameters` are those before the first step.
    """
    updated = {id(p) for group in job.trainer.optimizer.param_groups for p in group["params"]}
    stale = [
        name
        for name, one in job.parameters.items()
        if one is not parameters.get(name) or (one.requires_grad and id(one) not in updated)
    ]
    more = f" and {len(stale) - 1} other parameters" if len(stale) > 1 else ""
    if stale and all(job.parameters[name] is parameters.get(name) for name in stale):
        yield (
            f"no parameter group of the optimizer has {stale[0]}{more}, so these weights stay as "
            "they are: look at how parameters are put into groups"
        )
    elif stale:
        yield (
            f"after step {step} the modules hold other tensors for {stale[0]}{more} than those "
            "that the optimizer updates, so later steps compute with stale weights. If FSDP leaves "
            "a unit gathered after the backward pass, reshard it before the next step"
        )


def validate_unchanged(
    job: Job, problems: list[str], *, is_stale: bool = False
) -> ValidationResult:
    """Run a validation; adds to `problems` any training state that it changes.

    With `is_stale`, the model's parameters were wrong before.
    """
    before = _training_state(job)
    if is_stale:
        before.pop(TENSORS)
    found = job.validate()
    after = _training_state(job)
    for what, value in before.items():
        if any(a is not b and a != b for a, b in zip(value, after[what], strict=True)):
            problems.append(f"a validation changes {what}; restore it before training continues")
    return found


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
        # Compared by identity: FSDP registers other tensors while parameters are gathered.
        TENSORS: [id(p) for p in job.parameters.values()],
    }


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
    wanted, state = job.config.training.dtype, subject_of(job).state()
    counted = {
        name: tensor
        for name, tensor in state.items()
        if tensor.ndim > 0 and not is_average(name.rpartition(".")[2])
    }
    for what, tensors in (("weights", job.parameters), ("optimizer states", counted)):
        dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}
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
    balancer = job.trainer.balancer
    num_loads = 0 if balancer is None else balancer.num_sums
    for call in recorded_calls():
        axis = axes.get(call.group.partition("@")[0])
        is_reduction = "reduce" in call.operation and call.num_elements > MOST_NUMBERS
        if call.number <= before.get(call.group, -1):
            continue
        # Counts are reduced as integers.
        is_float = "int" not in call.dtype
        # So are the experts' loads, as float64.
        if call.dtype == "float64" and call.num_elements == num_loads:
            continue
        if axis is not None and is_reduction and is_float and call.dtype != wanted:
            what = f"{call.operation} over {axis} is in {call.dtype}"
            found[what] = found.get(what, 0) + 1
    return [
        f"gradients are not reduced in the job's dtype {wanted}: {what} ({count} calls)"
        for what, count in found.items()
    ]
