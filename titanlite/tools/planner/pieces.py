"""What a job's step is made of, traced once: a block of each kind, what is around them, the update.

    ResolvedJob -> trace_pieces -> Pieces -> compose.py -> a step with any number of blocks,
                                                           microbatches, stages and shards

The job's own code is traced (trace.py) with two blocks of each kind, for one microbatch, without a
pipeline, and on the fewest ranks that keep its tensor and context parallelism. What FSDP and DDP do
is left out: compose.py adds it, since it depends on the number of shards and on the pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from titanlite.config import ResolvedJob, override, resolve_job
from titanlite.errors import TitanliteError
from titanlite.job import Job
from titanlite.modules.experts import expert_layers
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import is_sharded, local_part
from titanlite.parallelize.activation_checkpoint.apply import block_interval, is_checkpointed
from titanlite.parallelize.ddp import apply as ddp
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.parallelize.part import DTYPES
from titanlite.parallelize.plan import ParallelPlan, find_blocks
from titanlite.plain_job import build_plain_model
from titanlite.quantities import ITEMSIZE
from titanlite.schedule.generators import without_garbage_collection
from titanlite.tools.planner.composition import (
    AS_ADAMW,
    ModelPart,
    Pieces,
    Segment,
    TraceError,
    Weight,
    representatives,
    segment_of,
    smaller,
    uses_fsdp,
)
from titanlite.tools.planner.events import (
    Allocation,
    Communication,
    Event,
    Operator,
    Site,
    Trace,
    Wait,
)
from titanlite.tools.planner.float8_trace import CastRecorder, over_tokens
from titanlite.tools.planner.gaps import gaps_of_stages
from titanlite.tools.planner.hardware import Software
from titanlite.tools.planner.recorder import StepRecorder
from titanlite.tools.planner.software import TODAY
from titanlite.tools.planner.trace import trace_job
from titanlite.training.muon import find_matrices
from titanlite.training.norm import reduce_partial_gradients

# Of FSDP2, each before the collective whose buffer it fills.
CHUNK = "fsdp::chunk_cat"
COPY_IN = ("fsdp::all_gather_copy_in", CHUNK)
CAST = "aten::_foreach_copy_"
FORWARD, BACKWARD = "forward", "backward"
FUSED_BACKWARD = ("aten::_scaled_dot_product_flash_attention_for_cpu_backward",)


@without_garbage_collection()
def trace_pieces(
    resolved: ResolvedJob, software: Software = TODAY, *, is_compiled: bool = False
) -> Pieces:
    """Trace the pieces of a job; no process group may exist in this process.

    Of `software`, what changes memory counts here (the rest: software.py). The pieces are of eager
    code, unless `is_compiled` and the job compiles its blocks.

    Raises TraceError if the job's own code cannot run on fake tensors.
    """
    small = smaller(resolved, is_compiled=is_compiled)
    recomputed = small.config.activation_checkpoint
    is_selective = recomputed.mode == "selective"
    every = block_interval(recomputed.selective_ac_option) if is_selective else 1
    fewer, seen = _FewerBlocks(every, small.config.optimizer), _Seen()
    job, trace = _trace(small, fewer, seen, software)
    events, reduced = _without_fsdp(trace, seen.casts.events)
    is_float8 = FLOAT8.is_on(small.config)
    segments: dict[tuple[str, str], Segment] = {}
    backwards: dict[str, _Backward] = {}
    sizes_of = dict(trace.sizes)
    runs = dict(_cut(events, fewer.kept, is_float8=is_float8))
    taken, keeps_embeddings = _free_inputs(runs, seen.taken, trace.category_of)
    experts = _experts_apart(job, fewer.kept)
    saved = {b: n for b, n in seen.outputs.items() if trace.category_of[b] == "activations"}
    for (name, phase), run in runs.items():
        if phase == BACKWARD:
            of_experts, held = experts.get(name, ""), saved if name == "after" else {}
            backwards[name] = _backward(run, trace.category_of, sizes_of, of_experts, held)
        segments[name, phase] = segment_of(run, trace.category_of, sizes_of)
    units = _units(job, fewer.kept, seen.partial, reduced, fewer.matrices)
    buffers = _buffers(job, fewer.kept)
    boundary = seen.sizes[0] if seen.sizes else 0

    def part(name: str) -> ModelPart:
        forward, backward = segments[name, FORWARD], segments[name, BACKWARD]
        # A part frees its input. What else it keeps ends with it, wherever the model has it from.
        kept = boundary * ((name == "before") - (name == "after"))
        left = kept - forward.net.get("activations", 0)
        net = {**backward.net, "activations": left}
        late_bytes, peak_again, peaks_holding, recomputed, cuts = backwards[name]
        if cuts:
            left -= sum(one.net.get("activations", 0) for one in cuts[:-1])
            cuts[-1] = replace(cuts[-1], net={**cuts[-1].net, "activations": left})
        of = units.get(name, {}), buffers[name], late_bytes, bool(taken.get(name))
        backward = replace(backward, net=net)
        return ModelPart(forward, backward, *of, peak_again, peaks_holding, recomputed, tuple(cuts))

    # The last of each kind is the most typical: the first block of all has other neighbours.
    of_kind = dict(zip(fewer.kept_kinds, fewer.kept, strict=True))
    weights = [weight for of_part in units.values() for unit in of_part.values() for weight in unit]
    state, moments = _optimizer_state(job)
    blocks = tuple(part(of_kind[kind]) for kind in sorted(of_kind))
    before, after, casts = part("before"), part("after"), seen.casts.casts()
    every_part = [before, *(blocks[kind] for kind in fewer.kinds), after]
    return Pieces(
        before=before,
        before_names=job.plan.embeddings,
        blocks=blocks,
        after=after,
        after_names=job.plan.head,
        kinds=tuple(fewer.kinds),
        names=tuple(fewer.names),
        start=segments["start", ""],
        end=segments["end", ""],
        end_weights=tuple(dict.fromkeys(weights)),
        buffer_bytes=buffers[""],
        num_shards=job.dims.num_weight_shards,
        num_expert_shards=job.dims.num_expert_shards,
        tied=_tied(job, units),
        boundary_bytes=boundary,
        keeps_embeddings=keeps_embeddings,
        output_bytes=sum(seen.outputs.values()) - sum(saved.values()),
        saved_output_bytes=sum(saved.values()),
        moments=moments,
        state_bytes=state,
        flops_per_token=_flops_per_token(small, every_part),
        gaps=trace.gaps(),
        gaps_of_stages=_gaps_of_stages(small, runs, fewer.kept, units, casts),
        balance_bytes=(_balance_bytes(job.parts[0]), fewer.balance_bytes),
        casts=casts,
    )


def _trace(
    small: ResolvedJob, fewer: _FewerBlocks, seen: _Seen, software: Software
) -> tuple[Job, Trace]:
    layout = small.config.parallelism.context_parallel_load_balancer
    is_muon = small.config.optimizer.name == "Muon"
    try:
        return trace_job(
            resolve_job(override(small.config, AS_ADAMW)) if is_muon else small,
            representatives(small.dims, layout)[0],
            seen.watch,
            software=software,
            runs_first_step=small.config.compile.enable,
            model=fewer,
            ddp=_without_ddp,
        )
    except TitanliteError:
        raise
    except Exception as error:  # the model's own code can raise anything
        raise _untraceable(small, error) from error


class _Seen:
    """What is noted while a job runs, beside the trace."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """The bytes of each block's output, which can be a tuple."""
        self.outputs: dict[int, int] = {}
        """The model's last outputs: the block of memory and the bytes of each."""
        self.taken: dict[str, set[int]] = {}
        """The blocks of memory that each block of the model takes, and "after", by name."""
        self.casts = CastRecorder()
        self.partial: set[int] = set()
        """The ids of the parameters with a Partial gradient."""

    def watch(self, job: Job, recorder: StepRecorder) -> None:
        """Note what the job's model and trainer do from now on."""
        self.casts.start(job, recorder)

        def note_taken(name: str, _: nn.Module, taken: tuple[Any, ...]) -> None:
            tensors = [local_part(one) for one in taken[:1] if isinstance(one, Tensor)]
            # Of a collective that nothing has waited for yet, the tensor inside.
            self.taken[name] = recorder.blocks_of(getattr(one, "elem", one) for one in tensors)

        def note_given(block: nn.Module, _: Any, output: Any) -> None:
            self.sizes.append(_num_bytes(output))
            note_taken("after", block, output if isinstance(output, tuple) else (output,))

        for key, block in find_blocks(job.parts[0], job.plan).items():
            note = partial(note_taken, job.plan.block_name(key))
            block.register_forward_pre_hook(note, prepend=True)
            block.register_forward_hook(note_given)

        def note_output(_: nn.Module, __: Any, output: Any) -> None:
            tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
            of = [(recorder.blocks_of([local_part(one)]), _num_bytes(one)) for one in tensors]
            self.outputs = {block: num_bytes for blocks, num_bytes in of for block in blocks}

        job.parts[0].register_forward_hook(note_output)
        job.trainer.reduce_partial = self._reduce

    def _reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        self.partial.update(id(p) for p in parameters if _is_partial(p.grad))
        reduce_partial_gradients(parameters)


