"""The training state of a job, to save and to restore.

Tensors have names that are the same under every plan: model.NAME, and optimizer.NAME.KEY for the
optimizer state of a parameter (exp_avg, step, ...). The learning rate schedule and the sampler are
a few numbers. Random generators are seeded by the step (training/generators.py), so they have no
state to save.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from titanlite.checkpoint.manifest import BrokenCheckpointError, OptimizerState, TrainingState
from titanlite.checkpoint.storage import Piece, Pieces
from titanlite.errors import ConfigError
from titanlite.modules.shards import local_part, offsets_of
from titanlite.training.averaging import AVERAGE, average_dtype, is_average

if TYPE_CHECKING:
    from titanlite.job import Job


class Updates(Protocol):
    """What updates the weights."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def scheduler(self) -> torch.optim.lr_scheduler.LRScheduler: ...


class Trained(Protocol):
    """What is trained on this rank: a Job, or the parts of a loop by hand."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...
    @property
    def buffers(self) -> Mapping[str, Tensor]: ...
    @property
    def trainer(self) -> Updates: ...


MODEL, OPTIMIZER = "model", "optimizer"
T = TypeVar("T")


def weight_pieces(job: Trained, dtype: torch.dtype | None = None) -> Pieces:
    """This rank's shard of each parameter and persistent buffer; copied if `dtype` differs."""
    pieces = {}
    for name, tensor in {**job.parameters, **job.buffers}.items():
        piece = _piece(tensor)
        if dtype is not None and piece.local.dtype != dtype and dtype.is_floating_point:
            piece = Piece(piece.local.to(dtype), piece.shape, piece.offsets)
        pieces[f"{MODEL}.{name}"] = piece
    return pieces


def averaged(pieces: Mapping[str, T], stored: Collection[str]) -> dict[str, T]:
    """The weights in `pieces`, by name, each by the name of its average if that is `stored`."""
    averages = {name: f"{OPTIMIZER}.{name.partition('.')[2]}.{AVERAGE}" for name in pieces}
    return {
        average if (average := averages[name]) in stored else name: pieces[name] for name in pieces
    }


