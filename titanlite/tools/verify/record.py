"""What ranks record of a run, as plain numbers; torch-free, so that the caller can be too."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titanlite.tools.verify.economy import Traffic

Key = tuple[str, str, str]
"""Of a value: the call of the innermost module, the line, and the operator."""
OVER_PARTS = ("sum", "mean", "logsumexp", "_softmax", "_log_softmax")
"""Operators that sum over what ranks may have only a part of, or scale by that."""


def operator_of(key: Key) -> str:
    """The operator's name, without its overload."""
    return key[2].split(".")[-2]


class Agreement(NamedTuple):
    """One rank's part `a` of a tensor compared with the same part `b` of the reference's.

    `error` is max|a - b|; `scale` is the largest magnitude in the reference's whole tensor; `aa`,
    `ab` and `bb` are the sums of a*a, a*b and b*b; `digest` is a digest of a's bytes. `distance` is
    the root mean square of a - b, divided by that of the whole tensor. `noise` is max|a - b| of the
    elements whose gradient is only rounding error, which the others leave out.
    """

    error: float
    scale: float
    aa: float
    ab: float
    bb: float
    digest: str
    distance: float = 0.0
    noise: float = 0.0

    @property
    def difference(self) -> float:
        """max|a - b| / max|b|; if b is all zero, 0 if a is too, else infinity."""
        if self.scale == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        ratio = self.error / self.scale
        return ratio if math.isfinite(ratio) else math.inf


class MovedToken(NamedTuple):
    """A token that goes to other experts than on one process.

    `margin` is by how much its last expert was ranked above the next one there. `call` is the
    number of the microbatch, counted from 0.
    """

    call: int
    sequence: int
    position: int
    experts: tuple[int, ...]
    expected: tuple[int, ...]
    margin: float


@dataclass
class ReferenceStep:
    """The numbers of one step; the reference's tensors are in the step's file."""

    loss: float = 0.0
    norm: float = 0.0
    lr: float = 0.0
    """The reference's is from the formula of the schedule, not from the scheduler that ran."""
    num_targets: float = 0
    validation: float | None = None
    """The validation loss, after the first and the last step of a job that validates."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of that validation."""
    loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Expert layer -> the tokens of each expert, as the balancing counts them."""
    auxiliary_loss: float | None = None


@dataclass
class RankStep(ReferenceStep):
    """One rank's measurements of one step; step 0 has only the starting weights."""

    gradients: dict[str, Agreement] = field(default_factory=dict)
    weights: dict[str, Agreement] = field(default_factory=dict)
    state: dict[str, Agreement] = field(default_factory=dict)
    """The optimizer state, by "parameter.key"."""
    buffers: dict[str, Agreement] = field(default_factory=dict)
    buffers_beside_old: dict[str, Agreement] = field(default_factory=dict)
    """What a wrong buffer has too much, beside what the reference's was before the step."""
    sequences: tuple[int, ...] = ()
    """For each sequence that the rank read, its index in the reference's batch; -1 for none."""
    positions_agree: bool = True
    targets_agree: bool = True
    moved: dict[str, tuple[MovedToken, ...]] = field(default_factory=dict)
    """Expert layer -> this rank's tokens that go to other experts than on the reference."""


@dataclass
class RankRun:
    """One rank's measurements of a run: its coordinates, its placements and its steps."""

    rank: int
    coordinates: dict[str, int]
    placements: dict[str, dict[str, str]]
    """Parameter -> mesh axis -> "replicated", "sharded" or "strided" (sharded twice)."""
    pending: tuple[str, ...]
    """Gradients that were still Partial at the optimizer step."""
    expected_shards: dict[str, str]
    """Parameter -> digest of the reference's slice at the start."""
    steps: list[RankStep]
    problems: tuple[str, ...] = ()
    """Sentences about what does not match the job's settings, even if no number differs."""
    styles: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Parameter -> the class of its style in the tensor-parallel plan."""
    resume_problems: tuple[str, ...] = ()
    """Sentences about what is wrong with a run that resumes from this run's checkpoint."""
    reloaded: RankStep | None = None
    """Weights, optimizer state and buffers of a new job that has loaded this one's checkpoint."""
    reloaded_alone: RankStep | None = None
    """The same for one process that has loaded the plan's checkpoint; only in rank 0's run."""
    traffic: Traffic = field(default_factory=Traffic)
    """What the rank sent and read in one step, unless that was compiled."""
    unsynchronized: tuple[str, ...] = ()
    """Parameters of FSDP2 modules whose gradient synchronization is off at the optimizer step."""


