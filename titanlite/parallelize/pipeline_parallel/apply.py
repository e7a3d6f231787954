"""Pipeline parallelism: a model split into stages, and the schedule that runs them.

    split_model         splits a model into stages; modules keep their names
    PipelineRunner      runs the stages of one rank: a scheduled step, or only a forward pass

Between the two, each stage goes through the same parallelize steps as a whole model.
torch.distributed.pipelining executes the schedule.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
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

from titanlite.errors import TitanliteError, user_line
from titanlite.modules.attention.documents import noted
from titanlite.modules.batch import PASSES_ON, Batch, asked_for, call_model, join
from titanlite.modules.shards import ContiguousGradient
from titanlite.parallelize.pipeline_parallel.stage_copies import StageCopies
from titanlite.schedule import Schedule
from titanlite.schedule.actions import COMPUTE_KINDS


def split_model(
    model: nn.Module, stages: Sequence[Sequence[str]], forward: Callable[..., Any] | None = None
) -> list[nn.Module]:
    """Copies of `model`, one per stage, each with only the modules that the stage names.

    Modules keep their names. A module of another stage is removed from its ModuleDict or list (a
    ModuleList becomes a StageList), or set to None if it is an attribute. No module may be named by
    two stages; what no stage names is in every copy, and a tied weight in every stage that has one
    of its names (stage_copies.py). `forward(stage, x, ...)`, if given, becomes the forward of every
    stage. Raises TitanliteError for a name that the model does not have, and if its code numbers
    the blocks of a ModuleList by their place in the list.
    """
    names = [name for stage in stages for name in stage]
    places: dict[str, int] = {}
    for name in names:
        try:
            places[name] = id(model.get_submodule(name))
        except AttributeError:
            raise TitanliteError(
                f"{type(model).__name__} has no module '{name}', which a stage names"
            ) from None
    if forward is None:
        _check_numbering(model, names)
    uses = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    parts = []
    for number, stage in enumerate(stages):
        # What other stages alone have is not copied.
        left_out = {places[n]: None for n in set(names) - set(stage) if uses.count(places[n]) == 1}
        part = copy.deepcopy(model, left_out)
        if number < len(stages) - 1:
            setattr(part, PASSES_ON, True)
        for name in set(names) - set(stage):
            parent_name, _, leaf = name.rpartition(".")
            parent = part.get_submodule(parent_name)
            if isinstance(parent, nn.ModuleDict | nn.ModuleList | nn.Sequential):
                if type(parent) is nn.ModuleList:
                    vars(parent)["num_blocks"] = len(parent)
                    parent.__class__ = StageList
                # `del parent[leaf]` would renumber a list.
                del parent._modules[leaf]
            else:
                setattr(parent, leaf, None)
        if forward is not None:
            part.forward = MethodType(forward, part)
        parts.append(part)
    return parts


class StageList(nn.ModuleList):
    """The blocks of a ModuleList that a stage has; they keep their numbers.

    Iteration gives these blocks. Length and index are those of the whole list: `blocks[i]` is block
    i of the model, or None if another stage has it.
    """

    num_blocks: int

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return [own for i in chosen if (own := self._modules.get(str(i))) is not None]
        return self._modules.get(str(chosen))


def _check_numbering(model: nn.Module, names: Iterable[str]) -> None:
    """Raises TitanliteError if enumerate or zip goes over a ModuleList that is split.

    Both count from 0 in each stage, so a later stage would silently use wrong numbers. Only the
    code of the class that has the list is read.
    """
    for parent_name in dict.fromkeys(name.rpartition(".")[0] for name in names):
        if type(model.get_submodule(parent_name)) is not nn.ModuleList:
            continue
        owner_name, _, leaf = parent_name.rpartition(".")
        cls = type(model.get_submodule(owner_name))
        for function in filter(inspect.isfunction, vars(cls).values()):
            if counting := _counts_over(function, leaf):
                raise TitanliteError(
                    f"{cls.__name__}.{function.__name__} goes over '{leaf}' with {counting}, which "
                    "counts the blocks of each pipeline stage from 0; use `for name, block in "
                    f"self.{leaf}.named_children()`, whose names are numbers in the whole model"
                )


def _counts_over(function: Callable[..., Any], leaf: str) -> str:
    """ "enumerate" or "zip" if a loop of the function counts an attribute with it, else ""."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""  # code that exec made has no source
    for node in ast.walk(code):
        if not isinstance(node, ast.For | ast.comprehension) or not isinstance(node.iter, ast.Call):
            continue
        called = getattr(node.iter.func, "id", "")
        is_used = getattr(getattr(node.target, "elts", [None])[0], "id", "") != "_"
        over = {getattr(argument, "attr", "") for argument in node.iter.args}
        if called in ("enumerate", "zip") and is_used and leaf in over:
            return called
    return ""


