"""Initialization, loss, gradient norm, optimizer and step; their numbers are plan-invariant."""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.training.initial_weights import initialize as initialize
    from titanlite.training.loss import NEXT_TOKEN as NEXT_TOKEN
    from titanlite.training.loss import Loss as Loss
    from titanlite.training.loss import token_loss_sum as token_loss_sum
    from titanlite.training.norm import clip_gradients as clip_gradients
    from titanlite.training.norm import gradient_norm as gradient_norm
    from titanlite.training.norm import reduce_partial_gradients as reduce_partial_gradients
    from titanlite.training.optimizer import build_optimizer as build_optimizer
    from titanlite.training.optimizer import build_scheduler as build_scheduler
    from titanlite.training.step import StepResult as StepResult
    from titanlite.training.step import Trainer as Trainer

PUBLIC = {
    "initial_weights": ("initialize",),
    "step": ("Trainer", "StepResult"),
    "loss": ("Loss", "NEXT_TOKEN", "token_loss_sum"),
    "norm": ("gradient_norm", "clip_gradients", "reduce_partial_gradients"),
    "optimizer": ("build_optimizer", "build_scheduler"),
}
"""The public names, by module."""

lazy(__name__, PUBLIC)
