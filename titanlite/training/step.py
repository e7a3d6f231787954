"""One training step and one evaluation, over any plan's model."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.batch import Batch, call_model
from titanlite.errors import NonFiniteError
from titanlite.training.gradient_norm import (
    clip_gradients,
    gradient_norm,
    reduce_partial_gradients,
)
from titanlite.training.loss import Loss, loss_context
from titanlite.training.non_finite import explain_non_finite


@dataclass(frozen=True)
class StepResult:
    """What a step did: mean loss (nats a target), gradient norm before clipping, learning rate."""

    loss: float
    grad_norm: float
    lr: float
    num_targets: int
    seconds: float
    note: str = ""
    """Why the weights are as before the step, where they are."""


class Stages(Protocol):
    """What runs the parts of a split model: a pipeline's schedule."""

    @property
    def numbers(self) -> Sequence[int]:
        """Which of the model's stages the parts are."""

    def step(
        self, batch: Batch, loss_function: Callable[[Any, Batch], Tensor], *, is_last: bool
    ) -> None:
        """Forward and backward; the loss function is called where the last stage is.

        `is_last` says that no batch of the same training step follows.
        """

    def forward(self, batch: Batch) -> Any:
        """What the model puts out, where the last stage is; None elsewhere."""


@dataclass
class Trainer:
    """A model with its optimizer: what a step works on.

    `parts` are the model, or this rank's parts of one that is split into stages, which `stages`
    then runs. `is_counted` says whether this rank's loss and targets enter the sums over the world:
    of the ranks that see the same tokens, one, which has the loss. `logits_are_sharded` is true
    under loss parallelism. `non_finite` says what becomes of a step whose loss or gradient norm is
    not finite: "stop" raises NonFiniteError, "skip" leaves it out, "ignore" takes it.
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
    """Called by `step` when the gradients are there, before any weight changes."""

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
        """Train on this rank's part of one global batch, in one or several batches.

        `number` is what a message calls this step; the schedule's, where none is given.
        `on_gradients` is called when the gradients are on the parameters, neither clipped nor used.
        """
        start = time.perf_counter()
        loss, num_targets = self.compute_gradients(batches)
        if on_gradients is not None:
            on_gradients()
        norm = gradient_norm(self.parameters, self.world_mesh)
        if self.before_update is not None:
            self.before_update()
        note = ""
        if self.non_finite != "ignore" and not (math.isfinite(loss) and torch.isfinite(norm)):
            number = number or self.scheduler.last_epoch + 1
            note = self._refuse(batches, number, loss, float(norm))
            lr = self._skip()
        else:
            lr = self._update(norm)
        return StepResult(loss, float(norm), lr, num_targets, time.perf_counter() - start, note)

    def compute_gradients(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """The part of a step that leaves gradients on the parameters; mean loss and targets."""
        num_targets = self._count_targets(batches)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            for loss in self._forward_backward(batch, num_targets, is_last=is_last):
                loss_sum += loss
        reduce_partial_gradients(self.parameters)
        return self._world_sum(loss_sum) / num_targets, num_targets

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss (nats a target) over the batches of all ranks; all have as many."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for part in self.parts:
            part.eval()
        for batch in batches:
            with loss_context(self.logits_are_sharded):
                if self.stages is None:
                    outputs = call_model(self.parts[0], batch)
                else:
                    outputs = self.stages.forward(batch)
                if outputs is not None:
                    totals[0] += self.loss.total(outputs, batch)
            totals[1] += self.loss.count(batch)
        for part in self.parts:
            part.train()
            # What stays gathered after a forward pass waits for a backward pass to be freed: until
            # then the model has other parameters than the optimizer.
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        loss_sum, num_targets = self._world_sums(totals)
        return loss_sum / num_targets

    def _update(self, norm: Tensor) -> float:
        """Clip by the norm, update the weights and clear; the learning rate."""
        clip_gradients(self.parameters, norm, self.max_norm)
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _skip(self) -> float:
        """Clear, and let the learning rate go on; the learning rate that was not used."""
        lr = self.optimizer.param_groups[0]["lr"]
        with warnings.catch_warnings():
            # torch warns where the first update of all is left out.
            warnings.simplefilter("ignore", UserWarning)
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _refuse(self, batches: Sequence[Batch], step: int, loss: float, norm: float) -> str:
        """Say where a step's values stopped being finite; raise it unless such steps are skipped.

        Every rank comes here, since loss and norm are the same on all.
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
            '(debug.non_finite = "skip" leaves such a step out and goes on)'
        )

    def _forward_backward(self, batch: Batch, num_targets: int, *, is_last: bool) -> list[Tensor]:
        """Add the batch's gradients to the parameters'; the loss sums that this rank has seen.

        They are one; one a microbatch where the last stage of a pipeline is, and none elsewhere.
        Replicas exchange gradients with the last batch of a step; FSDP2's shards do so with each,
        since keeping gradients whole would undo the sharding.
        """
        sums = []

        def loss_function(outputs: Any, batch: Batch) -> Tensor:
            loss = self.loss.total(outputs, batch)
            sums.append(loss.detach())
            return loss / num_targets

        # Around the backward pass too, as sharded logits need it.
        with loss_context(self.logits_are_sharded):
            if self.stages is not None:
                self.stages.step(batch, loss_function, is_last=is_last)
            else:
                self._set_replica_sync(enabled=is_last)
                loss_function(call_model(self.parts[0], batch), batch).backward()
        return sums

    def _count_targets(self, batches: Sequence[Batch]) -> int:
        counts = [self.loss.count(batch) for batch in batches]
        # At least one: a step without any target has a loss of zero, not one of 0 / 0.
        return max(1, int(self._world_sum(torch.stack(counts).sum().double())))

    def _set_replica_sync(self, *, enabled: bool) -> None:
        model: Any = self.parts[0]
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(enabled)
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(enabled)

    def _world_sum(self, value: Tensor) -> float:
        return self._world_sums(value.reshape(1))[0]

    def _world_sums(self, values: Tensor) -> list[float]:
        values = values if self.is_counted else torch.zeros_like(values)
        dist.all_reduce(values)
        return values.tolist()
