"""The callbacks and the result of `titanlite.train`; torch-free.

Every rank calls every callback with an Event. Callbacks are sent to the ranks with cloudpickle, so
they can be closures or functions of a notebook, but what they change stays on the rank.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.errors import RankError

if TYPE_CHECKING:
    from titanlite.job import Job
    from titanlite.training.metrics import ValidationResult
    from titanlite.training.step import StepResult


@dataclass(frozen=True)
class Event:
    """The argument of a callback; its numbers are the same on every rank."""

    job: Job
    """This rank's part of the job: its `parts` of the model, `parameters`, `config`, `world`.
    `job.whole_parameters()` is a collective call: every rank must make it, or the run hangs."""
    step: int
    """The step that has just finished, counted from 1."""
    result: StepResult | None = None
    """The step's loss, gradient norm and learning rate; None if no step has run."""
    validation_loss: float | None = None
    """The newest validation loss; None before the first validation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The values of the metrics that the key `validation.metrics` lists, from the newest
    validation."""
    checkpoint: Path | None = None
    """The newest checkpoint that this run has saved; None if there is none."""
    state: dict[str, Any] = field(default_factory=dict)
    """What callbacks keep from call to call, in values of JSON. Checkpoints save rank 0's, and a
    run that resumes has it on every rank before `on_start`."""
    _asked: list[bool] = field(default_factory=list, repr=False)

    def stop(self) -> None:
        """Make all ranks end the run after this step, with a checkpoint; any rank may call it.

        After a checkpoint and before the first step, the run ends after the next step.
        """
        self._asked.append(True)


Callback = Callable[[Event], object]


@dataclass
class TrainResult:
    """The result of `titanlite.train`: the losses, norms and metrics of the steps of this call."""

    dump_folder: Path
    steps: list[int] = field(default_factory=list)
    """The step numbers; a resumed run does not start with 1."""
    losses: list[float] = field(default_factory=list)
    """The mean training loss of each step."""
    grad_norms: list[float] = field(default_factory=list)
    """The gradient norm of each step, before clipping."""
    validation_losses: dict[int, float] = field(default_factory=dict)
    """Step -> the mean loss of the validation after it."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> the metrics of the validation after it."""
    is_stopped: bool = False
    """Whether the run was asked to stop before its last step."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run; None: not given."""

    on_step: Callback | None = None
    on_validation: Callback | None = None
    on_checkpoint: Callback | None = None
    on_end: Callback | None = None
    on_start: Callback | None = None


class Recording:
    """Calls the callbacks of a run, in the order of its events, and collects its result."""

    def __init__(
        self, job: Job, callbacks: Callbacks, first_step: int, state: dict[str, Any]
    ) -> None:
        self.result = TrainResult(Path(job.config.job.dump_folder))
        self._callbacks = callbacks
        self._event = Event(job, first_step - 1, state=state)
        self._happened("on_start")

    def stops(self) -> bool:
        """Whether a callback has asked to stop, on any rank; every rank must ask this."""
        if self._callbacks == Callbacks():
            return False
        from titanlite.ranks.peers import Peers

        return any(Peers().gathered(bool(self._event._asked)))

    def after_step(
        self, step: int, result: StepResult, validation: ValidationResult | None
    ) -> None:
        """Record a step and its validation, if there was one."""
        self.result.steps.append(step)
        self.result.losses.append(result.loss)
        self.result.grad_norms.append(result.grad_norm)
        self._happened("on_step", step=step, result=result)
        if validation is not None:
            self.result.validation_losses[step] = validation.loss
            self.result.metrics[step] = dict(validation.metrics)
            self._happened(
                "on_validation", validation_loss=validation.loss, metrics=validation.metrics
            )

    def after_checkpoint(self, path: Path) -> None:
        """Record a checkpoint that is complete."""
        self._happened("on_checkpoint", checkpoint=path)

    def end(self, *, is_stopped: bool = False) -> TrainResult:
        """Record the end of the run; returns its result."""
        self.result.is_stopped = is_stopped
        self._happened("on_end")
        return self.result

    def _happened(self, name: str, **changes: object) -> None:
        """Call `name`, if it is given; raises RankError with the traceback of its error."""
        event = self._event = replace(self._event, **changes)  # type: ignore[arg-type]
        callback: Callback | None = getattr(self._callbacks, name)
        if callback is None:
            return
        try:
            callback(event)
        except Exception as error:
            raise RankError(
                event.job.world.rank,
                f"{name} raised {type(error).__name__} at step {event.step}: {error}",
                "".join(traceback.format_exception(error)),
            ) from error
