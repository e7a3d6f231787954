"""Recorded faults of TorchTitan, put back into release 0.3 as it is installed.

Each function puts one fault back and gives a job whose plan has it; run.py verifies these jobs.
What is replaced acts only where the plan has the axis, so the reference on one rank stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims, fsdp, pipeline_parallel
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3 import parallelize as llama3
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.protocols.sharding import LocalMapConfig
from torchtitan.trainer import Trainer

TP, FSDP, PP, CP, EP = (
    f"--parallelism.{axis}_parallel{rest}_degree=2"
    for axis, rest in (
        ("tensor", ""),
        ("data", "_shard"),
        ("pipeline", ""),
        ("context", ""),
        ("expert", ""),
    )
)
NO_GRAPHS = "--training.disable_cuda_graphs"
PARTIAL = "--parallelism.spmd_backend=partial_dtensor"
ONE_STAGE = "--parallelism.pipeline_parallel_schedule=1F1B"
TWICE = "--training.global_batch_size="


@dataclass(frozen=True)
class Recorded:
    """A recorded fault: where its authors wrote about it, and the plan that shows it."""

    thread: str
    plan: tuple[str, ...]
    says: str
    """A pattern for the first sentence: the module or axis, and the kind of error."""


ALTERED: dict[str, Recorded] = {}


def fault(thread: str, plan: tuple[str, ...], says: str) -> Callable[[Any], Any]:
    def register(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        ALTERED[make.__name__] = Recorded(thread, plan, says)
        # Every rank reads its job, and ranks may be threads: what is replaced is replaced once.
        made = cache(make)
        return lambda: made()()

    return register


def change(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Replace a function by `by`, which gets the function as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: by(original, *args, **kwargs))


def change_clipping(by: Callable[..., Any]) -> None:
    """The same of clip_grad_norm_, which titanlite calls right after the step."""
    later = dist_utils.clip_grad_norm_
    name = "clip_grad_norm_"
    setattr(dist_utils, name, partial(later.func, partial(by, *later.args)))


@fault("pull/649", (PP, NO_GRAPHS), r"norm.*\bpp\b")
def norm_of_own_stage() -> Any:
    """Each stage clips by the norm of its own gradients."""
    change_clipping(lambda clip, *args, pp_mesh=None, **more: clip(*args, **more))
    return llama3_debugmodel


@fault("issues/766", (FSDP,), r"norm.*\bdp_shard\b")
def norm_of_own_shard() -> Any:
    """The norm that is returned is that of the rank's shards."""

    def by(clip: Any, parameters: Any, *args: Any, **more: Any) -> Any:
        own = [one.grad.to_local() for one in parameters if isinstance(one.grad, DTensor)]
        norm = torch.nn.utils.get_total_norm(own)
        whole = clip(parameters, *args, **more)
        return norm if own else whole

    change_clipping(by)
    return llama3_debugmodel


@fault("issues/1805", (TP, NO_GRAPHS, PARTIAL), r"(moe|experts).*|sum over tp")
def expert_input_gradient_not_summed() -> Any:
    """The gradient of what the experts get is not summed over tp."""

    def config() -> Any:
        found = deepseek_v3_debugmodel()
        apply = found.model_spec.parallelize_fn

        def parallelize(model: Any, **options: Any) -> Any:
            for module in model.modules():
                sharding = getattr(module, "_sharding_config", None)
                if type(module).__name__ == "RoutedExperts" and sharding is not None:
                    local = LocalMapConfig(in_grad_placements=None)
                    module._sharding_config = replace(sharding, local_map=local)
            return apply(model, **options)

        found.model_spec.parallelize_fn = parallelize
        return found

    return config


@fault("pull/1551", (FSDP, EP, NO_GRAPHS), r"experts.* 2 times as large")
def expert_gradients_divided_by_their_mesh() -> Any:
    """FSDP divides the gradients of experts by the size of their own mesh, which lacks ep."""

    def by(disable: Any, model: Any) -> None:
        disable(model)
        for module in model.modules():
            groups = (
                module._get_fsdp_state()._fsdp_param_groups if hasattr(module, "reshard") else []
            )
            for group in groups:
                owners = {type(one._module_info.module).__name__ for one in group.fsdp_params}
                if "GroupedExperts" in owners:
                    group.gradient_divide_factor = 0.5

    change(fsdp, "disable_fsdp_gradient_division", by)
    return deepseek_v3_debugmodel


