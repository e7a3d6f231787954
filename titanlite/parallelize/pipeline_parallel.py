"""Pipeline parallelism: a model split into stages, and the schedule that runs them.

    split_model         splits a model into stages; modules keep their names
    PipelineRunner      runs the stages of one rank: a scheduled step, or only a forward pass

Between the two, each stage goes through the same parallelize steps as a whole model.
torch.distributed.pipelining executes the schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from titanlite.batch import Batch, asked_for, call_model, join
from titanlite.errors import TitanliteError
from titanlite.parallelize.stage_copies import StageCopies
from titanlite.schedule import Schedule
from titanlite.schedule.actions import COMPUTE_KINDS


def split_model(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    forward: Callable[..., Any] | None = None,
) -> list[nn.Module]:
    """Copies of `model`, one per stage, each with only the modules that the stage names.

    Modules keep their names. A module of another stage is removed from its ModuleDict, or set to
    None if it is an attribute. No module may be named by two stages; modules and parameters that no
    stage names are in every copy, and a tied weight is in every stage that has one of its names
    (stage_copies.py). `forward(stage, x, ...)` becomes the forward of every stage if it is given.
    Raises TitanliteError for a name that the model does not have.
    """
    names = [name for stage in stages for name in stage]
    for name in names:
        try:
            model.get_submodule(name)
        except AttributeError:
            raise TitanliteError(
                f"{type(model).__name__} has no module '{name}', which a stage names"
            ) from None
    parts = []
    for stage in stages:
        part = copy.deepcopy(model)
        for name in set(names) - set(stage):
            parent_name, _, leaf = name.rpartition(".")
            parent = part.get_submodule(parent_name)
            if isinstance(parent, nn.ModuleDict):
                del parent[leaf]
            else:
                setattr(parent, leaf, None)
        if forward is not None:
            part.forward = MethodType(forward, part)
        parts.append(part)
    return parts


class _ContiguousGradient(torch.autograd.Function):
    """The identity, with a gradient that can be sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _send_contiguous(part: nn.Module, *, is_first: bool, is_last: bool) -> None:
    """Make what a stage sends contiguous, since P2P messages must be: its output and gradient."""

    def of_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return _ContiguousGradient.apply(inputs[0]), *inputs[1:]

    def of_output(_: nn.Module, __: Any, output: Any) -> Any:
        return output.contiguous() if isinstance(output, Tensor) else output

    if not is_first:
        part.register_forward_pre_hook(of_input)
    if not is_last:
        part.register_forward_hook(of_output)


def _batch_dim(batch: Batch, name: str, value: Any) -> int | None:
    """The dimension of an argument of forward along which microbatches are split, if any.

    An argument that is not a field of the batch is split along dimension 0 if that counts samples.
    """
    if name in batch.fields and value is batch[name]:
        return batch.dims[name].batch
    is_split = isinstance(value, Tensor) and value.ndim > 0 and batch.num_sequences > 1
    return 0 if is_split and value.size(0) == batch.num_sequences else None


LossFunction = Callable[[Any, Batch], Tensor]


