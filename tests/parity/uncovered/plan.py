"""The plans of the rotary models, for models with more tensors than these plans name."""

from dataclasses import replace

from rotary_model.model import RotaryModel, SequenceParallelRotaryModel
from rotary_model.plan import PLANS as ROTARY_PLANS
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel

from titanlite.parallelize.plan import ParallelPlan
from uncovered import model

WHOLE, SHARDED = ROTARY_PLANS[RotaryModel], ROTARY_PLANS[SequenceParallelRotaryModel]


def _with_experts(plan: ParallelPlan) -> ParallelPlan:
    styles = {n: s for n, s in plan.tensor_parallel.items() if "feed_forward" not in n}
    if "layers.*.ffn_norm" in styles:
        styles["layers.*.ffn_norm"] = SequenceParallel(use_local_output=True)
    return replace(plan, tensor_parallel=styles)


PLANS: dict[type[nn.Module], object] = {
    RotaryModel: WHOLE,
    model.Scaled: WHOLE,
    model.ScaledSP: replace(SHARDED, partial_gradients=("shift",)),
    model.UndeclaredSP: SHARDED,
    model.Uneven: WHOLE,
    model.Wrapped: WHOLE,
    model.DeclaredWrong: replace(WHOLE, partial_gradients=("layers.*.gamma",)),
    model.Mixture: _with_experts(WHOLE),
    model.MixtureSP: _with_experts(SHARDED),
    model.ConvolutionSP: SHARDED,
    model.Unused: WHOLE,
    model.Statistics: WHOLE,
    model.ManyHeads: WHOLE,
    model.Drifting: WHOLE,
    model.Averaged: replace(WHOLE, local_buffers=("mean",)),
    model.Counting: WHOLE,
}