@dataclass
class ReferenceRun:
    """What the reference's process returns: the numbers of its steps; the first is the start."""

    steps: list[ReferenceStep]
    problems: tuple[str, ...] = ()
    """Sentences about where its step does not follow the formulas of clipping and optimizer."""
    narrowed: tuple[str, ...] = ()
    """Modules that convert a tensor to a narrower dtype in the forward pass, with both dtypes."""


Shares = tuple[float, ...]
"""For each part of the batch, the weight of its gradient in a gradient."""

Fit = tuple[Shares, float]
"""A gradient as a weighted sum of those of parts of the batch, and the relative residual."""

LEFT = 1e-6
"""The largest residual of such a sum."""

Cell = tuple[int, int, int]
"""(data-parallel rank, microbatch, context-parallel rank): the targets of one loss sum."""


@dataclass
class ReferenceTrace:
    """A detailed recording of one step of the reference; its tensors are in files.

    `events` are what modules receive (`name_input`) and return (`name_call`), in forward order: a
    module's output comes after those of its children. `targets` are the number of targets of each
    cell, or their weights.
    """

    events: tuple[str, ...]
    cells: tuple[Cell, ...] = ()
    targets: tuple[float, ...] = ()
    num_left_out: int = 0
    """The number of tensors that were too large to keep."""
    flow: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each of the events, those that it is computed from directly."""
    with_gradient: frozenset[str] = frozenset()
    """Those whose gradients are known."""
    scaled: dict[str, tuple[bool, dict[str, float]]] = field(default_factory=dict)
    """Float8 layer -> (whether its input has one scale per row, the largest amax of its "input",
    and of "weight" and "gradient" if each has one scale)."""
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Expert layer -> the tokens that are routed to each expert."""
    loss_of_parts: float | None = None
    """Of a loss over the whole batch: what it is if each rank has only its own samples."""
    evaluating: frozenset[str] = frozenset()
    """The modules that ran in evaluation mode."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The calls of modules, in the order in which they end."""
        return tuple(event for event in self.events if not is_input(event))

    @property
    def arguments(self) -> dict[str, tuple[str, ...]]:
        """The names of what each module receives."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for event in filter(is_input, self.events):
            found[module_of(event)][event.partition(" <- ")[2]] = None
        return {module: tuple(names) for module, names in found.items()}


def harmless(
    reference: ReferenceTrace, of_ranks: Sequence[Mapping[str, bool]], *, is_backward: bool = False
) -> set[str]:
    """Tensors that agree, or that differ though all that is computed from them next agrees on every
    rank, or the output of a module around them does on some rank.

    `of_ranks` has, for each rank, whether its tensors agree. A module may return a Partial that the
    code after it reduces, and experts receive their tokens in an order of their own. What a
    residual connection adds them to may differ if what agrees is on the way there, too. In the
    backward pass the tensors that come next are those with a gradient that a tensor is computed
    from.
    """
    inner, state, some = set[str](), dict[str, bool](), set[str]()
    for of_rank in of_ranks:
        modules: dict[str, bool] = {}
        for event, agrees in of_rank.items():
            state[event] = state.get(event, True) and agrees
            if not is_input(event) and not is_backward:
                modules[module_of(event)] = modules.get(module_of(event), True) and agrees
        for event, agrees in of_rank.items():
            if agrees:
                some.add(event)
            elif any(modules.get(outer) for outer in around(module_of(event))):
                inner.add(event)
    found = {event for event, agrees in state.items() if agrees} | inner
    following: dict[str, list[str]] = defaultdict(list)
    for event, sources in reference.flow.items():
        for source in sources:
            if not is_backward:
                following[source].append(event)
            elif source in reference.with_gradient:
                following[event].append(source)
    for event in reference.events if is_backward else reversed(reference.events):
        # Of an input that nothing follows from, as one that only says on which device, none is.
        after = following[event] or [called_by(event)] * (is_input(event) and not is_backward)
        # What is right on one rank is no Partial, nor has it an order of its own.
        wrong = {*after} - (found - inner if event in some and not is_backward else found)
        if after and not wrong:
            found.add(event)
        elif wrong and not is_backward and any(map(state.get, after)):
            stack, reached = list(filter(state.get, after)), set[str]()
            while stack:
                if (one := stack.pop()) not in reached:
                    reached.add(one)
                    stack += following[one]
            if wrong <= reached:
                found.add(event)
    return found


@dataclass
class ExpertTrace:
    """One rank's part of an expert layer in one step."""

    rows: dict[int, int]
    """Expert -> the rows that it computed on this rank."""
    squares: dict[int, float]
    """Expert -> the sum of the squares of their results."""
    expected_squares: tuple[float, ...]
    """Those of the reference, of all its rows."""
    num_tokens: int
    moved: tuple[MovedToken, ...]
    gradients: dict[str, dict[int, Agreement]]
    """Parameter -> expert -> this rank's part of that expert's gradient."""


