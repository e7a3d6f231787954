"""The experts of transformers, reached as titanlite's own: sent by expert, spread over ranks.

transformers 5 stacks the weights of a layer's experts, and gives them tokens with the choice and
the weights of its router. `adopt` makes these experts a RoutedExperts, and the module around them,
which has the router, a RoutedLayer. Router, products and weights stay those of transformers.

Shapes: N tokens, D model width, E experts, K experts per token.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.modules.experts import RoutedExperts, RoutedLayer
from titanlite.modules.experts.balance import Tally, observe
from titanlite.modules.experts.dispatch import host_sizes
from titanlite.modules.experts.products import prefers_grouped
from titanlite.modules.shards import local_part


class HFExperts(RoutedExperts):
    """A mixin for a class of experts of transformers."""

    tally: Tally

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The sum of the outputs of the experts that the router chose."""
        return self._routed(x_ND, chosen_NK, weights_NK)

    # The number of rows of each expert depends on values, which a compiler cannot trace.
    @torch.compiler.disable
    def _routed(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            weights_NK = observe(weights_NK, chosen_NK, self.num_experts, None, self.tally)
        return self.combine(x_ND, weights_NK, chosen_NK)

    def _compute(
        self, rows: Tensor, counts: Tensor, sizes: list[int] | None = None, **_: Any
    ) -> Tensor:
        module: Any = self
        if prefers_grouped(rows, local_part(module.down_proj)):
            from transformers.integrations.moe import grouped_mm_experts_forward

            each = torch.arange(len(counts), device=rows.device)
            chosen = each.repeat_interleave(counts, output_size=len(rows)).unsqueeze(-1)
            ones = rows.new_ones(len(rows), 1)
            return grouped_mm_experts_forward(_Here(self, len(counts)), rows, chosen, ones)
        first, gate = ("gate_up_proj", "_apply_gate") if module.has_gate else ("up_proj", "act_fn")
        between = getattr(self, gate)
        parts = rows.split(sizes or host_sizes(len(rows), counts)[0])
        each_of = zip(parts, _layers(self, first), _layers(self, "down_proj"), strict=True)
        return torch.cat([F.linear(between(F.linear(x, *up)), *down) for x, up, down in each_of])


def _layers(experts: Any, name: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The weight [out, in] and the bias of each expert of this rank."""
    here = _Here(experts, experts.num_experts)
    weights = getattr(here, name)
    if experts.is_transposed:
        weights = weights.mT
    biases = getattr(here, f"{name}_bias").unbind() if experts.has_bias else [None] * len(weights)
    return zip(weights.unbind(), biases, strict=True)


class _Here:
    """A module of experts with this rank's weights, as the functions of transformers take it."""

    def __init__(self, experts: RoutedExperts, num_experts: int) -> None:
        self.experts, self.num_experts = experts, num_experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return value.to_local() if isinstance(value, DTensor) else value


class HFExpertLayer(RoutedLayer):
    """A mixin for a module of transformers that has a router and experts."""


def adopt(model: nn.Module) -> None:
    """Make each layer of experts of `model` one of titanlite's, if all its weights are stacked."""
    layer: Any
    experts: Any
    for layer in list(model.modules()):
        experts = layer._modules.get("experts")
        weights = dict(experts.named_parameters()) if hasattr(experts, "has_gate") else {}
        if weights and all(len(w) == experts.num_experts for w in weights.values()):
            experts.__class__ = _with(HFExperts, experts)
            layer.__class__ = _with(HFExpertLayer, layer)
            layer.num_experts, layer.expert_bias = experts.num_experts, None
            layer.tally = experts.tally = Tally()


def _with(mixin: type[nn.Module], module: nn.Module) -> Any:
    return type(type(module).__name__, (mixin, type(module)), {})