def _untraceable(small: ResolvedJob, error: Exception) -> TraceError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return TraceError(
        f"model.name: {small.config.model.name} cannot be traced ({reason}); its code must run on "
        "tensors without values"
    )


def _flops_per_token(small: ResolvedJob, parts: Sequence[ModelPart]) -> float:
    """The FLOPs of a token: by the model's formula, or else what one rank computes in all parts.

    Without recomputation. The ranks of tp and cp share the tokens and products of a microbatch
    equally. Of the five products of a fused backward pass of attention, one is recomputation.
    """
    if hasattr(small.model, "flops_per_token"):
        return float(small.model.flops_per_token(small.seq_len))
    flops = sum(
        event.flops * (0.8 if event.name in FUSED_BACKWARD else 1)
        for part in parts
        for segment in (part.forward, part.backward)
        for event in segment.events
        if isinstance(event, Operator) and event.place.phase != "recomputation"
    )
    tokens = small.config.training.local_batch_size * small.seq_len
    return flops * small.dims.tp * small.dims.cp / tokens


class _FewerBlocks:
    """Builds a model with at most two blocks of each kind.

    Blocks with the same modules and parameters are of one kind, if both are recomputed or neither
    is: every `every`-th one may be. A block with frozen weights alone before it is another kind.
    `kinds` and `names` are those of all blocks, `kept_kinds` and `kept` those of the blocks that
    stay.
    """

    def __init__(self, every: int, optimizer: Any) -> None:
        self._every, self._optimizer = every, optimizer
        self.matrices: dict[str, str] = {}
        self.names: list[str] = []
        self.kinds: list[int] = []
        self.kept: list[str] = []
        self.kept_kinds: list[int] = []
        self.balance_bytes = 0

    def __call__(self, *args: Any) -> tuple[nn.Module, ParallelPlan]:
        model, plan = build_plain_model(*args)
        self.balance_bytes = _balance_bytes(model)
        if self._optimizer.name == "Muon":
            self.matrices = find_matrices(model, plan.is_in_block, self._optimizer.adamw)
        blocks = find_blocks(model, plan)
        self.names = [plan.block_name(key) for key in blocks]
        known: dict[Any, int] = {}
        learns = list(_learns_before(model, plan, blocks))
        self.kinds = [
            known.setdefault(
                (*_look(block), is_checkpointed(key, index, self._every), learns[index]), len(known)
            )
            for index, (key, block) in enumerate(blocks.items())
        ]
        self.kept_kinds, removed = [], []
        for key, kind in zip(blocks, self.kinds, strict=True):
            if self.kept_kinds.count(kind) < 2:
                self.kept_kinds.append(kind)
            else:
                removed.append(key)
        container: Any = model.get_submodule(plan.blocks or "") if blocks else None
        for key in removed:
            # The others keep their names: those of a ModuleList would move up.
            del container._modules[key]
        self.kept = [plan.block_name(key) for key in find_blocks(model, plan)]
        return model, plan