def name_call(module: str, number: int) -> str:
    """The name of a module's output in its `number`-th call in a forward pass, counted from 1."""
    return module if number == 1 else f"{module} (call {number})"


def module_of(call: str) -> str:
    """The module of a name made by `name_call` or `name_input`."""
    return called_by(call).partition(" (call ")[0]


def name_input(call: str, argument: str) -> str:
    """The name of what a call of a module receives for one of its arguments."""
    return f"{call} <- {argument}"


def is_input(event: str) -> bool:
    """Whether a name is made by `name_input`."""
    return " <- " in event


def called_by(event: str) -> str:
    """The name of the output of the call that a name made by `name_input` belongs to."""
    return event.partition(" <- ")[0]


def first_call(event: str) -> str:
    """The name of the same tensor of a module's first call."""
    _, arrow, argument = event.partition(" <- ")
    return f"{module_of(event)}{arrow}{argument}"


def around(module: str) -> list[str]:
    """The modules that contain a module, the outermost, "", first."""
    parts = module.split(".") if module else []
    return [".".join(parts[:count]) for count in range(len(parts))]


@dataclass
class ModuleOutput:
    """What a module returns or receives on a rank, compared with its part of the reference's."""

    agreement: Agreement
    num_calls: int
    wrong_calls: tuple[int, ...]
    shape: str = ""
    """Its shape and the reference's, if it cannot be a part of the reference's output."""
    of_others: tuple[str, ...] = ()
    """The modules of its kind, such as experts, that receive its values on one process."""
    cut: str = ""
    """Its shape and the reference's, if each microbatch has a chunk that is not of the batch."""
    is_other: bool = False
    """Whether it differs, but what is computed from it agrees: a Partial that is reduced later."""
    elsewhere: str = ""
    """The tokens or positions for which it would be correct, if it is wrong for its own."""
    differs_from_jump: bool = False
    """Whether it is correct up to where the rank's positions jump, and only then wrong."""
    gradient: Agreement | None = None
    """The gradient of the output compared with the reference's, if both are known."""
    places: str = ""
    """Where it differs, if that is a part of one dimension; of other code."""
    scales: str = ""
    """How many times too large it is in runs along one dimension, if that is all."""
    has_other_rows: bool = False
    """Whether each row is a multiple of one of the reference's, but not of its own."""
    has_scaled_rows: bool = False
    """Whether each is a multiple of its own, with a factor of its own."""
    gradient_places: str = ""
    """The same for its gradient."""
    gradient_scales: str = ""
    """How many times too large its gradient is in runs along one dimension, if that is all."""
    gradient_adds: tuple[int, int] | None = None
    """A microbatch whose gradient has that of another in it, and the other."""
    is_overwritten: bool = False
    """Whether something wrote into it between forward and backward pass."""
    gradient_is_moved: bool = False
    """Whether that has rows of the reference's, but not those that it should have."""
    recomputed: float = 0.0
    """The difference of the recomputed output from that of the forward pass."""
    is_moved: bool = False
    """Whether its rows or columns are those of the reference's output, but not in its order."""
    rows: tuple[int, ...] = ()
    """Which of the reference's rows, of dimension 0, these then are, if known."""
    num_rows: int = 0
    """How many the reference has."""
    is_cut_off: bool = False
    """Whether it requires no gradient, but the reference's does."""
    is_checkpointed: bool = False
    """Whether it is in a reentrant checkpoint."""
    has_no_gradient: bool = False
    """Whether no gradient of it arrives, but one of the reference's does."""
    extra: tuple[str, float] | None = None
    """A tensor that it is computed from, and how often too much it is in it, if nothing else is
    wrong.
    """
    is_padded: bool = False
    """Whether it has more than its part of the reference's, of other code: padding."""
    tokens: tuple[int, int] | None = None
    """How many of its tokens are padding, and all, if one process has them in other calls."""
    is_part: bool = False
    """Whether it is compared with a part of the reference's, of other code."""
    has_equal_rows: bool = False
    """Whether it is not certain which of equal rows of the reference's it has."""
    cut_dims: tuple[int, ...] = ()
    """The dimensions that are shorter than the reference's, but for features."""
    biases: float | None = None
    """How often the output contains the module's bias, if nothing else is wrong with it."""


