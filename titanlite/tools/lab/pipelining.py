"""A clocked pipeline: in each cycle, a stage runs one forward, one backward, or nothing.

N runs (microbatches) pass through S stages. Stage i runs the forward of run j in cycle i + j. The
last forward on the last stage is in cycle N + S - 2, so that stage starts its backward passes in
the next cycle. Stage i is S - 1 - i stages earlier and starts them in cycle N + 2S - 2 - i. A step
takes 2 (N + S - 1) cycles, and a stage is idle in 2 (S - 1) of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from titanlite.errors import TitanliteError
from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.operation import Operation


class PipelineError(TitanliteError, ValueError):
    """A pipeline or its inputs are invalid."""


@dataclass(frozen=True)
class Pipeline:
    """N runs through S stages, and the rank of each stage's device.

    By default, stage s is on device s modulo the size of the mesh. With `is_training=False` the
    pipeline only runs forward passes. Raises PipelineError if there are no runs or no stages, or
    not one rank per stage; MeshError if a rank is not on the mesh.
    """

    mesh: Mesh
    num_runs: int
    num_stages: int
    ranks: tuple[int, ...] = ()
    is_training: bool = True

    def __post_init__(self) -> None:
        if self.num_runs < 1 or self.num_stages < 1:
            raise PipelineError(
                f"{self.num_runs} runs and {self.num_stages} stages; there must be at least one of "
                "each"
            )
        if not self.ranks:
            places = tuple(stage % self.mesh.size for stage in range(self.num_stages))
            object.__setattr__(self, "ranks", places)
        if len(self.ranks) != self.num_stages:
            raise PipelineError(
                f"{len(self.ranks)} ranks for {self.num_stages} stages; give one rank per stage"
            )
        for rank in self.ranks:
            self.mesh.index(rank)

    @property
    def num_cycles(self) -> int:
        one_way = self.num_runs + self.num_stages - 1
        return 2 * one_way if self.is_training else one_way

    @property
    def bubble(self) -> float:
        """The fraction of cycles in which a stage is idle: (S - 1) / (N + S - 1)."""
        return (self.num_stages - 1) / (self.num_runs + self.num_stages - 1)

    def stage(self, index: int, cycle: int) -> PipelineStage:
        """The stage `index` in the cycle `cycle`."""
        return PipelineStage(self, index, cycle)

    def stages_on(self, rank: int) -> list[int]:
        """The stages on the device `rank`."""
        return [stage for stage, place in enumerate(self.ranks) if place == rank]

    def __str__(self) -> str:
        """A table with one row per stage and one column per cycle."""
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
    """The work of one stage in one cycle."""

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
        """The run that the stage works on; None if idle."""
        if self.is_forward:
            return self.cycle - self.index
        return self.cycle - self.backward_start if self.is_backward else None

    def __str__(self) -> str:
        return "." if self.is_idle else f"{'F' if self.is_forward else 'B'}{self.run}"


@dataclass
class PipelineResult:
    """The result of a PipelinedOperation.

    `losses` has one value per step. By stage: `parameters` after the last step, `gradients` of the
    first step, and `optimizer_states`. `outputs` (runs, batch, features) is set in inference only.
    """

    losses: list[float] = field(default_factory=list)
    parameters: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    optimizer_states: dict[int, dict[str, Any]] = field(default_factory=dict)
    outputs: torch.Tensor | None = None


class PipelinedOperation(Operation):
    """A model that runs on a Pipeline: `operation(cluster, parameters, inputs, targets)`.

    `parameters` has one list of tensors per stage. `inputs` and `targets` are (steps, runs, batch,
    features); for inference, `targets` is None and there is one step. In every step, the gradients
    of all N runs accumulate, each divided by N, and then each stage's own AdamW applies them. Only
    the first stage's device receives the inputs, only the last one's the targets. Returns a
    PipelineResult. A subclass defines the computation of a stage.
    """

    def __init__(self, pipeline: Pipeline, *, lr: float = 1e-3) -> None:
        self.pipeline = pipeline
        self.lr = lr

    @abstractmethod
    def forward(
        self, stage: int, parameters: Sequence[torch.Tensor], x: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """The output of a stage for its input, and the values saved for its backward pass."""

    @abstractmethod
    def backward(
        self, stage: int, parameters: Sequence[torch.Tensor], saved: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gradients of a stage's input and parameters, given the gradient of its output."""

    @abstractmethod
    def loss(self, y: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of one run and the gradient of the last stage's output."""

    @abstractmethod
    def num_features(self, stage: int, parameters: Sequence[torch.Tensor]) -> int:
        """The number of features of a stage's input."""

    def shares(self, mesh: Mesh, *inputs: Any) -> Sequence[Sequence[Any]]:
        parameters, x, targets = inputs if len(inputs) == 3 else (*inputs, None)
        pipeline = self.pipeline
        if len(parameters) != pipeline.num_stages:
            raise PipelineError(
                f"parameters: there are {len(parameters)} lists for {pipeline.num_stages} stages; "
                "give one per stage"
            )
        if x.ndim != 4 or x.shape[1] != pipeline.num_runs:
            raise PipelineError(
                f"inputs: the shape is {tuple(x.shape)}; it must be (steps, {pipeline.num_runs} "
                "runs, batch, features)"
            )
        if pipeline.is_training and (targets is None or targets.shape[:3] != x.shape[:3]):
            raise PipelineError("targets: training needs a target for every row of the inputs")
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
    """The cycles of one step on one device, for all of its stages."""

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
        # Tensors that one stage passes to another on the same device.
        self._here: dict[tuple[int, int, str], torch.Tensor] = {}
        self._sending: list[Any] = []

    def run(
        self, inputs: torch.Tensor | None, targets: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], float]:
        """Outputs and mean loss of the last stage; an empty list and zero on other devices."""
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
                    with record_function(f"F{run}"):
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
                    with record_function(f"B{run}"):
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
            with record_function(f"{what}{run}"):
                self._sending.append(self.device.channel(rank).isend(tensor))

    def _take(
        self, stage: int, run: int, what: str, from_stage: int, into: torch.Tensor
    ) -> torch.Tensor:
        rank = self.pipeline.ranks[from_stage]
        if rank == self.device.rank:
            return self._here.pop((stage, run, what))
        return self.device.channel(rank).recv(into)
