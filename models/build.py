"""Build a registered model: the plain nn.Module, its plan, its initial values and its counts."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from titanlite.errors import ConfigError, TitanliteError, user_line
from titanlite.models.spec import ModelSpec
from titanlite.modules.batch import Batch, call_model, set_call
from titanlite.modules.experts import expert_layers
from titanlite.modules.tied import find_tied, tie
from titanlite.parallelize.plan import ParallelPlan, check_plan, find_blocks, find_plan, lacks_plan
from titanlite.ranks.settings import generators_restored


def build_model(spec: ModelSpec, sizes: Any, dtype: torch.dtype) -> nn.Module:
    """The plain model of this configuration, its parameters in `dtype`.

    It is built on the default device: `with torch.device("meta")` builds it without storage. Raises
    ConfigError if the registered functions cannot be imported or do not return a model.
    """
    inputs, output = spec.load_part("inputs"), spec.load_part("output")
    build = spec.load_part("build")
    try:
        model = build(sizes)
    except TitanliteError:
        raise
    except Exception as error:  # a user's model may raise anything
        where = f" ({line})" if (line := user_line(error)) else ""
        advice = "correct it"
        if "meta tensors" in str(error):
            advice = (
                'the model is built on the "meta" device, without values: compute what depends on '
                "values in forward, or in init_weights()"
            )
        raise ConfigError(
            f"model.name: building {spec.name} fails with {type(error).__name__}: {error}{where}; "
            f"{advice}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name: `build` of {spec.name} returns a {type(model).__name__}; return an "
            "nn.Module"
        )
    set_dtype(model, dtype)
    set_call(model, inputs, output)
    return model


def plan_of(spec: ModelSpec, model: nn.Module) -> ParallelPlan:
    """The parallel plan of a plain model, derived from the model if none is registered.

    Raises TitanliteError if it names modules that the model lacks.
    """
    plan = spec.load_part("plan")
    if isinstance(plan, Mapping):
        plan = plan.get(type(model))
    if callable(plan):
        plan = plan(model)
    if plan is not None and not isinstance(plan, ParallelPlan):
        raise TitanliteError(
            f"`plan` of {spec.name} is a {type(plan).__name__}; give a ParallelPlan, a dict from "
            "model class to ParallelPlan, or a function from the model to its plan"
        )
    plan = plan or find_plan(model)
    check_plan(model, plan)
    return plan


def set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point parameters to `dtype`; buffers are only widened.

    A float32 buffer becomes float64 in a float64 model, and a complex64 one complex128. In a
    bfloat16 model they keep their dtype, since tables of rotary embeddings need it.
    """

    def converted(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor.to(torch.promote_types(tensor.dtype, dtype))

    tied = find_tied(model)
    model._apply(converted)
    tie(model, tied)


def initial_model(spec: ModelSpec, sizes: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    """The whole model on the CPU with its own initial values, a function of `seed` only.

    The values come from its constructor, then from the registered `init`, or else from the model's
    `init_weights()` if it has one, and then from `init_buffers()` if it has that.
    """
    with generators_restored(), torch.device("cpu"):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        model = build_model(spec, sizes, torch.float32)
        init: Callable[[Any], Any] | None = spec.load_part("init")
        with torch.no_grad():
            if init is not None:
                init(model)
            elif callable(own := getattr(model, "init_weights", None)):
                own()
            if callable(own := getattr(model, "init_buffers", None)):
                own()
    set_dtype(model, dtype)
    return model


def module_names(spec: ModelSpec, sizes: Any) -> tuple[str, ...]:
    """The modules between which a pipeline can split: the plan's embeddings, blocks and head.

    Raises TitanliteError if no plan is registered.
    """
    with torch.device("meta"):
        model = build_model(spec, sizes, torch.float32)
    plan = plan_of(spec, model)
    if plan.is_derived:
        raise TitanliteError(lacks_plan(model, "pp"))
    inside = map(plan.block_name, find_blocks(model, plan))
    return (*plan.embeddings, *inside, *plan.head)


def count_experts(spec: ModelSpec, sizes: Any) -> int:
    """The routed experts of the model's first expert layer; 0 if it has none."""
    with torch.device("meta"):
        model = build_model(spec, sizes, torch.float32)
    layers = expert_layers([model]).values()
    return next((layer.num_experts for layer in layers), 0)


def count_flops(model: nn.Module, batch: Batch) -> int | None:
    """Forward and backward FLOPs of a model for `batch`, both on "meta"; None if it does not run.

    Counts matrix products, convolutions and attention (torch.utils.flop_counter). Attention is
    counted without causal masking.
    """
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            outputs = call_model(model, batch)
            outputs.sum().backward()
    except Exception:  # any operator of a user's model may need values
        return None
    finally:
        model.zero_grad(set_to_none=True)
    return counter.get_total_flops()
