"""A clocked pipeline: in each cycle, a stage runs one forward, one backward, or nothing.

N runs (microbatches) pass through S stages. Stage i runs the forward of run j in cycle i + j. The
last forward on the last stage is in cycle N + S - 2, so that stage starts its backward passes in
the next cycle. Stage i is S - 1 - i stages earlier and starts them in cycle N + 2S - 2 - i. A step
takes 2 (N + S - 1) cycles, and a stage is idle in 2 (S - 1) of them.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from titanlite.errors import TitanliteError
from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.group import wait_all
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.operation import Operation


class PipelineError(TitanliteError, ValueError):
    """A pipeline or its inputs are invalid."""


@dataclass(frozen=True)
class Pipeline:
    """N runs through S stages; stage s is on the device with rank s.

    With `is_training=False` the pipeline only runs forward passes. Raises PipelineError if there
    are no runs or no stages, or fewer devices than stages.
    """

    mesh: Mesh
    num_runs: int
    num_stages: int
    is_training: bool = True

    def __post_init__(self) -> None:
        if self.num_runs < 1 or self.num_stages < 1:
            raise PipelineError(
                f"{self.num_runs} runs and {self.num_stages} stages; there must be at least one of "
                "each"
            )
        if self.num_stages > self.mesh.size:
            raise PipelineError(f"{self.num_stages} stages need as many devices, of {self.mesh}")

    @property
    def num_cycles(self) -> int:
        one_way = self.num_runs + self.num_stages - 1
        return 2 * one_way if self.is_training else one_way

    @property
    def bubble(self) -> float:
        """The fraction of cycles in which a stage is idle: (S - 1) / (N + S - 1)."""
        return (self.num_stages - 1) / (self.num_runs + self.num_stages - 1)

    def stage(self, index: int, cycle: int) -> "PipelineStage":
        return PipelineStage(self, index, cycle)

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
    def num_features(self, stage: int) -> int:
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
        last = pipeline.num_stages - 1
        return [
            (
                list(parameters[rank]) if rank <= last else [],
                num_steps,
                batch_size,
                x if rank == 0 else None,
                targets if rank == last and pipeline.is_training else None,
            )
            for rank in range(mesh.size)
        ]

    def run(self, device: VirtualDevice, *share: Any) -> PipelineResult:
        parameters, num_steps, batch_size, inputs, targets = share
        result, stage = PipelineResult(), device.rank
        if stage >= self.pipeline.num_stages:
            return result
        optimizer = torch.optim.AdamW(parameters, lr=self.lr)
        for step in range(num_steps):
            outputs, gradients = self._run_cycles(
                device,
                parameters,
                batch_size,
                None if inputs is None else inputs[step],
                None if targets is None else targets[step],
                result.losses,
            )
            if not self.pipeline.is_training:
                result.outputs = torch.stack(outputs) if outputs else None
                continue
            if step == 0:
                result.gradients[stage] = gradients
            for tensor, gradient in zip(parameters, gradients, strict=True):
                tensor.grad = gradient
            optimizer.step()
            result.optimizer_states[stage] = optimizer.state_dict()
        result.parameters[stage] = parameters
        return result

    def _run_cycles(
        self,
        device: VirtualDevice,
        parameters: Sequence[torch.Tensor],
        batch_size: int,
        inputs: torch.Tensor | None,
        targets: torch.Tensor | None,
        losses: list[float],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs of the last stage in one step, and the gradients of this one's parameters.

        Only the first stage has `inputs`, only the last `targets`; it appends its mean loss.
        """
        index, num_runs = device.rank, self.pipeline.num_runs
        total_gradients = [torch.zeros_like(tensor) for tensor in parameters]
        of_runs: list[float] = []
        outputs: list[torch.Tensor] = []
        saved: dict[int, Any] = {}
        sending = []
        for cycle in range(self.pipeline.num_cycles):
            stage = self.pipeline.stage(index, cycle)
            run = stage.run
            if run is None:
                continue
            if stage.is_forward:
                if inputs is not None:
                    x = inputs[run]
                else:
                    like = parameters[0].new_empty(batch_size, self.num_features(index))
                    x = device.channel(index - 1).recv(like)
                with record_function(f"F{run}"):
                    y, kept = self.forward(index, parameters, x)
                if self.pipeline.is_training:
                    saved[run] = kept, y
                if stage.is_last:
                    outputs.append(y)
                else:
                    with record_function(f"y{run}"):
                        sending.append(device.channel(index + 1).isend(y))
            else:
                kept, y = saved.pop(run)
                if targets is not None:
                    loss, dy = self.loss(y, targets[run])
                    of_runs.append(loss.item())
                    dy = dy / num_runs
                else:
                    dy = device.channel(index + 1).recv(torch.empty_like(y))
                with record_function(f"B{run}"):
                    dx, gradients = self.backward(index, parameters, kept, dy)
                for total, gradient in zip(total_gradients, gradients, strict=True):
                    total += gradient
                if not stage.is_first:
                    with record_function(f"dy{run}"):
                        sending.append(device.channel(index - 1).isend(dx))
        wait_all(sending)
        if of_runs:
            losses.append(sum(of_runs) / num_runs)
        return outputs, total_gradients

    def join(self, mesh: Mesh, results: Sequence[PipelineResult]) -> PipelineResult:
        last = results[self.pipeline.num_stages - 1]
        joined = PipelineResult(losses=last.losses, outputs=last.outputs)
        for result in results:
            joined.parameters.update(result.parameters)
            joined.gradients.update(result.gradients)
            joined.optimizer_states.update(result.optimizer_states)
        return joined