@fault("issues/1733", (PP, NO_GRAPHS, f"{TWICE}16"), r"microbatch|accumulat")
def pipeline_scales_what_is_accumulated() -> Any:
    """After each schedule all gradients are divided by the number of its microbatches."""

    def by(build: Any, **options: Any) -> Any:
        schedule = build(**options)

        def step(original: Any, *args: Any, **more: Any) -> Any:
            # The new gradients are means already; those of earlier schedules are divided again.
            for stage in options["stages"]:
                for parameter in stage.submod.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(schedule._n_microbatches)
            return original(*args, **more)

        change(schedule, "step", step)
        return schedule

    change(pipeline_parallel, "_build_pipeline_schedule", by)
    return llama3_debugmodel


@fault("pull/685", (CP,), r"sum over cp|cp.*(missing|own)")
def cp_without_fsdp() -> Any:
    """Without data parallelism FSDP is not applied, so no gradient is summed over cp."""
    change(
        llama3,
        "apply_fsdp_to_decoder",
        lambda apply, model, mesh, **more: mesh["cp"].size() > 1 or apply(model, mesh, **more),
    )
    return llama3_debugmodel


@fault("pull/761", (CP,), r"loss.*\bcp\b")
def loss_summed_over_dp_only() -> Any:
    """The loss that is logged is summed over data parallelism and not over cp."""

    def by(get: Any, dims: Any, names: Any, **more: Any) -> Any:
        return get(dims, "batch" if names == "loss" else names, **more)

    change(ParallelDims, "get_optional_mesh", by)
    return llama3_debugmodel


@fault("issues/1723", (PP, NO_GRAPHS), r"attention|layers\.0")
def mask_of_the_first_microbatch() -> Any:
    """Every microbatch of a pipeline gets the mask of the first."""

    def by(build: Any, **options: Any) -> Any:
        schedule = build(**options)

        def step(original: Any, *args: Any, kwarg_mbs: Any, **more: Any) -> Any:
            first = kwarg_mbs[0]["attention_masks"]
            masked = [{**one, "attention_masks": first} for one in kwarg_mbs]
            return original(*args, kwarg_mbs=masked, **more)

        change(schedule, "step", step)
        return schedule

    change(pipeline_parallel, "_build_pipeline_schedule", by)
    return llama3_debugmodel


@fault("pull/792", (PP, CP, NO_GRAPHS), r"layers\.2|rope|position")
def positions_of_later_stages() -> Any:
    """Rotary frequencies are split over cp for the first stage only."""

    def by(build: Any, **options: Any) -> Any:
        schedule = build(**options)

        def step(original: Any, *args: Any, kwarg_mbs: Any, **more: Any) -> Any:
            if not options["stages"][0].is_first:
                for one in kwarg_mbs:
                    places = torch.arange(one["positions"].shape[1])
                    one["positions"] = places.expand_as(one["positions"]).contiguous()
            return original(*args, kwarg_mbs=kwarg_mbs, **more)

        change(schedule, "step", step)
        return schedule

    change(pipeline_parallel, "_build_pipeline_schedule", by)
    return llama3_debugmodel


@fault("issues/1842", (FSDP,), r"mean of means|different numbers of targets")
def mean_of_own_tokens() -> Any:
    """Each rank divides its loss by its own number of targets, and gradients are averaged."""

    def by(total: Any, value: Any, mesh: Any = None, **more: Any) -> Any:
        return total(value, mesh, **more) if mesh is None else value * mesh.size()

    change(dist_utils, "dist_sum_tensor", by)
    return llama3_debugmodel


@fault("pull/963", (PP, NO_GRAPHS, ONE_STAGE), r"layers\.2")
def remaining_layers_left_out() -> Any:
    """Layers that the number of stages does not divide are in no stage."""

    def by(generate: Any, stages: int, layers: int, *weights: int) -> Any:
        return generate(stages, layers - layers % stages, *weights)

    def config() -> Any:
        found = llama3_debugmodel()
        found.model_spec.model.layers = found.model_spec.model.layers[:3]
        return found

    change(pipeline_parallel, "_generate_llm_fqn_per_model_part", by)
    return config


@fault("pull/1304", (FSDP, NO_GRAPHS, f"{TWICE}32"), r"expert_bias|tokens_per_expert")
def experts_balanced_in_each_microbatch() -> Any:
    """The bias that balances experts moves after each microbatch that is accumulated."""

    def by(run: Any, trainer: Any, **parts: Any) -> Any:
        loss = run(trainer, **parts)
        if trainer.gradient_accumulation_steps > 1:
            for hook in trainer.optimizers._optimizer_step_pre_hooks.values():
                hook(trainer.optimizers, (), {})
        return loss

    change(Trainer, "forward_backward_step", by)
    return deepseek_v3_debugmodel