def _send_contiguous(part: nn.Module, *, is_first: bool, is_last: bool) -> None:
    """Make what a stage sends contiguous, since P2P messages must be: its output and gradient."""

    def of_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(ContiguousGradient.apply(x) if x.is_floating_point() else x for x in inputs)

    def of_output(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            # PyTorch detaches outputs in place, which a view of an input would refuse.
            return tuple(x.clone() if x._is_view() else x.contiguous() for x in output)
        return output.contiguous() if isinstance(output, Tensor) else output

    if not is_first:
        part.register_forward_pre_hook(of_input)
    if not is_last:
        part.register_forward_hook(of_output)


def _note_microbatch(_: nn.Module, __: Any, fields: dict[str, Any]) -> None:
    for value in fields.values():
        if isinstance(value, Tensor):
            noted(value)  # compiled code does not find out of what batch it is a part


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
        # open_pairs has done it; here, a rank of a V-shaped schedule would send to itself.
        return []

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


def open_pairs(
    group: dist.ProcessGroup, stage_to_rank: Sequence[int], device: torch.device
) -> None:
    """Send a number between the ranks of neighbouring stages; every rank of `group` must call this.

    NCCL makes a communicator of two ranks at their first message, and that of the group at its
    first batch of sends and receives, here and not within a schedule (torch's `_warmup_p2p`).
    """
    rank, batch = dist.get_rank(group), []
    for pair in sorted({(min(pair), max(pair)) for pair in pairwise(stage_to_rank)}):
        if rank not in pair or pair[0] == pair[1]:
            continue
        own, other = torch.zeros(2, 1, device=device).unbind()
        peer = sum(pair) - rank
        if rank < peer:
            dist.send(own, group=group, group_dst=peer)
        else:
            dist.recv(other, group=group, group_src=peer)
        batch.append(dist.P2POp(dist.isend, own, group=group, group_peer=peer))
        batch.append(dist.P2POp(dist.irecv, other, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(batch) if batch else ():
        work.wait()


@torch.no_grad()
def sent_by_stages(plain_parts: Sequence[nn.Module], batch: Batch) -> list[tuple[Tensor, ...]]:
    """What each stage but the last sends to the next for `batch`, all on "meta".

    Runs all stages as split_model returns them. Raises TitanliteError if one does not run, because
    its forward uses a module of another stage, or if it returns something that cannot be sent.
    """
    x: Any = None
    sent = []
    last = len(plain_parts) - 1
    for stage, part in enumerate(plain_parts):
        name = type(part).__name__
        try:
            x = call_model(part, batch, x)
        except Exception as error:  # a user's forward may raise anything
            advice = _lacking(plain_parts, stage, error)
            if stage == last and not advice:
                break  # it may need values, and its output is not needed here
            if not advice:
                source = "the model's input" if stage == 0 else f"what stage {stage - 1} returns"
                given = _in_words(batch.input if stage == 0 else x)
                advice = f"its first argument is {source}, {given}"
            where = f" ({line})" if (line := user_line(error)) else ""
            raise TitanliteError(
                f"stage {stage} of {name} fails in forward{where} with {type(error).__name__}: "
                f"{error}; {advice}"
            ) from error
        if stage == last:
            break
        outputs = _tensors(x)
        if not outputs or not all(isinstance(one, Tensor) for one in outputs):
            raise TitanliteError(
                f"stage {stage} of {name} returns {_in_words(x)}; return a tensor, or a tuple of "
                "tensors, which are the first arguments of the next stage"
            )
        sent.append(outputs)
    return sent


def _lacking(plain_parts: Sequence[nn.Module], stage: int, error: Exception) -> str:
    """What to do if a stage fails because it lacks a module; "" if that is not the reason."""
    own = {name for name, _ in plain_parts[stage].named_modules()}
    others = dict.fromkeys(name for part in plain_parts for name, _ in part.named_modules())
    lacks = [name for name in others if name not in own and name.rpartition(".")[0] in own]
    leaves = {name.rpartition(".")[2] for name in lacks}
    is_key = isinstance(error, KeyError) and str(error.args[0]) in leaves
    is_index = isinstance(error, IndexError) and bool(leaves)
    if not (lacks and (is_key or is_index or "'NoneType'" in str(error))):
        return ""
    shown = ", ".join(lacks[:6]) + (", ..." if len(lacks) > 6 else "")
    return (
        f"this stage lacks {shown}, which other stages have: let forward skip a module that is "
        "None, as in `x if self.embed is None else self.embed(x)`, and go over the blocks that "
        "are there, as in `for block in self.blocks`; or give the plan a stage_forward"
    )


def _tensors(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _in_words(x: Any) -> str:
    """A stage's output: "a float32 tensor [2, 8]", "a tuple of ...", "a dict"."""
    if isinstance(x, Tensor):
        return f"a {str(x.dtype).removeprefix('torch.')} tensor {list(x.shape)}"
    if isinstance(x, tuple):
        return f"a tuple of {', '.join(map(_in_words, x)) or 'nothing'}"
    return "None" if x is None else f"a {type(x).__name__}"


class PipelineRunner:
    """Runs the stages of one rank of the 1-D `pp_mesh` by a schedule.

    `parts` maps stages to this rank's parallelized modules. `plain_parts` are the modules of all
    stages as split_model returns them, on the "meta" device; they give the shapes of the
    activations between stages, of dtype `dtype`, sharded `num_shards` ways along `sequence_dim`, or
    replicated if that is None. `example` is one of this rank's microbatches; only its shapes and
    dtypes are used. A batch has `schedule.num_microbatches` microbatches. PyTorch's schedule class
    named `schedule.name` is used; without one, or with `from_table`, PyTorch's general runtime
    executes `schedule`. `tied` is find_tied of the whole model. If stages share parameters, the
    caller must call `copies.sum_gradients()` after the last batch of a step.
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
            self._tied, self._parts, plain_parts, schedule.stage_to_rank, self.group, self._device
        )
        self._known: dict[int, list[tuple[Tensor, ...]]] = {}
        # The batch and loss function of the running step.
        self._batch: Batch | None = None
        self._loss_function: LossFunction | None = None
        self.on_loss: Callable[[], None] | None = None
        """Called after the loss of each microbatch, within the last stage's forward pass."""
        for stage, part in self._parts.items():
            _send_contiguous(part, is_first=stage == 0, is_last=stage == self.table.num_stages - 1)
            part.register_forward_pre_hook(_note_microbatch, with_kwargs=True)
        self.stages = [self._make_stage(stage) for stage in self._parts]
        self._schedule = self._make_schedule(from_table)
        if "nccl" in dist.get_backend(self.group):
            open_pairs(self.group, schedule.stage_to_rank, self._device)

    @property
    def numbers(self) -> Sequence[int]:
        """The stages of this rank, in ascending order."""
        return list(self._parts)

    @property
    def has_last(self) -> bool:
        return self.table.num_stages - 1 in self._parts

    def step(self, batch: Batch, loss_function: LossFunction, *, is_last: bool = True) -> None:
        """Run the schedule on a batch and accumulate the gradients of the sum of its losses.

        Every stage gets the fields that its forward takes. The rank with the last stage calls
        `loss_function(outputs, microbatch)` for each microbatch. If a step accumulates several
        batches, gradients are reduced over replicas only in the last one (`is_last`).
        """
        self._batch, self._loss_function = batch, loss_function
        self.copies.update_followers()
        for stage in self.stages:
            stage.reduces_over_replicas = is_last
        inputs = (batch.input,) if 0 in self._parts else ()
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

        Runs without a schedule: PyTorch's V-shaped ones cannot run forward passes alone.
        """
        self.copies.update_followers()
        activations = self._activations(batch.num_sequences)
        place = self.table.stage_to_rank
        rank = dist.get_rank(self.group)
        sends = []
        x: Any = None
        for stage, part in self._parts.items():
            if stage == 0:
                x = call_model(part, batch)
            else:
                if place[stage - 1] != rank:
                    x = tuple(
                        torch.empty_like(one, device=self._device) for one in activations[stage - 1]
                    )
                    for one in x:
                        dist.recv(one, group=self.group, group_src=place[stage - 1])
                x = call_model(part, batch, x)
            if stage < self.table.num_stages - 1 and place[stage + 1] != rank:
                for one in _tensors(x):
                    sent = one.contiguous()
                    to = place[stage + 1]
                    sends.append((dist.isend(sent, group=self.group, group_dst=to), sent))
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

    def _activations(self, batch_size: int) -> list[tuple[Tensor, ...]]:
        """What each stage but the last sends to the next, as sharded on this rank, on "meta"."""
        if batch_size not in self._known:
            # Only shapes matter, so the batch repeats one sequence.
            batch = join([self._example.rows(0, 1)] * batch_size)
            sent = sent_by_stages(self._plain_parts, batch)
            self._known[batch_size] = [tuple(map(self._sharded, of_stage)) for of_stage in sent]
        return self._known[batch_size]

    def _sharded(self, activation: Tensor) -> Tensor:
        """An activation as this rank sends it. One that has gradients has the pipeline's dtype."""
        shape = list(activation.shape)
        if self._sequence_dim is not None and self._sequence_dim < len(shape):
            shape[self._sequence_dim] //= self._num_shards
        is_float = activation.is_floating_point()
        dtype = self._dtype if is_float else activation.dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=is_float)

    def _make_stage(self, stage: int) -> _Stage:
        """The stage with all shapes given, so that PyTorch does not run the model to infer them."""
        activations = self._activations(self._example.num_sequences)
        last = self.table.num_stages - 1
        return _Stage(
            self._parts[stage],
            stage,
            self.table.num_stages,
            self._device,
            input_args=(self._example.input,) if stage == 0 else activations[stage - 1],
            # The last stage's output is not sent, so any shape will do.
            output_args=activations[min(stage, last - 1)],
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