class _Stage(PipelineStage):
    """A stage that reduces gradients over replicas on request, not after every schedule run."""

    reduces_over_replicas = True

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # At the first step, torch 2.11 sends a message between neighbouring stages, which NCCL
        # needs. In a V-shaped schedule both may be on one rank, and gloo cannot send to itself.
        parent: Any = super()
        return [] if self.device.type == "cpu" else parent._get_init_p2p_neighbors_ops()

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """No check: torch 2.11 compares even strides of size-1 dimensions and last outputs."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        part: Any = self.submod
        if self.reduces_over_replicas or not isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(grad_scale_factor)
            return

        def reduce_over_shards(required: bool) -> None:
            FSDPModule.set_requires_gradient_sync(part, required)
            FSDPModule.set_requires_all_reduce(part, False)

        # PyTorch's method enables both reductions at once and then runs them.
        part.set_requires_gradient_sync = reduce_over_shards
        try:
            super().perform_reduce_grad(grad_scale_factor)
        finally:
            del part.set_requires_gradient_sync


class PipelineRunner:
    """Runs the stages of one rank of the 1-D `pp_mesh` by a schedule.

    `parts` maps stages to this rank's parallelized modules. `plain_parts` are the modules of all
    stages as split_model returns them, on the "meta" device; they give the shapes of activations
    between stages. These have dtype `dtype` and are sharded `num_shards` ways along `sequence_dim`,
    or replicated if that is None. `example` is one of this rank's microbatches; only its shapes and
    dtypes are used. A batch has `schedule.num_microbatches` microbatches. If PyTorch has a schedule
    class named `schedule.name`, that class is used. Otherwise, or with `from_table`, PyTorch's
    general runtime executes the list of actions that `schedule` has for each rank. `tied` is
    find_tied of the whole model. If stages share parameters, the caller must call the runner's
    `copies.sum_gradients()` after the last batch of a step, which sums their gradients over stages.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Mapping[int, nn.Module],
        plain_parts: Sequence[nn.Module],
        pp_mesh: DeviceMesh,
        *,
        example: Batch,
        dtype: torch.dtype,
        num_shards: int = 1,
        sequence_dim: int | None = 0,
        from_table: bool = False,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.table = schedule
        self._parts = dict(sorted(parts.items()))
        self._plain_parts = plain_parts
        self.group = pp_mesh.get_group()
        self._device = torch.device(pp_mesh.device_type)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._example, self._dtype = example.to(torch.device("meta")), dtype
        self._num_shards, self._sequence_dim = num_shards, sequence_dim
        self._tied = tied or {}
        self.copies = StageCopies(
            self._tied,
            self._parts,
            plain_parts,
            schedule.stage_to_rank,
            self.group,
            self._device,
        )
        self._known_shapes: dict[int, list[torch.Size]] = {}
        # The batch and loss function of the running step.
        self._batch: Batch | None = None
        self._loss_function: LossFunction | None = None
        self.on_loss: Callable[[], None] | None = None
        """Called after the loss of each microbatch, within the last stage's forward pass."""
        for stage, part in self._parts.items():
            _send_contiguous(part, is_first=stage == 0, is_last=stage == self.table.num_stages - 1)
        self.stages = [self._make_stage(stage) for stage in self._parts]
        self._schedule = self._make_schedule(from_table)

    @property
    def numbers(self) -> Sequence[int]:
        """The stages of this rank, in ascending order."""
        return list(self._parts)

    @property
    def has_first(self) -> bool:
        return 0 in self._parts

    @property
    def has_last(self) -> bool:
        return self.table.num_stages - 1 in self._parts

    def step(self, batch: Batch, loss_function: LossFunction, *, is_last: bool = True) -> None:
        """Run the schedule on a batch and accumulate the gradients.

        Every stage gets the fields that its forward takes. The rank with the last stage calls
        `loss_function(outputs, microbatch)` for each microbatch; the gradients are those of the sum
        of losses. If a step accumulates several batches, gradients are reduced over replicas only
        in the last one (`is_last`).
        """
        self._batch, self._loss_function = batch, loss_function
        self.copies.update_followers()
        for stage in self.stages:
            stage.reduces_over_replicas = is_last
        inputs = (batch.input,) if self.has_first else ()
        # PyTorch splits the target and passes each part to the loss. Here the target holds row
        # numbers, by which the loss selects its microbatch from every field.
        target = torch.arange(batch.num_sequences) if self.has_last else None
        fields = asked_for(self.stages[0].submod, batch)
        # Not every schedule class takes this as an argument.
        self._schedule._kwargs_chunk_spec = {
            name: _Replicate()
            if (dim := _batch_dim(batch, name, value)) is None
            else TensorChunkSpec(dim)
            for name, value in fields.items()
        }
        self._schedule.step(*inputs, target=target, return_outputs=False, **fields)
        self._batch = self._loss_function = None

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """The model's output for a batch, on the rank with the last stage; None elsewhere.

        Runs without a schedule, because PyTorch's V-shaped schedules cannot run forward passes
        alone.
        """
        self.copies.update_followers()
        shapes = self._shapes(batch.num_sequences)
        place = self.table.stage_to_rank
        rank = dist.get_rank(self.group)
        sends = []
        x: Any = None
        for stage, part in self._parts.items():
            if stage == 0:
                x = call_model(part, batch)
            else:
                if place[stage - 1] != rank:
                    x = torch.empty(shapes[stage - 1], dtype=self._dtype, device=self._device)
                    dist.recv(x, group=self.group, group_src=place[stage - 1])
                x = call_model(part, batch, x)
            if stage < self.table.num_stages - 1 and place[stage + 1] != rank:
                sent = x.contiguous()
                sends.append((dist.isend(sent, group=self.group, group_dst=place[stage + 1]), sent))
        for work, _ in sends:
            assert work is not None
            work.wait()
        for part in self._parts.values():
            # A schedule expects its stages resharded, as a step leaves them.
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return x if self.has_last else None

    def parameters(self) -> Iterator[tuple[str, int, Tensor]]:
        """Each parameter of all stages: its name, its rank on the pp axis, and a "meta" tensor.

        A tied weight comes once, by its first name, with the rank of its first copy.
        """
        seen = set()
        for place, part in zip(self.table.stage_to_rank, self._plain_parts, strict=True):
            for own, parameter in part.named_parameters():
                name = self._tied.get(own, own)
                if name not in seen:
                    seen.add(name)
                    yield name, place, parameter

    def _shapes(self, batch_size: int) -> list[torch.Size]:
        """The shape of each activation between stages, as sharded on this rank."""
        if batch_size in self._known_shapes:
            return self._known_shapes[batch_size]
        # Only shapes matter, so the batch repeats one sequence.
        batch = join([self._example.rows(0, 1)] * batch_size)
        x: Tensor | None = None
        shapes = []
        with torch.no_grad():
            for part in self._plain_parts[:-1]:
                x = call_model(part, batch, x)
                assert x is not None
                shape = list(x.shape)
                if self._sequence_dim is not None:
                    shape[self._sequence_dim] //= self._num_shards
                shapes.append(torch.Size(shape))
        self._known_shapes[batch_size] = shapes
        return shapes

    def _make_stage(self, stage: int) -> _Stage:
        """The stage with all shapes given, so that PyTorch does not run the model to infer them."""

        def activation(index: int) -> Tensor:
            shape = self._shapes(self._example.num_sequences)[index]
            return torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)

        last = self.table.num_stages - 1
        return _Stage(
            self._parts[stage],
            stage,
            self.table.num_stages,
            self._device,
            input_args=(self._example.input,) if stage == 0 else (activation(stage - 1),),
            # The last stage's output is not sent, so any shape will do.
            output_args=(activation(min(stage, last - 1)),),
            group=self.group,
        )

    def _make_schedule(self, from_table: bool) -> Any:
        def loss_function(outputs: Any, rows: Tensor) -> Tensor:
            assert self._batch is not None
            assert self._loss_function is not None
            # A part of an arange says by its offset which rows it has; no value has to be read.
            first = int(rows.storage_offset())
            microbatch = self._batch.rows(first, first + rows.numel())
            loss = self._loss_function(outputs, microbatch)
            if self.on_loss is not None:
                self.on_loss()
            return loss

        # The loss is already divided by the number of targets, so gradients are not scaled.
        options: dict[str, Any] = {
            "n_microbatches": self.table.num_microbatches,
            "loss_fn": loss_function,
            "scale_grads": False,
        }
        schedule: Any
        try:
            cls: Any = None if from_table else get_schedule_class(self.table.name)
        except ValueError:
            cls = None
        if cls is None:
            schedule = _PipelineScheduleRuntime(self.stages, **options)
            rows = {
                rank: [_Action.from_str(str(action)) for action in row]
                for rank, row in enumerate(self.table.actions)
            }
            compute_only = all(a.kind in COMPUTE_KINDS for row in self.table.actions for a in row)
            form = "compute_only" if compute_only else "compute_comms"
            schedule._prepare_schedule_with_comms(rows, format=form)
        elif issubclass(cls, PipelineScheduleSingle):
            schedule = cls(self.stages[0], **options)
        else:
            schedule = cls(self.stages, **options)
        schedule._args_chunk_spec = (TensorChunkSpec(0),)
        return schedule