def _learns_before(
    model: nn.Module, plan: ParallelPlan, blocks: Mapping[str, nn.Module]
) -> Iterator[bool]:
    """Whether anything before each block is trained: if not, its input gets no gradient."""
    learns = any(
        parameter.requires_grad
        for name, parameter in model.named_parameters()
        if not plan.is_in_block(name) and not name.startswith(tuple(f"{h}." for h in plan.head))
    )
    for block in blocks.values():
        yield learns
        learns = learns or any(parameter.requires_grad for parameter in block.parameters())


def _balance_bytes(model: nn.Module) -> int:
    """The bytes of the sums of a Balancer: each expert's slots, dropped slots, and the loss."""
    num_experts = sum(layer.num_experts for layer in expert_layers([model]).values())
    return 8 * (num_experts + 2)


def _look(module: nn.Module) -> tuple[Any, ...]:
    parameters = (
        (name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()
    )
    return repr(module), *parameters


def _cut(
    events: Sequence[Event], blocks: Sequence[str], *, is_float8: bool
) -> Iterator[tuple[tuple[str, str], list[Event]]]:
    """The events of each segment of a step: ("start", ""), (part, "forward"), ..., ("end", "").

    The parts are "before", the blocks and "after". Events of no module belong to the part of the
    event before.
    """
    order = ["before", *blocks, "after"]
    turn = len(order)
    keys = [("start", "")]
    keys += [(name, FORWARD) for name in order]
    keys += [(name, BACKWARD) for name in reversed(order)]
    keys.append(("end", ""))
    runs: dict[tuple[str, str], list[Event]] = {key: [] for key in keys}
    at, start = 0, _end_of_start(events)
    for index, event in enumerate(events):
        before = at
        # FSDP2's memory is that of another unit while a module runs.
        where = None if isinstance(event, Allocation) else getattr(event, "place", None)
        if where is not None and 0 < at < len(keys) - 1:
            if where.phase == "optimizer" or (at > turn and where.phase == FORWARD):
                at = len(keys) - 1
            elif where.phase != FORWARD:
                at = max(at, turn + 1)
            if where.module and at < len(keys) - 1:
                name = next((block for block in blocks if _is_in(where.module, (block,))), None)
                if name is None and at not in (1, turn + 1):
                    name = "after" if at <= turn else "before"
                if name is not None:
                    here = keys.index((name, FORWARD if at <= turn else BACKWARD))
                    at = max(at, here)
        if at > before and keys[at][0]:
            # What a part allocates up to its first operator is that part's, and freed there.
            last, own, former = runs[keys[before]], [], keys[before][0]
            while last and isinstance(one := last[-1], Allocation):
                is_outside = former in blocks and not _is_in(one.place.module or former, (former,))
                if one.place != where and not (is_outside and keys[at][1] == FORWARD):
                    break
                own.append(last.pop())
            runs[keys[at]].extend(reversed(own))
        runs[keys[at]].append(event)
        if at == 0 and index >= start:
            at = 1
    for key, run in runs.items():
        yield key, [over_tokens(event) for event in run] if key[1] and is_float8 else run


class _Backward(NamedTuple):
    """What a ModelPart has of its backward pass beside the segment."""

    late_bytes: int
    peak_again: Mapping[str, int]
    peaks_holding: tuple[Mapping[str, int], Mapping[str, int]]
    recomputed_bytes: int
    around_experts: list[Segment]


def _backward(
    run: Sequence[Event],
    category_of: Mapping[int, str],
    sizes: Mapping[int, int],
    experts: str,
    held: Collection[int],
) -> _Backward:
    """Of a part's backward pass; `held` are the blocks of the model's output that can stay."""

    def peak_of(events: Iterable[Event]) -> Mapping[str, int]:
        return segment_of(events, category_of, dict(sizes)).peak

    again = peak_of(_adding(run, category_of))
    holding = [event for event in run if not _is_free_of(event, held)]
    of_holding = peak_of(holding), peak_of(_adding(holding, category_of))
    cuts, of_cuts = _cut_around(run, experts) if experts else (), dict(sizes)
    around = [segment_of(one, category_of, of_cuts) for one in cuts]
    late = _late_bytes(run, category_of, sizes)
    return _Backward(late, again, of_holding, _recomputed_bytes(run), around)


def _recomputed_bytes(events: Iterable[Event]) -> int:
    """The bytes of ModelPart.recomputed_bytes."""
    made: dict[int, int] = {}
    total, largest, name = 0, 0, ""
    for event in events:
        if isinstance(event, Operator):
            name = event.name
        elif isinstance(event, Allocation) and event.place.phase == "recomputation":
            made[event.block] = event.num_bytes
        elif isinstance(event, Allocation) and not event.num_bytes:
            size = made.pop(event.block, 0)
            if "mm" in name:
                size, largest = 0, max(largest, size)
            total += size
    return total + largest


def _adding(events: Iterable[Event], category_of: Mapping[int, str]) -> Iterator[Event]:
    """A backward pass that adds to gradients: a new one is freed after the operator it is of."""
    new: list[int] = []
    for event in events:
        yield event
        if isinstance(event, Allocation):
            if event.num_bytes and category_of[event.block] == "gradients":
                new.append(event.block)
        elif isinstance(event, Operator):
            yield from (Allocation(block, 0, event.place) for block in new)
            new.clear()


def _experts_apart(job: Job, blocks: Sequence[str]) -> dict[str, str]:
    """Block -> its experts, if they are an FSDP unit of their own."""
    if job.meshes.experts is None:
        return {}
    layers = map(canonical_name, expert_layers([job.parts[0]]))
    return {_part_of(layer, blocks, job.plan): f"{layer}.experts" for layer in layers}


def _cut_around(events: Sequence[Event], experts: str) -> Iterator[list[Event]]:
    """Cut a backward pass for ModelPart.around_experts."""
    found = [
        (index, event.place)
        for index, event in enumerate(events)
        if isinstance(event, Operator | Communication) and _is_in(event.place.module, (experts,))
    ]
    own = [(index, place) for index, place in found if place.phase == BACKWARD]
    if not own:
        yield from ([*events], [], [], [])
        return

    def begin(index: int, place: Site) -> int:
        """Where the memory of the event at `index` is allocated."""
        while index and isinstance(one := events[index - 1], Allocation) and one.place == place:
            index -= 1
        return index

    end, place = own[-1]
    while end + 1 < len(events) and getattr(events[end + 1], "place", place) == place:
        end += 1
    first = 0
    for cut in (begin(*found[0]), begin(*own[0]), end + 1, len(events)):
        yield [*events[first:cut]]
        first = cut


def _free_inputs(
    runs: Mapping[tuple[str, str], list[Event]],
    taken: Mapping[str, set[int]],
    category_of: dict[int, str],
) -> tuple[dict[str, set[int]], bool]:
    """Let each part free what it has `taken` at the end of its forward pass, if that is temporary.

    When that happens is up to the model around the blocks; what its first block takes, many a model
    keeps until its end. Any block can follow any other, so it has one category: activations.
    Returns what the parts free there, and whether the model keeps what the first block takes.
    """
    freed = {n: {b for b in of if category_of.get(b) == "temporary"} for n, of in taken.items()}
    every = set[int]().union(*freed.values())
    category_of.update(dict.fromkeys(every, "activations"))
    first, of_first = next(iter(freed.items()), ("", set()))
    own = runs.get((first, FORWARD), [])
    keeps = bool(of_first) and not any(_is_free_of(event, of_first) for event in own)
    for (name, phase), run in runs.items():
        if phase == FORWARD:
            run[:] = [event for event in run if not _is_free_of(event, every)]
            run += [Allocation(block, 0, Site(name, FORWARD)) for block in freed.get(name, ())]
    return freed, keeps


def _is_free_of(event: Event, blocks: Collection[int]) -> bool:
    return isinstance(event, Allocation) and event.block in blocks and not event.num_bytes


def _late_bytes(
    events: Sequence[Event], category_of: Mapping[int, str], sizes: Mapping[int, int]
) -> int:
    """The most temporary bytes after the last product, compared with the start of `events`."""
    products = [at for at, e in enumerate(events) if isinstance(e, Operator) and e.shape]
    sizes, now, most = dict(sizes), 0, 0
    for at, event in enumerate(events):
        if isinstance(event, Allocation):
            change = event.num_bytes - sizes.get(event.block, 0)
            sizes[event.block] = event.num_bytes
            if category_of[event.block] not in ("activations", "gradients"):
                now += change
        if products and at > products[-1]:
            most = max(most, now)
    return most


def _gaps_of_stages(
    small: ResolvedJob,
    runs: Mapping[tuple[str, str], Sequence[Event]],
    blocks: Sequence[str],
    units: Mapping[str, Mapping[str, Sequence[Weight]]],
    casts: Container[str],
) -> tuple[int, int, int]:
    """The gaps of a GPU's memory in the stages of a pipeline; without blocks there is none."""
    training = small.config.training
    if small.config.job.device != "cuda" or not blocks:
        return 0, 0, 0

    def itemsize(weight: Weight, dtype: str) -> int:
        return ITEMSIZE[dtype] if training.is_mixed else weight.itemsize

    weights = {
        name: [
            (
                w.numel * (1 if w.name in casts else itemsize(w, training.param_dtype)),
                w.numel * itemsize(w, training.reduce_dtype) * w.is_trained,
            )
            for unit in of_part.values()
            for w in unit
        ]
        for name, of_part in units.items()
        if uses_fsdp(small)
    }
    return gaps_of_stages(runs, ("before", *blocks, "after"), weights)


def _without_ddp(model: nn.Module, *_: Any, **__: Any) -> ddp.DDPReport:
    """In place of apply_ddp: compose.py adds what DDP does."""
    return ddp.DDPReport(ddp.BUCKET_CAP_MB)


def _end_of_start(events: Sequence[Event]) -> int:
    """The last sum over the world before the model runs: of targets, or of sequences."""
    found = 0
    for index, event in enumerate(events):
        if isinstance(event, Communication | Operator) and event.place.module:
            break
        if isinstance(event, Communication) and event.axis == "world":
            found = index
    return found


def _without_fsdp(trace: Trace, casts: Sequence[Event]) -> tuple[list[Event], Counter[int]]:
    """The events without the collectives, copies, casts to float8 and buffers of FSDP2.

    Also the bytes of the Partial gradients that FSDP2 sums over the tp axis.
    """
    reduced: Counter[int] = Counter()
    events: list[Event] = []
    dropped: set[int] = set()
    blocks = {b for b, category in trace.category_of.items() if category == "gathered parameters"}
    is_next = is_reduced = False
    cast = {id(event) for event in casts if not isinstance(event, Allocation)}
    blocks |= {event.block for event in casts if isinstance(event, Allocation) and event.num_bytes}
    for event in trace.events:
        if id(event) in cast:
            continue
        if isinstance(event, Allocation):
            if event.block not in blocks:
                events.append(event)
        elif isinstance(event, Operator) and event.name.startswith("fsdp::"):
            # What was allocated since the operator before is its buffer.
            while events and _prepares(events[-1]):
                if isinstance(one := events.pop(), Allocation):
                    blocks.add(one.block)
            if event.name == CHUNK:
                for one in _summed_before(events):
                    reduced[one.num_bytes] += 1
                    dropped.add(one.number)
            is_next = is_next or event.name in COPY_IN
        elif isinstance(event, Communication) and is_next:
            while events and isinstance(one := events[-1], Allocation) and one.num_bytes:
                blocks.add(one.block)
                events.pop()
            dropped.add(event.number)
            is_next, is_reduced = False, event.kind == "reduce_scatter"
        elif is_reduced and isinstance(event, Operator) and event.name == "aten::_to_copy":
            # The cast of a reduced shard of this job. A step has it once, beside the main stream.
            continue
        elif not isinstance(event, Wait) or event.number not in dropped:
            is_reduced = is_reduced and not isinstance(event, Operator)
            events.append(event)
    kept = [
        event
        for event in events
        if not (isinstance(event, Allocation) and event.block in blocks)
        and not (isinstance(event, Wait | Communication) and event.number in dropped)
    ]
    return kept, reduced


def _summed_before(events: Sequence[Event]) -> Iterator[Communication]:
    """The sums over the tp axis at the end of `events`, after the last operator."""
    for event in reversed(events):
        if isinstance(event, Operator):
            return
        if isinstance(event, Communication):
            if event.kind != "all_reduce" or event.axis != "tp":
                return
            yield event


def _prepares(event: Event) -> bool:
    """Whether the event belongs to FSDP's operator after it: an allocation, or a cast of shards."""
    if isinstance(event, Allocation):
        return event.num_bytes > 0
    return isinstance(event, Operator) and event.name == CAST


def _units(
    job: Job,
    blocks: Sequence[str],
    partial: set[int],
    reduced: Counter[int],
    matrices: Mapping[str, str],
) -> dict[str, dict[str, tuple[Weight, ...]]]:
    """Part -> FSDP unit -> its parameters. Without FSDP a part is one unit.

    A unit of embeddings and head, which share a weight, belongs to both parts.
    """
    model, plan = job.parts[0], job.plan
    of_unit: dict[str, list[Weight]] = {}
    parts_of_unit: dict[str, set[str]] = {}
    numbers: dict[int, str] = {}
    owners: dict[str, str] = {}
    for name, module in model.named_modules():
        own = canonical_name(name)
        part = _part_of(own, blocks, plan)
        if isinstance(module, FSDPModule):
            unit = numbers.setdefault(id(module._get_fsdp_state()), own or "the rest")
        else:
            unit = owners.get(own.rpartition(".")[0], "") if numbers else part
        # A checkpoint wrapper and what it wraps have one name.
        owners[own] = owners.get(own) or unit
        parts_of_unit.setdefault(unit, set())
    has_apart = job.meshes.experts is not None
    experts = {f"{layer}.experts" for layer in expert_layers([model])}
    left, dtype = Counter(reduced), job.config.training.param_dtype
    for name, parameter in job.parameters.items():
        size = math.prod(_shape(parameter))
        is_partial = id(parameter) in partial
        for itemsize in sorted({parameter.element_size(), DTYPES[dtype].itemsize}):
            if not is_partial and _is_replicated(parameter) and left[size * itemsize] > 0:
                left[size * itemsize] -= 1
                is_partial = True
        parent = name.rpartition(".")[0]
        unit = owners.get(parent, "the rest")
        of_unit.setdefault(unit, []).append(
            Weight(
                name,
                _shape(parameter),
                parameter.element_size(),
                parameter.requires_grad,
                is_partial,
                has_apart and parent in experts,
                matrices.get(name, ""),
                _tp_dim(parameter) if name in matrices else None,
            )
        )
        parts_of_unit[unit].add(_part_of(name, blocks, plan))
    for further in job.tied:
        unit = owners.get(further.rpartition(".")[0], "the rest")
        parts_of_unit.setdefault(unit, set()).add(_part_of(further, blocks, plan))
    found: dict[str, dict[str, tuple[Weight, ...]]] = {}
    for unit, weights in of_unit.items():
        for part in parts_of_unit[unit]:
            found.setdefault(part, {})[unit] = tuple(weights)
    return found


def _buffers(job: Job, blocks: Sequence[str]) -> Counter[str]:
    """Part -> the bytes of its buffers; "" has those of the modules that no stage names."""
    buffers: Counter[str] = Counter()
    for name, buffer in job.parts[0].named_buffers():
        own = canonical_name(name)
        where = _part_of(own, blocks, job.plan)
        if where == "before" and not _is_in(own, job.plan.embeddings):
            where = ""
        buffers[where] += _num_bytes(buffer)
    return buffers


def _tied(job: Job, units: Mapping[str, Mapping[str, tuple[Weight, ...]]]) -> tuple[Weight, ...]:
    firsts = set(job.tied.values())
    found = (w for unit in units.get("before", {}).values() for w in unit if w.name in firsts)
    return tuple(dict.fromkeys(found))


def _is_partial(gradient: Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)


def _is_replicated(parameter: Tensor) -> bool:
    """Whether the tp axis replicates it."""
    if not isinstance(parameter, DTensor):
        return False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return any(axis == "tp" and placement.is_replicate() for axis, placement in axes)


def _tp_dim(parameter: Tensor) -> int | None:
    """The dimension that the tp axis cuts."""
    if isinstance(parameter, DTensor):
        axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        for axis, placement in axes:
            if axis == "tp" and is_sharded(placement):
                return int(placement.dim)  # type: ignore[attr-defined]
    return None


def _part_of(name: str, blocks: Sequence[str], plan: ParallelPlan) -> str:
    block = next((block for block in blocks if _is_in(name, (block,))), "")
    return block or ("after" if _is_in(name, plan.head) else "before")


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape on a rank, before FSDP shards it."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        for axis, degree, placement in axes:
            if axis in ("tp", "ep") and placement.is_shard():
                dim = placement.dim  # type: ignore[attr-defined]
                shape[dim] = -(-shape[dim] // degree)
    return tuple(shape)


def _optimizer_state(job: Job) -> tuple[int, int]:
    """Of each parameter: the bytes of small state, and the number of tensors of its size."""
    for parameter, state in job.trainer.optimizer.state.items():
        size = local_part(parameter).numel()
        tensors = [local_part(value) for value in state.values() if isinstance(value, Tensor)]
        whole = sum(tensor.numel() == size for tensor in tensors)
        if size > 1:
            return sum(_num_bytes(t) for t in tensors if t.numel() != size), whole
    return 0, 0


def _num_bytes(output: Any) -> int:
    """The bytes of a tensor, or of those in what a block returns, on this rank."""
    tensors = [local_part(one) for one in tree_leaves(output) if isinstance(one, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