@dataclass
class RankTrace:
    """One rank's detailed recording of one step."""

    rank: int
    coordinates: dict[str, int]
    events: dict[str, ModuleOutput] = field(default_factory=dict)
    """What modules receive and return."""
    summed_output: dict[str, Agreement] = field(default_factory=dict)
    """Mesh axis -> the first tensor of these that differs, summed over that axis."""
    summed_biases: dict[str, float] = field(default_factory=dict, kw_only=True)
    """Mesh axis -> how often that sum contains the module's bias, if that is known."""
    summed_gradients: dict[str, dict[str, Agreement]] = field(default_factory=dict)
    """Gradient -> mesh axis over which the parameter is replicated -> the sum over that axis."""
    shares: dict[str, Fit] = field(default_factory=dict)
    """Gradient -> it as a sum of the gradients of the cells."""
    pending_inputs: tuple[str, ...] = ()
    """Compiled modules that received the result of a collective that was still running."""
    styles: dict[str, str] = field(default_factory=dict)
    """Module -> its entry in the tensor-parallel plan."""
    blind_stages: dict[int, str] = field(default_factory=dict)
    """Stages that take positions and do not receive the right ones -> "missing" or "wrong"."""
    scaled: dict[str, tuple[bool, dict[str, float]]] = field(default_factory=dict)
    """The same as in ReferenceTrace, for the layers of this rank."""
    experts: dict[str, ExpertTrace] = field(default_factory=dict)
    """Expert layer -> its tokens and experts on this rank."""
    summed_backward: dict[str, dict[str, Agreement]] = field(default_factory=dict)
    """Wrong gradient of what a module receives or returns -> axis -> its sum over that axis."""
    sequences: tuple[int, ...] = ()
    """For each sequence of a validation's first batch, its index on one process; -1 for none."""
    idle: tuple[str, ...] = ()
    """Modules of this rank that never ran."""
    inferred: frozenset[str] = frozenset()
    """Modules that torch's PipelineStage has run once more, to learn shapes."""
    evaluating: frozenset[str] = frozenset()
    """The same as in ReferenceTrace."""
    loss: float | None = None
    """The loss of the step when it was run again; None if that is not known."""
    squares: float = 0.0
    """The sum of squares of this rank's gradients then."""
    same_as: dict[str, str] = field(default_factory=dict)
    """Wrong gradient -> another parameter whose gradient in the reference it equals."""
    file: str = ""
    """Where the rank has saved its part of the batch and its wrong gradients, of other code."""
    not_compared: tuple[str, ...] = ()
    """What modules receive or return in a layout that fits no part of the reference's."""
    accumulated: dict[str, int] = field(default_factory=dict)
    """Parameter -> how often a backward pass adds to its gradient, of other code."""
    num_passes: int = 0
    """The forward passes of the step, of other code."""
    order: tuple[int, ...] = ()
    """Which of the reference's calls of modules the rank's are, where their order is another."""
    unreached: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """What a module returns -> in which of its calls no gradient comes, and how many there are."""
    lines: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What a module receives or returns -> the lines of code that ran just before."""
    lines_backward: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The same for the gradients of these tensors."""
    over_parts: dict[tuple[Key, int], tuple[int, ...]] = field(default_factory=dict)
    """The values that may need the other ranks' parts, with their shapes."""
    numbers: tuple[WrongLine, ...] = ()
    """The lines outside modules that are given other numbers than on one process."""
    wrong_lines: tuple[WrongLine, ...] = ()
    """The first lines whose results are wrong, of other code."""
    wrong_terms: tuple[WrongTerm, ...] = ()
    """The terms of the loss that differ, if others agree."""
    padding_counted: tuple[str, int] = ("", 0)
    """A line with a mask that has some of the padding, and how many tokens of it."""
    groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Call of a module -> the groups of ranks that exchange something inside it."""
    unseen: dict[str, str] = field(default_factory=dict)
    """Call of a module, "" for none -> the first line that sends what has a gradient, unseen by
    autograd."""
    written: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Call, "" for none -> a line in it that writes into what has a gradient, unseen by autograd,
    and the line that has computed that.
    """
    sent_by_loss: str = ""
    """The first line outside modules, after a forward pass began, that exchanges something."""
    sent_from: dict[str, str] = field(default_factory=dict)
    """A line -> the other line that sends what it computes."""
    exchanged: frozenset[str] = frozenset()
    """What has a gradient for which the backward pass called a collective."""
    unused: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """A line that receives in the backward pass -> the parts with which nothing is computed."""
    wrong_gradient: tuple[str, ...] = ()
    """The line of the caller's code whose result is the first in the backward pass with a wrong
    gradient, and the lines that read it, whose results have right ones.
    """
    extreme: str = ""
    """Which largest or smallest over ranks of what the first of these lines computes is right."""
    without_gradient: tuple[str, ...] = ()
    """A call, its line whose result has a gradient on one process alone, and what reads it."""
    recomputed_apart: tuple[str, ...] = ()
    """Lines that the backward pass computes again, with other values than in the forward pass."""
    overwritten: tuple[str, ...] = ()
    """Lines that save for the backward pass what is another tensor when that reads it."""
    carried: dict[str, tuple[str, str, bool]] = field(default_factory=dict)
    """Call -> a line in it that reads what an earlier microbatch computes, and in which line."""
    left_out: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Call of a module -> an operator in it that one process alone runs, and its line."""
    added: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The same for one that only this rank runs."""
    cleared: dict[str, frozenset[str]] = field(default_factory=dict)
    """A line that clears gradients to which this step has added -> of which parameters."""
    step_lines: tuple[WrongLine, ...] = ()
    """The first lines of the optimizer's step whose results are wrong."""
    drawn: tuple[str, ...] = ()
    """The lines of the optimizer's step that draw random numbers."""
    own_norm: tuple[str, ...] = ()
    """A line there that takes the norm of the rank's gradients alone, and the axes it lacks."""
    outdated: frozenset[str] = frozenset()
    """What agrees with a model that has weights of before the last update."""

    @property
    def modules(self) -> dict[str, ModuleOutput]:
        """What modules return."""
        return {event: one for event, one in self.events.items() if not is_input(event)}


