"""What ranks write down of a run, as plain numbers; torch-free, so that the caller may be too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Agreement(NamedTuple):
    """One rank's part `a` of a tensor beside the reference's `b`.

    `error` is max|a - b| and `scale` the largest magnitude in the whole of the reference's tensor;
    then the sums of a*a, a*b and b*b, and a digest of a's bytes.
    """

    error: float
    scale: float
    aa: float
    ab: float
    bb: float
    digest: str

    @property
    def difference(self) -> float:
        """max|a - b| / max|b|; where b is all zero, 0 if a is too, else infinity."""
        if self.scale == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        ratio = self.error / self.scale
        return ratio if math.isfinite(ratio) else math.inf


@dataclass
class RankStep:
    """What one rank saw of one step; step 0 has the starting weights alone."""

    loss: float = 0.0
    norm: float = 0.0
    lr: float = 0.0
    num_targets: int = 0
    gradients: dict[str, Agreement] = field(default_factory=dict)
    weights: dict[str, Agreement] = field(default_factory=dict)
    sequences: tuple[int, ...] = ()
    """For each sequence the rank read, which of the reference's batch it is; -1 for none."""
    positions_agree: bool = True
    targets_agree: bool = True
    validation: float | None = None
    """The validation loss, after the last step of a job that validates."""
    state: dict[str, Agreement] = field(default_factory=dict)
    """What the optimizer keeps of each parameter: "name.key"."""
    buffers: dict[str, Agreement] = field(default_factory=dict)


@dataclass
class RankRun:
    """What one rank saw of a run: its place, how its parameters are placed, and its steps."""

    rank: int
    coordinates: dict[str, int]
    placements: dict[str, dict[str, str]]
    """Parameter -> mesh axis -> "replicated", "sharded" or "strided" (cut twice along one dim)."""
    pending: tuple[str, ...]
    """Gradients that were still sums to be made when the optimizer was given them."""
    expected_shards: dict[str, str]
    """Parameter -> digest of the reference's slice at the start."""
    steps: list[RankStep]
    problems: tuple[str, ...] = ()
    """What is not as the job asks for, in sentences, whatever numbers come of it."""
    resume_problems: tuple[str, ...] = ()
    """What is wrong with a run that resumes from the checkpoint that this one has saved."""
    reloaded: RankStep | None = None
    """Weights and optimizer state of a new job that has loaded what this one saved at its end."""
    reloaded_alone: RankStep | None = None
    """What one process has loaded of the plan's checkpoint; of the first rank's run."""


@dataclass
class ReferenceStep:
    """The reference's numbers of one step; its tensors are in the step's file."""

    loss: float = 0.0
    norm: float = 0.0
    lr: float = 0.0
    """By the formula of the schedule, not by what ran."""
    num_targets: int = 0
    validation: float | None = None


@dataclass
class ReferenceRun:
    """What the reference's process gives back: the numbers of its steps, the first the start."""

    steps: list[ReferenceStep]
    problems: tuple[str, ...] = ()
    """What its own step does otherwise than the formulas of clipping and the optimizer."""
    narrowed: tuple[str, ...] = ()
    """Modules that convert a tensor to a narrower dtype in the forward pass, with both dtypes."""


Cell = tuple[int, int, int]
"""(data-parallel rank, microbatch, context-parallel rank): targets that one loss is taken of."""


@dataclass
class ReferenceTrace:
    """What the reference knows of one step, beside the tensors in the trace's files.

    `modules` are in the order in which the forward pass leaves them, each before the one that holds
    it, once for each call in a forward pass. `losses` and `targets` are the sum of losses and the
    number of targets of each cell.
    """

    modules: tuple[str, ...]
    cells: tuple[Cell, ...]
    losses: tuple[float, ...]
    targets: tuple[int, ...]
    num_left_out: int = 0
    """Outputs that were too large to keep."""
    scaled: dict[str, tuple[bool, float]] = field(default_factory=dict)
    """Float8 layer -> whether it scales its input by rows, and the largest amax of it."""


def name_call(module: str, number: int) -> str:
    """The name of a module's output: a forward pass may call it more than once."""
    return module if number == 1 else f"{module} (call {number})"


def module_of(call: str) -> str:
    """The module of what `name_call` gave."""
    return call.partition(" (call ")[0]


@dataclass
class ModuleOutput:
    """One rank's output of a module beside its part of the reference's."""

    agreement: Agreement
    num_calls: int
    wrong_calls: tuple[int, ...]
    shape: str = ""
    """Why the output is no part of the reference's, where it is none."""
    elsewhere: str = ""
    """Whose positions it would be right for, where it is wrong at its own."""
    gradient: Agreement | None = None
    """The gradient of the output beside that of the reference's, where both are known."""
    recomputed: float = 0.0
    """How far what the backward pass recomputed is from what the forward pass put out."""


@dataclass
class RankTrace:
    """What one rank saw of one step, looked at closely."""

    rank: int
    coordinates: dict[str, int]
    modules: dict[str, ModuleOutput]
    summed_output: dict[str, Agreement]
    """Of the first module that differs: mesh axis -> its outputs summed over that axis."""
    summed_gradients: dict[str, dict[str, Agreement]]
    """Gradient -> mesh axis over which the parameter is replicated -> their sum over it."""
    shares: dict[str, tuple[tuple[float, ...], float]]
    """Gradient -> how much of each cell's gradient is in it, and what that leaves unexplained."""
    pending_inputs: tuple[str, ...]
    """Compiled modules that were given the result of a collective that was still running."""
    styles: dict[str, str]
    """Module -> the entry of the tensor-parallel plan that it is cut by."""
    blind_stages: dict[int, str] = field(default_factory=dict)
    """Stages whose forward takes positions, and that have wrong ones or none: stage -> which."""
    scaled: dict[str, tuple[bool, float]] = field(default_factory=dict)
    """As the reference's, of the layers that this rank has."""
