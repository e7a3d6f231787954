"""On a rank: computes each step of the reference again by formulas, from the previous step.

A plan is compared with the reference, so an error in code that both run is not a difference. Here
the samples, the number of targets, the norm, the clipping and the optimizer's update of each step
are checked against the job's settings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.data.spec import WEIGHTED
from titanlite.job import Job
from titanlite.modules.batch import IGNORE_INDEX, Batch
from titanlite.modules.experts import expert_layers
from titanlite.registry import OPTIMIZERS
from titanlite.tools.verify.differences import NOISE
from titanlite.tools.verify.jobs import own_decay, own_multiplier, scheduled_lr
from titanlite.tools.verify.record import ReferenceStep
from titanlite.training.averaging import AVERAGE
from titanlite.training.loss import NEXT_TOKEN

# The largest relative difference between the optimizer's kernels and the formulas, in float64.
ROUNDING = 1e-9
NARROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Recurrence:
    """Checks the steps of a job on one process, in order; `weights` are the starting weights."""

    def __init__(self, job: Job, weights: Mapping[str, Tensor]) -> None:
        self._job = job
        self._section = job.config.optimizer
        self._kinds = {
            name: group["matrices"]
            for group in job.trainer.optimizer.param_groups
            for name, parameter in job.parameters.items()
            if group.get("matrices") and any(parameter is one for one in group["params"])
        }
        """What Muon updates: name -> "matrix" or "stack"."""
        self._weights = weights
        self._state: Mapping[str, Tensor] = {}
        self._checks = [self._wrong_samples, self._wrong_balance, self._wrong_average]
        self._averaged: dict[str, list[Tensor]] = {}
        self._biases = {
            name: layer.expert_bias.cpu().clone()
            for name, layer in expert_layers(job.parts).items()
            if layer.expert_bias is not None
        }
        training = job.config.training
        # Formulas and kernels round differently; only in float64 is an error larger than that.
        if training.dtype == training.param_dtype == "float64":
            self._checks.append(self._wrong_update)

    def problems(
        self, step: int, batches: list[Batch], record: Mapping[str, Any], numbers: ReferenceStep
    ) -> Iterator[str]:
        """What is wrong in `step`; `record` has its tensors, `numbers` its loss, norm and rate."""
        yield from self._wrong_count(step, batches, numbers.num_targets)
        yield from self._changed_frozen(step, record["weights"])
        for check in list(self._checks):
            # An error in one step makes the next ones start from wrong values.
            if found := list(check(step, record, numbers)):
                self._checks.remove(check)
                yield from found
        self._weights, self._state = record["weights"], record["state"]

    def _wrong_samples(
        self, step: int, record: Mapping[str, Any], numbers: ReferenceStep
    ) -> Iterator[str]:
        """Whether the step trains on the samples that follow those of the previous step."""
        size = self._job.resolved.num_sequences(step, step)
        name, rows = next(iter(record["fields"].items()))
        first = self._job.resolved.num_sequences(1, step - 1)
        expected: Counter[bytes] = Counter()
        for index in range(first, first + size):
            sample = self._job.dataset.sample(index)
            field = sample if isinstance(sample, Tensor) else sample[name]
            expected[_bytes(field.to(rows.dtype))] += 1
        missing = expected - Counter(_bytes(row) for row in rows)
        if missing:
            yield (
                f"even on one process, step {step} does not train on samples {first} to "
                f"{first + size - 1}: {missing.total()} of them are missing from its batch"
            )

    def _wrong_count(self, step: int, batches: list[Batch], counted: float) -> Iterator[str]:
        """Whether the step divides by its number of targets; a custom loss may count others."""
        is_weighted = self._job.config.training.loss == WEIGHTED
        if self._job.trainer.loss.count is not NEXT_TOKEN.count and not is_weighted:
            return
        own = 0.0
        for batch in batches:
            is_target = batch.targets != IGNORE_INDEX
            own += float(
                (batch["weights"].double() * is_target if is_weighted else is_target).sum()
            )
        if not math.isclose(own, counted, rel_tol=1e-9):
            what = f"targets of the weight {own:.9g}" if is_weighted else f"{own:.9g} targets"
            yield (
                f"even on one process, step {step} has {what} but divides its loss by "
                f"{counted:.9g}: masked targets must not be counted"
                f"{', and others with their weights' * is_weighted}"
            )

    def _wrong_balance(
        self, step: int, record: Mapping[str, Any], numbers: ReferenceStep
    ) -> Iterator[str]:
        """Whether tokens are counted as they are routed, and biases follow from the counts."""
        for name, layer in expert_layers(self._job.parts).items():
            counts = torch.tensor(numbers.loads[name])
            if (routed := record["routing"].get(name)) is not None:
                chosen = torch.bincount(routed["chosen"].flatten(), minlength=layer.num_experts)
                if not torch.equal(counts, chosen):
                    yield (
                        f"even on one process, step {step} counts {counts.tolist()} tokens for the "
                        f"experts of {name}, but its router chooses them for {chosen.tolist()}"
                    )
                    return
            if name not in self._biases or not layer.bias_step:
                continue
            mean = counts.sum() / layer.num_experts
            change = (mean - counts).sign().double() * layer.bias_step
            expected = self._biases[name].double() + change - change.mean()
            self._biases[name] = own = record["buffers"][f"{name}.expert_bias"]
            if (own.double() - expected).abs().max().item() > 1e-3 * layer.bias_step:
                yield (
                    f"even on one process, the balancing bias of {name} does not follow from its "
                    f"previous value after step {step}: it must rise by {layer.bias_step:g} for "
                    "experts with fewer tokens than the mean, fall by as much for those with more, "
                    "and keep its mean"
                )
                return

    def _wrong_average(
        self, step: int, record: Mapping[str, Any], numbers: ReferenceStep
    ) -> Iterator[str]:
        """Whether the averages of the weights follow from the weights after each step."""
        section = self._job.config.weight_averaging
        is_due = step >= section.start_step and (step - section.start_step) % section.freq == 0
        if section.method == "none":
            return
        for name, gradient in record["gradients"].items():
            before = self._state.get(f"{name}.{AVERAGE}")
            own, weight = record["state"].get(f"{name}.{AVERAGE}"), record["weights"][name]
            kept = self._averaged.setdefault(name, [])
            if is_due and (kept or gradient is not None):
                kept.append(weight.double())
            if not kept:
                continue
            if section.method == "last_k":
                expected = torch.stack(kept[-section.k :]).mean(0)
            elif before is None or not is_due:
                expected = kept[-1] if before is None else before.double()
            else:
                share = section.decay
                expected = share * before.double() + (1 - share) * weight.double()
            if own is None or _error(own, expected) > 16 * torch.finfo(own.dtype).eps:
                of = (
                    f"{section.decay:g} times its previous value plus {1 - section.decay:g} times "
                    "the weight"
                    if section.method == "ema"
                    else f"the mean of its newest {section.k} values"
                )
                yield (
                    f"even on one process, the average of {name} after step {step} is not {of}: "
                    "weight_averaging is wrong"
                )
                return

    def _changed_frozen(self, step: int, weights: Mapping[str, Tensor]) -> Iterator[str]:
        """Whether the step changes a weight that does not require a gradient, by any bit."""
        frozen = [name for name, p in self._job.parameters.items() if not p.requires_grad]
        for name in frozen:
            if not torch.equal(weights[name], self._weights[name]):
                yield f"even on one process, step {step} changes the frozen weight {name}"
                return

    def _wrong_update(
        self, step: int, record: Mapping[str, Any], numbers: ReferenceStep
    ) -> Iterator[str]:
        gradients: Mapping[str, Tensor] = record["gradients"]
        norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in gradients.values()))
        if not math.isclose(norm, numbers.norm, rel_tol=ROUNDING):
            yield (
                f"even on one process, the gradient norm of step {step} is {numbers.norm:.6g}, but "
                f"its gradients have a norm of {norm:.6g}: the norm is computed wrongly"
            )
            return
        if not OPTIMIZERS.is_built_in(self._section.name):
            return
        scale = min(1.0, self._job.config.training.max_norm / (norm + 1e-6))
        # The update from a gradient that is only rounding error cannot be compared.
        names = [n for n, g in gradients.items() if g.double().norm().item() > NOISE * norm]
        given = {name: scale * gradients[name].double() for name in names}
        yield from self._wrong_moments(step, given, record["state"], norm) or self._wrong_weights(
            step, given, record
        )

    def _wrong_moments(
        self, step: int, given: Mapping[str, Tensor], state: Mapping[str, Tensor], norm: float
    ) -> list[str]:
        """Whether the first moments follow from the clipped gradients `given`."""
        wrong, factors = [], []
        for name, gradient in given.items():
            key, beta = self._moment_of(name)
            moment = state.get(f"{name}.{key}")
            decays = own_decay(self._job.config, name) != 0
            if moment is None or (self._section.name == "Adam" and decays):
                return []
            decayed = beta * self._previous(name, key, moment)
            expected = decayed + (1 - beta) * gradient
            if _error(moment, expected) > ROUNDING:
                wrong.append(name)
            used = (moment.double() - decayed) / (1 - beta)
            factor = ((used * gradient).sum() / (gradient * gradient).sum()).item()
            left = (used - factor * gradient).norm() / used.norm().clamp_min(1e-300)
            factors.append(factor if left < 1e-6 else math.nan)
        if not wrong:
            return []
        start = f"even on one process, in step {step} "
        clipped = f"clipping a norm of {norm:.6g} to {self._job.config.training.max_norm:g}"
        if all(math.isclose(factor, factors[0], rel_tol=1e-6) for factor in factors):
            return [
                f"{start}the optimizer receives gradients {factors[0]:.6g} times as large as "
                f"{clipped} gives: clipping is wrong"
            ]
        key = self._moment_of(wrong[0])[0]
        moments = {name: state[f"{name}.{self._moment_of(name)[0]}"] for name in wrong}
        for dtype in NARROW_DTYPES:
            if all(torch.equal(m, m.to(dtype).to(m.dtype)) for m in moments.values()):
                narrow = str(dtype).removeprefix("torch.")
                return [
                    f"{start}every value of the optimizer's {key} is exact in {narrow}: it is "
                    f"kept in {narrow}, but the job's dtype is float64"
                ]
        fresh = {n: (1 - self._moment_of(n)[1]) * given[n] for n in wrong}
        if all(_error(moments[name], fresh[name]) < ROUNDING for name in wrong):
            return [
                f"{start}the optimizer's {key} contains nothing of earlier steps: the optimizer "
                "state was lost or reset"
            ]
        beta_name = "momentum" if wrong[0] in self._kinds else "beta1"
        return [
            f"{start}the optimizer's {key} of {wrong[0]}"
            f"{f' and {len(wrong) - 1} other parameters' if len(wrong) > 1 else ''} is not "
            f"{beta_name} times its previous value plus (1 - {beta_name}) times the clipped "
            "gradient: clipping or the optimizer state is wrong"
        ]

    def _moment_of(self, name: str) -> tuple[str, float]:
        """The average of a parameter's gradients in the optimizer state, and its decay rate."""
        if name in self._kinds:
            return "momentum_buffer", self._section.used_momentum
        return "exp_avg", self._section.beta1

    def _wrong_weights(
        self, step: int, given: Mapping[str, Tensor], record: Mapping[str, Any]
    ) -> Iterator[str]:
        lr = record["lr"]

        def off(name: str, lr: float) -> float:
            expected = self._next_weight(step, name, given[name], lr)
            error = (record["weights"][name].double() - expected).abs().max().item()
            return error / max(expected.abs().max().item(), lr, 1e-300)

        wrong = next((name for name in given if off(name, lr) > ROUNDING), None)
        if wrong is None:
            return
        config = self._job.config
        next_lr = scheduled_lr(config, step + 1)
        reason = (
            f"the formula with a learning rate of {lr * own_multiplier(config, wrong):.6g} and a "
            f"weight decay of {own_decay(config, wrong):g}: the update is wrong"
        )
        if next_lr != lr and all(off(name, next_lr) < ROUNDING for name in given):
            reason += (
                f". It agrees with the next step's learning rate, {next_lr:.6g}: the schedule is "
                "advanced before the optimizer. Call scheduler.step() after optimizer.step()"
            )
        yield (
            f"even on one process, the update of step {step} is not that of {self._rule(wrong)}: "
            f"{wrong} has a relative difference of {off(wrong, lr):.1e} from {reason}"
        )

    def _next_weight(self, step: int, name: str, gradient: Tensor, lr: float) -> Tensor:
        """A weight after this step by AdamW (arXiv 1711.05101), Adam, SGD or Muon."""
        section, weight = self._section, self._weights[name].double()
        decay = own_decay(self._job.config, name)
        lr *= own_multiplier(self._job.config, name)
        if section.name in ("SGD", "Adam"):
            gradient = gradient + decay * weight
        if section.name == "SGD":
            if section.momentum and step > 1:
                gradient = gradient + section.momentum * self._previous(
                    name, "momentum_buffer", gradient
                )
            return weight - lr * gradient
        if section.name in ("AdamW", "Muon"):
            weight = weight * (1 - lr * decay)
        if name in self._kinds:
            momentum = section.used_momentum
            average = momentum * self._previous(name, "momentum_buffer", gradient)
            average = average + (1 - momentum) * gradient
            if section.nesterov:
                average = momentum * average + (1 - momentum) * gradient
            return weight - lr * self._orthogonal(average, self._kinds[name])
        beta1, beta2 = section.beta1, section.beta2
        first = beta1 * self._previous(name, "exp_avg", gradient) + (1 - beta1) * gradient
        second = beta2 * self._previous(name, "exp_avg_sq", gradient)
        second = second + (1 - beta2) * gradient * gradient
        first = first / (1 - beta1**step)
        return weight - lr * first / ((second / (1 - beta2**step)).sqrt() + section.eps)

    def _orthogonal(self, average: Tensor, kind: str) -> Tensor:
        """Muon's update (https://kellerjordan.github.io/posts/muon), scaled by its adjust_lr_fn."""
        matrices = average if kind == "stack" else average.flatten(1)[None]
        rows, columns = matrices.shape[1:]
        factor = math.sqrt(max(1, rows / columns))
        if self._section.adjust_lr_fn == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        made = []
        for matrix in matrices:
            x = matrix / max(matrix.norm().item(), 1e-7)
            for _ in range(self._section.ns_steps):
                square = x @ x.T if rows <= columns else x.T @ x
                poly = -4.7750 * square + 2.0315 * square @ square
                x = 3.4445 * x + (poly @ x if rows <= columns else x @ poly)
            made.append(factor * x)
        return torch.stack(made).view(average.shape)

    def _rule(self, name: str) -> str:
        is_adamw = self._section.name == "Muon" and name not in self._kinds
        return "AdamW" if is_adamw else self._section.name

    def _previous(self, name: str, key: str, like: Tensor) -> Tensor:
        """The optimizer state after the previous step; zeros before the first step."""
        kept = self._state.get(f"{name}.{key}")
        return torch.zeros_like(like, dtype=torch.float64) if kept is None else kept.double()


def one_seed_for_all(weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Whether matrices of equal shape start with the same random values."""
    first: dict[tuple[Any, ...], str] = {}
    for name, weight in weights.items():
        # Random tensors have about as many distinct values as elements; constants have few.
        some = weight.flatten()[:4096]
        if weight.ndim < 2 or some.unique().numel() < some.numel() // 2:
            continue
        key = (*weight.shape, _bytes(weight))
        if key in first:
            yield (
                f"{name} and {first[key]} start with the same random values: their generators have "
                "the same seed. Seed each by the parameter's name"
            )
            return
        first[key] = name


def _error(own: Tensor, expected: Tensor) -> float:
    """max|a - b| / max|b|."""
    largest = expected.abs().max().item()
    return (own.double() - expected).abs().max().item() / max(largest, 1e-300)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