class Through(NamedTuple):
    """What comes back to a tensor through one line of a rank's code, of other code."""

    call: str
    line: str
    digest: str
    """Of what the line computes, equal on ranks that have the same."""
    scales: tuple[Fit | None, ...]
    """Of each microbatch, the right gradient as a sum of what comes back otherwise, and of this."""
    sums: dict[str, Fit | None]
    """Axis -> it as a multiple of both, if this is summed over the axis."""
    function: str
    """A custom autograd function whose result the line reads; "" for none."""
    arrived: dict[str, Fit | None]
    """Axis -> the tensor's gradient on one process as a multiple of what comes back to that result,
    summed over the axis.
    """


@dataclass
class CodeRun(RankRun):
    """One rank's measurements of code that is not a job."""

    places: dict[str, str] = field(default_factory=dict)
    """Parameter -> a digest of the elements that the rank holds, equal for replicas."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Parameter -> the number of all its elements."""
    cut_dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter of several dimensions -> those of which the rank has a part."""
    losses: list[float | None] = field(default_factory=list)
    """What each step returned, None where a rank computes no loss."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each step, of the optimizer's first group."""
    parts: list[str] = field(default_factory=list)
    """A digest of this rank's part of each batch."""
    states_left: set[str] = field(default_factory=set)
    """The optimizer's states whose shapes fit no part of the reference's."""
    cells: list[tuple[int, int, tuple[int, ...], tuple[int, ...]] | None] = field(
        default_factory=list
    )
    """Of each batch: how many rows and columns it has, and which of them this rank has."""
    traces: dict[int, RankTrace] = field(default_factory=dict)
    """The steps in which some rank's numbers differ, recorded in detail."""
    not_compared: tuple[str, ...] = ()
    """Buffers that have no counterpart of their shape in the reference."""
    changed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> weights that are others at its first forward pass than after the step before."""
    averages: bool = False
    """Whether a module is one of DDP or FSDP, which average gradients."""
    is_ddp: bool = False
    """Whether a module is one of DDP."""
    hooked: tuple[str, ...] = ()
    """The parameters with hooks that FSDP2 has sharded."""
    beside_shards: tuple[str, ...] = ()
    """Those that FSDP2 does not have, where it has others."""
    comm_hook: tuple[str, str] = ("", "")
    """The name of DDP's communication hook, and a line beside it that asks for a bucket's index."""
    shuffled: tuple[str, ...] = ()
    """Starting weights with the elements of the reference's, in another order."""
    in_other_order: tuple[str, ...] = ()
    """Starting weights that differ, but have rows of the reference's, in another order."""
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter -> what the optimizer has otherwise for it then, in words."""
    updates: dict[int, str] = field(default_factory=dict)
    """The step in which some rank's weights differ -> the file with this rank's parts of them."""


@dataclass
class PartFits:
    """Wrong gradients as weighted sums of the gradients of the ranks' parts of the batch."""

    fits: dict[int, dict[str, Fit]] = field(default_factory=dict)
    """Rank -> gradient -> these sums, relative to the reference's own."""
    weights: Shares = ()
    """Each part's share of the whole mean."""
    counts: dict[str, Shares] = field(default_factory=dict)
    """What else parts may be weighted by."""
    rows: dict[int, dict[str, WrongRows]] = field(default_factory=dict)
    """Rank -> gradient -> the few rows that differ, if the others agree."""
    previous: dict[str, float] = field(default_factory=dict)
    """Gradient -> how often it also contains that of the step before, on every rank."""
    of_weights: dict[str, float] = field(default_factory=dict)
    """Gradient -> how often it also contains the weight."""
    mixed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Gradient -> the other parameters whose gradients it contains."""

    def explains(self, name: str) -> bool:
        """Whether a gradient is such a sum on every rank."""
        left = [of_rank[name][1] for of_rank in self.fits.values() if name in of_rank]
        return bool(left) and max(left) < LEFT


class UseFit(NamedTuple):
    """A gradient as a sum of those of the single uses of its parameter."""

    lines: tuple[str, ...]
    """Where the uses are, in forward order."""
    counts: tuple[Shares, ...]
    """For each use how often each part of the batch is there, or one number for all."""


class WrongRows(NamedTuple):
    """Some rows of a gradient, or none for elements that are zero on one process."""

    rows: tuple[int, ...]
    number: int
    """Of all rows, or of these elements."""
    is_zero: bool
    """Whether this rank's are zero, and those of one process are not."""
    should_be_zero: bool
    is_first: bool = False
    """Whether it is the first row of a shard, and no other."""
    times: tuple[int, ...] = ()
    """How often what one process has is in each of these rows."""
    counted: str = ""
    """The tensor of the batch in which each of the rows' indices occurs that often."""
    shares: Shares = ()
    """These rows as a sum of those of the parts' gradients, relative to the reference's."""


