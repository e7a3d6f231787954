"""One training step and one evaluation, for the model of any plan."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from titanlite.errors import NonFiniteError, TitanliteError
from titanlite.mesh.parallel_dims import axes_where
from titanlite.modules.batch import Batch, call_model
from titanlite.modules.experts import Balancer
from titanlite.modules.gradient_sums import GradientSums
from titanlite.modules.names import canonical_name
from titanlite.training.averaging import WeightAverage
from titanlite.training.generators import Generators
from titanlite.training.loss import Loss, whole_loss
from titanlite.training.metrics import Metric, ValidationResult, sums_of
from titanlite.training.non_finite import explain_non_finite
from titanlite.training.norm import clip_gradients, own_squares, reduce_partial_gradients
from titanlite.training.optimizer import base_lr


@dataclass(frozen=True)
class StepResult:
    """A step's mean loss (nats per target), gradient norm before clipping, and learning rate."""

    loss: float
    grad_norm: float
    lr: float
    num_targets: float
    seconds: float
    note: str = ""
    """Why the step was skipped; "" if the weights were updated."""
    auxiliary_loss: float | None = None
    """The auxiliary loss of the experts, which `loss` does not contain; None if there is none."""
    stops: bool = False
    """Whether any rank wants the run to stop."""


class TiedCopies(Protocol):
    """The copies of tied weights in the stages of a pipeline."""

    def sum_gradients(self) -> None:
        """Sum the gradient of each tied weight over the stages that have a copy of it."""

    def repeated(self) -> list[nn.Parameter]:
        """This rank's parameters of which another copy counts in the gradient norm."""


class Stages(Protocol):
    """Runs the parts of a model that is split into stages: a pipeline schedule."""

    @property
    def copies(self) -> TiedCopies:
        """The copies of tied weights."""

    @property
    def numbers(self) -> Sequence[int]:
        """The stage numbers of the parts."""

    def step(
        self, batch: Batch, loss_function: Callable[[Any, Batch], Tensor], *, is_last: bool
    ) -> None:
        """Run forward and backward; the rank of the last stage calls the loss function.

        `is_last` says that this is the last batch of the training step.
        """

    def forward(self, batch: Batch) -> Any:
        """The model's output on the rank of the last stage; None on the others."""


