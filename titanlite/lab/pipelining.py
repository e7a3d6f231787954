"""A pipeline by the clock: in a cycle each stage does one run forward, or backward, or nothing.

N runs (microbatches) through S stages. Stage i does run j forward in cycle i + j. The last run has
left the last stage when cycle N + S - 2 ends, so that stage starts its backward passes in the next
one, and stage i, S - 1 - i stages further back, in cycle N + 2S - 2 - i. All is done after
2 (N + S - 1) cycles, of which a stage is idle for 2 (S - 1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from titanlite.errors import TitanliteError
from titanlite.lab.device import VirtualDevice
from titanlite.lab.mesh import Mesh
from titanlite.lab.operation import Operation


class PipelineError(TitanliteError, ValueError):
    """A pipeline, or inputs to one, that cannot work."""


@dataclass(frozen=True)
class Pipeline:
    """N runs through S stages, and the rank of the device on which each stage lives.

    Without `ranks` stage s is on device s, round the mesh again where there are more stages than
    devices. `is_training` is false for a pipeline that only serves: forward alone. Raises
    PipelineError for no runs, no stages, or a rank that is not on the mesh.
    """

    mesh: Mesh
    num_runs: int
    num_stages: int
    ranks: tuple[int, ...] = ()
    is_training: bool = True

    def __post_init__(self) -> None:
        if self.num_runs < 1 or self.num_stages < 1:
            raise PipelineError(
                f"{self.num_runs} runs through {self.num_stages} stages; give at least one of each"
            )
        if not self.ranks:
            places = tuple(stage % self.mesh.size for stage in range(self.num_stages))
            object.__setattr__(self, "ranks", places)
        if len(self.ranks) != self.num_stages:
            raise PipelineError(f"{len(self.ranks)} ranks for {self.num_stages} stages")
        for rank in self.ranks:
            self.mesh.index(rank)

    @property
    def num_cycles(self) -> int:
        one_way = self.num_runs + self.num_stages - 1
        return 2 * one_way if self.is_training else one_way

    @property
    def bubble(self) -> float:
        """The share of its cycles in which a stage is idle: (S - 1) / (N + S - 1)."""
        return (self.num_stages - 1) / (self.num_runs + self.num_stages - 1)

    def stage(self, index: int, cycle: int) -> PipelineStage:
        """A stage as it is in a cycle."""
        return PipelineStage(self, index, cycle)

    def stages_on(self, rank: int) -> list[int]:
        """The stages that live on a device."""
        return [stage for stage, place in enumerate(self.ranks) if place == rank]

    def __str__(self) -> str:
        """A row for each stage, a column for each cycle."""
        cells = [
            [str(self.stage(index, cycle)) for cycle in range(self.num_cycles)]
            for index in range(self.num_stages)
        ]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(
            f"stage {index}  " + " ".join(cell.ljust(width) for cell in row).rstrip()
            for index, row in enumerate(cells)
        )


@dataclass(frozen=True)
class PipelineStage:
    """What one stage does in one cycle."""

    pipeline: Pipeline
    index: int
    cycle: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.pipeline.num_stages - 1

    @property
    def is_forward(self) -> bool:
        return 0 <= self.cycle - self.index < self.pipeline.num_runs

    @property
    def is_backward(self) -> bool:
        since = self.cycle - self.backward_start
        return self.pipeline.is_training and 0 <= since < self.pipeline.num_runs

    @property
    def is_idle(self) -> bool:
        return not (self.is_forward or self.is_backward)

    @property
    def backward_start(self) -> int:
        """The cycle of this stage's first backward pass."""
        return self.pipeline.num_runs + 2 * self.pipeline.num_stages - 2 - self.index

    @property
    def run(self) -> int | None:
        """The run it is at; None when idle."""
        if self.is_forward:
            return self.cycle - self.index
        return self.cycle - self.backward_start if self.is_backward else None

    def __str__(self) -> str:
        return "." if self.is_idle else f"{'F' if self.is_forward else 'B'}{self.run}"


