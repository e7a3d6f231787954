"""A Llama whose blocks pause, so that the time of its passes does not depend on the machine.

Registered by experimental.custom_import = "tests.benchmarks.paused_model". A pause is an operator:
the planner sees it in a trace, and its seconds are given as those of a measured operator.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titanlite import register_model
from titanlite.models.llama3.config import Llama3Config
from titanlite.models.llama3.model import Llama3
from titanlite.models.llama3.plan import plan_of
from titanlite.tools.planner.hardware import Hardware, OperatorCost

FORWARD_SECONDS, BACKWARD_SECONDS = 0.04, 0.08


@torch.library.custom_op("paused::forward", mutates_args=())
def pause(x: Tensor) -> Tensor:
    """A copy of x, after FORWARD_SECONDS."""
    time.sleep(FORWARD_SECONDS)
    return x.clone()


@torch.library.custom_op("paused::backward", mutates_args=())
def pause_backward(gradient: Tensor) -> Tensor:
    time.sleep(BACKWARD_SECONDS)
    return gradient.clone()


pause.register_fake(torch.empty_like)
pause_backward.register_fake(torch.empty_like)
pause.register_autograd(lambda ctx, gradient: pause_backward(gradient))


class PausedLlama(Llama3):
    """Llama3 with a pause after each block."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__(config)
        for layer in self.layers.values():
            layer.register_forward_hook(lambda _, __, output: pause(output))


@dataclass(frozen=True)
class PausedConfig(Llama3Config):
    """A small Llama: its own operators take little beside the pauses."""

    dim: int = 32
    n_layers: int = 4
    n_heads: int = 2
    n_kv_heads: int = 2
    vocab_size: int = 64
    multiple_of: int = 32


def with_pauses(hardware: Hardware) -> Hardware:
    """The hardware with the seconds of the pauses, which are all that these operators take."""
    pauses = {
        "paused::forward:float32": OperatorCost(FORWARD_SECONDS),
        "paused::backward:float32": OperatorCost(BACKWARD_SECONDS),
    }
    return replace(hardware, operators={**hardware.operators, **pauses})


PLANS: dict[Any, Any] = {PausedLlama: plan_of}
register_model("paused", PausedLlama, PausedConfig, plan=PLANS)