@dataclass
class Trainer:
    """A model with its optimizer and schedule, and the training step.

    `parts` is the whole model, or the modules of this rank's stages, which the PipelineRunner
    `stages` runs. `is_counted` says whether this rank's loss and targets enter the sums over the
    world: of the ranks with the same tokens exactly one is counted (`ParallelDims.counts_loss`),
    and in a pipeline only ranks of the last stage. `logits_are_sharded` is true under loss
    parallelism. On a non-finite loss or gradient norm, `non_finite` "stop" raises NonFiniteError,
    "skip" skips the update, "ignore" applies it.
    """

    parts: list[nn.Module]
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loss: Loss
    world_mesh: DeviceMesh
    max_norm: float
    is_counted: bool
    logits_are_sharded: bool = False
    stages: Stages | None = None
    non_finite: str = "stop"
    before_update: Callable[[], None] | None = None
    """Called by `step` after the gradients are computed and before any weight changes."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What `evaluate` computes besides the loss."""
    balancer: Balancer | None = None
    """Balances the experts of a model that has any."""
    reduce_partial: Callable[[Iterable[nn.Parameter]], None] | None = None
    """Completes the gradients that DTensor has left Partial; None: reduce_partial_gradients."""
    average: WeightAverage | None = None
    """The average of the weights, which `evaluate` takes."""
    generators: Generators | None = None
    """Seeds the random generators before each step and each validation."""
    wants_stop: Callable[[], bool] = bool
    """Asked in each step; StepResult.stops is true on every rank if it is on any."""

    def __post_init__(self) -> None:
        self._sums = GradientSums(self.parts)
        self._is_complete = False

    @property
    def _device(self) -> torch.device:
        return torch.device(self.world_mesh.device_type)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for part in self.parts for p in part.parameters() if p.requires_grad]

    def step(
        self,
        batches: Sequence[Batch],
        number: int | None = None,
        *,
        on_gradients: Callable[[], None] | None = None,
    ) -> StepResult:
        """Train on this rank's part of one global batch, given as one or several batches.

        `number` is the step's number in error messages, by default the schedule's. `on_gradients`
        is called when the gradients are complete, before they are used.
        """
        start = time.perf_counter()
        loss_sum, num_targets = self._compute_gradients(batches)
        if on_gradients is not None:
            on_gradients()
        repeated = set() if self.stages is None else set(self.stages.copies.repeated())
        counted = [parameter for parameter in self.parameters if parameter not in repeated]
        squares = own_squares(counted, self.world_mesh)
        stop = torch.full_like(squares, float(self.wants_stop()))
        sums = torch.stack([loss_sum, squares, stop])
        _sum_loss_and_norm(sums)
        norm = sums[1] = sums[1].sqrt()
        if self.before_update is not None:
            self.before_update()
        note = ""
        whole_sum, grad_norm, asked = self._read(sums)
        loss = whole_sum / num_targets
        if self.non_finite != "ignore" and not math.isfinite(loss + grad_norm):
            number = number or self.scheduler.last_epoch + 1
            note = self._refuse(batches, number, loss, grad_norm)
            lr = self._skip()
        else:
            lr = self._update(norm)
        seconds = time.perf_counter() - start
        auxiliary = None if self.balancer is None else self.balancer.loss
        return StepResult(loss, grad_norm, lr, num_targets, seconds, note, auxiliary, asked > 0)

    def compute_gradients(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Run the forward and backward passes of a step; returns (mean loss, number of targets)."""
        loss_sum, num_targets = self._compute_gradients(batches)
        (whole_sum,) = self._read(self._summed(loss_sum).unsqueeze(0))
        return whole_sum / num_targets, num_targets

    def _compute_gradients(self, batches: Sequence[Batch]) -> tuple[Tensor, float]:
        """This rank's part of the sum of losses, and the number of targets of all ranks."""
        if self.generators is not None:
            self.generators.start_step(self.scheduler.last_epoch + 1)
        num_targets = self._count_targets(batches)
        if self.balancer is not None:
            self.balancer.start(self._count_sequences(batches))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            for loss in self._forward_backward(batch, num_targets, is_last=is_last):
                loss_sum += loss
        self._require_gradients()
        (self.reduce_partial or reduce_partial_gradients)(self.parameters)
        self._sums.sum()
        if self.stages is not None:
            self.stages.copies.sum_gradients()
        if self.balancer is not None:
            self.balancer.finish()
        if self.generators is not None:
            self.generators.end_step()
        return loss_sum if self.is_counted else torch.zeros_like(loss_sum), num_targets

    def _read(self, values: Tensor) -> list[float]:
        """Float64 [N] as numbers, read together with the balancer's: a step's one wait."""
        return values.tolist() if self.balancer is None else self.balancer.read(values)

    def _require_gradients(self) -> None:
        """Raises TitanliteError if DDP waits for a gradient that has not come.

        DDP reduces a bucket once it is complete; in this step, it does not say that one is not.
        """
        if self._is_complete or not _is_replica(self.parts[0]):
            return
        unused = [
            canonical_name(name)
            for name, parameter in self.parts[0].named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if unused:
            shown = ", ".join(unused[:6]) + (", ..." if len(unused) > 6 else "")
            raise TitanliteError(
                f"the loss does not depend on {shown}, and DDP waits for the gradient of every "
                "trained parameter; set requires_grad of these to False, or shard with FSDP "
                "(parallelism.data_parallel_shard_degree)"
            )
        self._is_complete = True

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has the average of its weights, if the job keeps one."""
        return nullcontext() if self.average is None else self.average.applied()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> ValidationResult:
        """The mean loss and the metrics of all ranks' batches; ranks must have equally many.

        Raises TitanliteError, on all ranks, if no batch of any rank has a target.
        """
        with self.averaged():
            totals = self._totals(batches)
        (loss_sum, num_targets), *sums = self._summed(totals).tolist()
        if not num_targets:
            raise TitanliteError(
                "validation.dataset: the samples that are read have no target, so their loss has "
                "no mean; give a data set with targets, or set validation.enable = false"
            )
        means = [total / count if count else math.nan for total, count in sums]
        return ValidationResult(loss_sum / num_targets, dict(zip(self.metrics, means, strict=True)))

    def _totals(self, batches: Iterable[Batch]) -> Tensor:
        """This rank's sum and count of the loss, then of each metric: float64 [1 + metrics, 2]."""
        totals = torch.zeros(1 + len(self.metrics), 2, dtype=torch.float64, device=self._device)
        if self.generators is not None:
            self.generators.start_validation()
        for part in self.parts:
            part.eval()
        for batch in batches:
            with loss_parallel() if self.logits_are_sharded else nullcontext():
                if self.stages is None:
                    outputs = call_model(self.parts[0], batch)
                else:
                    outputs = self.stages.forward(batch)
                if outputs is not None:
                    totals[0, 0] += whole_loss(self.loss.total(outputs, batch))
            totals[0, 1] += self.loss.count(batch)
            if outputs is not None:
                sums_of(self.metrics, outputs, batch, totals[1:])
        for part in self.parts:
            part.train()
            # Until a backward pass, weights that stay gathered are not those of the optimizer.
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return totals

    def _update(self, norm: Tensor) -> float:
        """Clip, update the weights and clear the gradients; returns the learning rate."""
        clip_gradients(self.parameters, norm, self.max_norm)
        lr = base_lr(self.optimizer)
        if self.balancer is not None:
            self.balancer.update()
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.scheduler.last_epoch + 1)
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _skip(self) -> float:
        """Clear the gradients and advance the schedule; returns the unused learning rate."""
        lr = base_lr(self.optimizer)
        with warnings.catch_warnings():
            # torch warns if the schedule is advanced before the first update.
            warnings.simplefilter("ignore", UserWarning)
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _refuse(self, batches: Sequence[Batch], step: int, loss: float, norm: float) -> str:
        """Describe the origin of non-finite values; raise NonFiniteError unless `non_finite` skips.

        All ranks call this together, since loss and norm are the same on all.
        """
        numbers = (0,) if self.stages is None else self.stages.numbers
        cause = explain_non_finite(
            dict(zip(numbers, self.parts, strict=True)),
            lambda: self.compute_gradients(batches)[0],
            self.world_mesh,
        )
        text = f"step {step}: loss {loss:g}, gradient norm {norm:g}; {cause}"
        if self.non_finite == "skip":
            return f"{text}; the step is skipped"
        raise NonFiniteError(
            f"{text}; stopped with the weights of step {step - 1} "
            '(debug.non_finite = "skip" skips such steps and continues)'
        )

    def _forward_backward(self, batch: Batch, num_targets: float, *, is_last: bool) -> list[Tensor]:
        """Add the batch's gradients to the parameters'; returns the loss sums of this rank.

        There is one loss sum; in a pipeline the last stage has one per microbatch, other stages
        none. Replicas reduce gradients only in the last batch of a step. FSDP2's shards reduce them
        in every batch, since unsharded gradients would undo the sharding.
        """
        sums = []

        def loss_function(outputs: Any, batch: Batch) -> Tensor:
            loss = whole_loss(self.loss.total(outputs, batch))
            if not loss.requires_grad:
                raise TitanliteError(
                    "the loss has no gradient: the model or the loss computes it under "
                    "torch.no_grad(), detaches it, or uses no trained parameter"
                )
            sums.append(loss.detach())
            return loss / num_targets

        # A user's loss of sharded logits needs the context in the backward pass too.
        with loss_parallel() if self.logits_are_sharded else nullcontext():
            if self.stages is not None:
                self.stages.step(batch, loss_function, is_last=is_last)
            else:
                self._set_replica_sync(enabled=is_last)
                loss_function(call_model(self.parts[0], batch), batch).backward()
        return sums

    def _count_targets(self, batches: Sequence[Batch]) -> float:
        # Counted in the host's memory and summed by gloo, no number waits for the device.
        counts = [torch.as_tensor(self.loss.count(b.on_host or b)) for b in batches]
        total = float(self._summed(torch.stack(counts).sum().double()))
        # One, if there is none: a step without targets has a loss of zero instead of 0 / 0.
        return (int(total) if total.is_integer() else total) or 1

    def _count_sequences(self, batches: Sequence[Batch]) -> int:
        """The sequences of the step on all ranks."""
        number = torch.tensor(float(sum(batch.num_sequences for batch in batches)))
        axes = set(axes_where(batch="tokens")) & {*(self.world_mesh.mesh_dim_names or ())}
        shards = math.prod(self.world_mesh[axis].size() for axis in axes)
        # A traced step has arbitrary values.
        return max(1, round(float(self._summed(number.double())) / shards))

    def _set_replica_sync(self, *, enabled: bool) -> None:
        model: Any = self.parts[0]
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(enabled)
        elif _is_replica(model):
            model.set_requires_gradient_sync(enabled)

    def _summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks of the world that count."""
        values = values if self.is_counted else torch.zeros_like(values)
        dist.all_reduce(values)
        return values


def _is_replica(part: nn.Module) -> bool:
    """Whether DDP wraps the part."""
    return hasattr(part, "set_requires_gradient_sync") and not isinstance(part, FSDPModule)


def _sum_loss_and_norm(sums: Tensor) -> None:
    """All-reduce what a step sums over the world: a recorded step shows this name."""
    dist.all_reduce(sums)