@dataclass
class PipelineResult:
    """What comes back: each step's loss; by stage, parameters after the last step, the gradients of
    the first, and the optimizer's state; and of serving, the outputs (runs, batch, features)."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    optimizer_states: dict[int, dict[str, Any]] = field(default_factory=dict)
    outputs: torch.Tensor | None = None


class PipelinedOperation(Operation):
    """A model in stages, run through a Pipeline: `operation(cluster, parameters, inputs, targets)`.

    `parameters` has a list of tensors for each stage; `inputs` and `targets` are (steps, runs,
    batch, features), `targets` None to serve, with one step. In every step the gradients of all
    runs add up, each a share 1 / N of their mean loss, and then every stage's own AdamW applies
    them. Only the first stage's device gets the inputs, only the last one's the targets. Returns a
    PipelineResult. A subclass says what a stage computes.
    """

    def __init__(self, pipeline: Pipeline, *, lr: float = 1e-3) -> None:
        self.pipeline = pipeline
        self.lr = lr

    @abstractmethod
    def forward(
        self, stage: int, parameters: Sequence[torch.Tensor], x: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """A stage's output for its input, and what its backward pass will need."""

    @abstractmethod
    def backward(
        self, stage: int, parameters: Sequence[torch.Tensor], saved: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gradients of a stage's input and of its parameters, from its output's."""

    @abstractmethod
    def loss(self, y: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of one run and the gradient of the last stage's output."""

    @abstractmethod
    def num_features(self, stage: int, parameters: Sequence[torch.Tensor]) -> int:
        """The features of a stage's input."""

    def shares(self, mesh: Mesh, *inputs: Any) -> Sequence[Sequence[Any]]:
        parameters, x, targets = inputs if len(inputs) == 3 else (*inputs, None)
        pipeline = self.pipeline
        if len(parameters) != pipeline.num_stages:
            raise PipelineError(
                f"parameters of {len(parameters)} stages for {pipeline.num_stages} stages"
            )
        if x.ndim != 4 or x.shape[1] != pipeline.num_runs:
            raise PipelineError(
                f"inputs of shape {tuple(x.shape)}; give (steps, {pipeline.num_runs} runs, batch, "
                "features)"
            )
        if pipeline.is_training and (targets is None or targets.shape[:3] != x.shape[:3]):
            raise PipelineError("a pipeline that trains needs a target for every row of its inputs")
        num_steps, _, batch_size, _ = x.shape
        return [
            (
                {stage: list(parameters[stage]) for stage in pipeline.stages_on(rank)},
                num_steps,
                batch_size,
                x if rank == pipeline.ranks[0] else None,
                targets if rank == pipeline.ranks[-1] and pipeline.is_training else None,
            )
            for rank in range(mesh.size)
        ]

    def run(self, device: VirtualDevice, *share: Any) -> PipelineResult:
        parameters, num_steps, batch_size, inputs, targets = share
        result = PipelineResult(parameters=parameters)
        optimizers = {
            stage: torch.optim.AdamW(tensors, lr=self.lr) for stage, tensors in parameters.items()
        }
        for step in range(num_steps):
            cycles = _Cycles(self, device, parameters, batch_size)
            outputs, loss = cycles.run(
                None if inputs is None else inputs[step], None if targets is None else targets[step]
            )
            if targets is not None:
                result.losses.append(loss)
            if outputs and not self.pipeline.is_training:
                result.outputs = torch.stack(outputs)
            if not self.pipeline.is_training:
                continue
            for stage, optimizer in optimizers.items():
                for tensor, gradient in zip(
                    parameters[stage], cycles.gradients[stage], strict=True
                ):
                    tensor.grad = gradient
                optimizer.step()
                result.optimizer_states[stage] = optimizer.state_dict()
            if step == 0:
                result.gradients = cycles.gradients
        return result

    def join(self, mesh: Mesh, results: Sequence[PipelineResult]) -> PipelineResult:
        last = results[self.pipeline.ranks[-1]]
        joined = PipelineResult(losses=last.losses, outputs=last.outputs)
        for result in results:
            joined.parameters.update(result.parameters)
            joined.gradients.update(result.gradients)
            joined.optimizer_states.update(result.optimizer_states)
        return joined


class _Cycles:
    """One device's cycles of one step, over all stages that live on it."""

    def __init__(
        self,
        operation: PipelinedOperation,
        device: VirtualDevice,
        parameters: dict[int, list[torch.Tensor]],
        batch_size: int,
    ) -> None:
        self.operation = operation
        self.pipeline = operation.pipeline
        self.device = device
        self.parameters = parameters
        self.batch_size = batch_size
        self.gradients = {
            stage: [torch.zeros_like(tensor) for tensor in tensors]
            for stage, tensors in parameters.items()
        }
        self._saved: dict[tuple[int, int], Any] = {}
        # What one stage hands to another on the same device.
        self._here: dict[tuple[int, int, str], torch.Tensor] = {}
        self._sending: list[Any] = []

    def run(
        self, inputs: torch.Tensor | None, targets: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], float]:
        """The last stage's outputs and mean loss, where it lives here; else none and zero."""
        outputs: list[torch.Tensor] = []
        total_loss = 0.0
        for cycle in range(self.pipeline.num_cycles):
            for index, parameters in self.parameters.items():
                stage = self.pipeline.stage(index, cycle)
                run = stage.run
                if run is None:
                    continue
                if stage.is_forward:
                    if stage.is_first:
                        assert inputs is not None
                        x = inputs[run]
                    else:
                        shape = (self.batch_size, self.operation.num_features(index, parameters))
                        x = self._take(index, run, "y", index - 1, parameters[0].new_empty(shape))
                    y, saved = self.operation.forward(index, parameters, x)
                    if self.pipeline.is_training:
                        self._saved[index, run] = (saved, y)
                    if stage.is_last:
                        outputs.append(y)
                    else:
                        self._give(index + 1, run, "y", y)
                else:
                    saved, y = self._saved.pop((index, run))
                    if stage.is_last:
                        assert targets is not None
                        loss, dy = self.operation.loss(y, targets[run])
                        total_loss += loss.item() / self.pipeline.num_runs
                        dy = dy / self.pipeline.num_runs
                    else:
                        dy = self._take(index, run, "dy", index + 1, torch.empty_like(y))
                    dx, gradients = self.operation.backward(index, parameters, saved, dy)
                    for total, gradient in zip(self.gradients[index], gradients, strict=True):
                        total += gradient
                    if not stage.is_first:
                        self._give(index - 1, run, "dy", dx)
        for transfer in self._sending:
            transfer.wait()
        return outputs, total_loss

    def _give(self, to_stage: int, run: int, what: str, tensor: torch.Tensor) -> None:
        rank = self.pipeline.ranks[to_stage]
        if rank == self.device.rank:
            self._here[to_stage, run, what] = tensor
        else:
            self._sending.append(self.device.channel(rank).isend(tensor))

    def _take(
        self, stage: int, run: int, what: str, from_stage: int, into: torch.Tensor
    ) -> torch.Tensor:
        rank = self.pipeline.ranks[from_stage]
        if rank == self.device.rank:
            return self._here.pop((stage, run, what))
        return self.device.channel(rank).recv(into)