class Update(NamedTuple):
    """What the optimizer's step did to a rank's part of a weight that is wrong."""

    fit: Agreement
    """Of the change of the weight."""
    is_alone: bool
    """Whether it is what the step does with this part as if it were the whole tensor."""
    decay: Agreement
    """The error of the new weight beside the weight before the step."""
    num_kept: int
    """The number of wrong elements, if the step has changed none of them."""
    num_zero: int = 0
    """The number of wrong elements, if all of them are zero on one process."""
    is_unchanged: bool = False
    """Whether the step of one process leaves the weight as it is."""
    scale: float | None = None
    """How often its change is in this one, if what is left is a multiple of the weight, its decay.
    """
    adam_step: int | None = None
    """The step of Adam whose bias correction gives that scale."""
    scales: tuple[float, ...] = ()
    """How often the reference's change is in each run of rows, if it is in all of them."""


@dataclass
class WrongLine:
    """The first line of the caller's code whose result is wrong."""

    call: str
    """The call of the innermost module that runs it."""
    line: str
    is_moved: bool = False
    """Whether the result has the rows or columns of one process in another order."""
    source: str = ""
    """The line whose result it reads, if that is this rank's share: right after a reduction."""
    way: str = ""
    """Which, such as "the sum over tp"."""
    too_narrow: tuple[str, ...] = ()
    """The line that reduces that result, and over which axis, if `way` needs another, too."""
    is_alike: bool = False
    """Whether all ranks have that share alike, after an exchange."""
    summed_by: str = ""
    """The line that sums it over ranks with that to which it is added, which each has whole."""
    mixed: tuple[str, str] | None = None
    """Another line whose result it reads, and the other reduction that makes that right."""
    is_of_part: bool = False
    """Whether it mixes elements of a value that is right, of which this rank has only a part."""
    is_of_padded: bool = False
    """Whether it mixes elements of a value that is right, but has padding on this rank."""
    is_causal: bool = False
    """Whether it is attention with `is_causal`."""
    only_here: tuple[str, ...] = ()
    """The lines that compute what it reads and that one process does not run."""
    arranges: tuple[str, ...] = ()
    """Modules inside `call`, if the value only has what they return, in some order."""
    is_random: bool = False
    """Whether its operator draws random numbers."""
    instead: tuple[str, ...] = ()
    """The line whose result it reads, and that of which it reads the result on one process."""
    never_here: tuple[str, ...] = ()
    """The lines that compute what one process reads there and that this rank does not run."""
    numbers: tuple[tuple[str, float, float], ...] = ()
    """Numbers that its operator is given: which, the rank's, and another of one process."""
    rows: str = ""
    """The rows of one process that the result has, if they are not the rank's."""
    shift: int = 0
    """How much further on than the rank's tokens the columns are that the result has."""
    over: str = ""
    """Over how many elements means and the like are taken on the way, if otherwise there."""
    order: str = ""
    """How it reads the elements that one process reads there, if in another order."""
    unlike: str = ""
    """The line of indices, or the like, that are of other rows than what it reads besides."""
    border: str = ""
    """Where it differs, if that is only where the rank's part "begins" or "ends"."""


class WrongTerm(NamedTuple):
    """A term of a loss of `number` terms that differs, or that one side alone has."""

    number: int
    line: str
    """That computes it on the ranks; "" if none does."""
    value: float
    """Over all ranks."""
    known_line: str
    """That of one process, "" for none, with its value."""
    known: float


@dataclass
class ModelRun(ReferenceRun):
    """What the process of the plain model of such code returns."""

    trace: ReferenceTrace = field(default_factory=lambda: ReferenceTrace(()))
    """Of its first step."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of one parameter."""
    changed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """As in CodeRun."""
    accumulated: dict[int, dict[str, int]] = field(default_factory=dict)
    """Step -> parameter -> how often a backward pass adds to its gradient."""