def optimizer_pieces(job: Trained) -> Pieces:
    """This rank's shard of the optimizer state; empty before the first step."""
    return {
        f"{OPTIMIZER}.{name}.{key}": _piece(value)
        for name, parameter in job.parameters.items()
        for key, value in job.trainer.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def numbers_of(job: Trained, samples_read: int, **details: Any) -> TrainingState:
    """What a manifest has of the training state; `details` are its fields that a Job alone has."""
    optimizer = job.trainer.optimizer
    first = optimizer.param_groups[0]
    settings = {key: value for key, value in first.items() if key != "params"}
    return TrainingState(
        lr_scheduler=job.trainer.scheduler.last_epoch,
        dataloader=samples_read,
        optimizer=OptimizerState(name=type(optimizer).__name__, settings=settings),
        **details,
    )


def data_of(job: "Job") -> str:
    """Identifies the training data: a Dataset's `fingerprint`, or "" if it has none."""
    return getattr(job.dataset, "fingerprint", "")


def restore_schedule(job: Trained, last_epoch: int) -> None:
    """Restore the position in the schedule; the learning rate there follows the configuration."""
    scheduler: Any = job.trainer.scheduler
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * factor(last_epoch) for base, factor in pairs]
    scheduler.last_epoch, scheduler._step_count = last_epoch, last_epoch + 1
    scheduler._last_lr = rates
    for group, rate in zip(job.trainer.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def make_optimizer_state(
    job: Trained,
    stored: Mapping[str, tuple[torch.Size, torch.dtype]],
    averages: Collection[str] = (),
) -> Pieces:
    """Allocate the optimizer state that `stored` has; returns the pieces to fill.

    State of its parameter's shape is sharded like the parameter. Of an average of the weights, only
    the keys `averages` are used, and each may be absent. Raises BrokenCheckpointError if
    the stored state of a parameter is not that of this optimizer. It may be absent.
    """
    optimizer = job.trainer.optimizer
    settings = {p: group for group in optimizer.param_groups for p in group["params"]}
    by_parameter: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for name, what in stored.items():
        kind, _, rest = name.partition(".")
        if kind == OPTIMIZER:
            owner, _, key = rest.rpartition(".")
            by_parameter.setdefault(owner, {})[key] = what
    for name, parameter in job.parameters.items():
        found = by_parameter.get(name, {})
        averaged = {key: found.pop(key) for key in [*found] if is_average(key)}
        for key, (shape, dtype) in averaged.items():
            if shape != parameter.shape or dtype != average_dtype(parameter):
                raise BrokenCheckpointError(f"{OPTIMIZER}.{name}.{key} is not of its weight's kind")
            if key in averages:
                optimizer.state[parameter][key] = torch.zeros_like(parameter, dtype=dtype)
        group = settings.get(parameter, {})
        saved = {key: shape == parameter.shape and shape != () for key, (shape, _) in found.items()}
        kept = _kept(optimizer, group) or saved
        shapes = {key: parameter.shape if like else torch.Size() for key, like in kept.items()}
        if found and {key: shape for key, (shape, _) in found.items()} != shapes:
            raise BrokenCheckpointError(
                f"the state of {name} is not that of {type(optimizer).__name__} ({', '.join(kept)})"
            )
        for key, (shape, dtype) in found.items():
            if dtype != parameter.dtype if kept[key] else not dtype.is_floating_point:
                raise BrokenCheckpointError(f"{OPTIMIZER}.{name}.{key} has dtype {dtype}")
            if kept[key]:
                # zeros_like also copies the parameter's placements, under every plan.
                value = torch.zeros_like(parameter, dtype=dtype)
            else:
                beside = group.get("fused") or group.get("capturable")
                device = local_part(parameter).device if beside else torch.device("cpu")
                value = torch.zeros(shape, dtype=dtype, device=device)
            optimizer.state[parameter][key] = value
    return optimizer_pieces(job)


def check_counts(job: Trained) -> None:
    """Raises BrokenCheckpointError if a step count of the optimizer is not valid."""
    kept = job.trainer.optimizer.state.values()
    counts = [state["step"].float() for state in kept if isinstance(state.get("step"), Tensor)]
    if counts and not bool((torch.stack(counts).isfinite() & (torch.stack(counts) >= 0)).all()):
        raise BrokenCheckpointError(f"a step count of the {OPTIMIZER} is negative or not finite")


# The state of each optimizer per parameter: True if it has the parameter's shape, False if scalar.
_ADAM = {"step": False, "exp_avg": True, "exp_avg_sq": True}
_MOMENTUM = {"momentum_buffer": True}
_KEPT = {"Adam": _ADAM, "AdamW": _ADAM, "SGD": _MOMENTUM, "Muon": _MOMENTUM}


def _kept(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """What the optimizer keeps of a parameter of this group; {} if it is not known here."""
    name = type(optimizer).__name__
    is_adamw = name == "Muon" and not group.get("matrices", True)
    return _ADAM if is_adamw else _KEPT.get(name, {})


def check_optimizer(job: Trained, name: str) -> None:
    """Raises ConfigError if `name`, the optimizer that was saved, has another kind of state."""
    own = type(job.trainer.optimizer).__name__
    kept = {"Adam": "Adam", "AdamW": "Adam"}
    if kept.get(name, name) != kept.get(own, own):
        raise ConfigError(
            f'optimizer.name: the checkpoint has the state of {name}; give "{name}", or skip the '
            'state with checkpoint.exclude_from_loading = ["optimizer"]'
        )


def _piece(tensor: Tensor) -> Piece:
    tensor = tensor.detach()
    return Piece(local_part(tensor), tensor.shape, offsets_of(tensor))
