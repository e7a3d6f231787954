"""The experts of transformers, reached as titanlite's own: sent by expert, spread over ranks.

transformers 5 stacks the weights of a layer's experts, and gives them tokens with the choice and
the weights of its router. `adopt` makes these experts a RoutedExperts, and the module around them,
which has the router, a RoutedLayer. Router, products and weights stay those of transformers.

Shapes: N tokens, D model width, E experts, K experts per token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.modules.experts import RoutedExperts, RoutedLayer
from titanlite.modules.experts.balance import Tally, observe
from titanlite.modules.experts.dispatch import host_sizes
from titanlite.modules.experts.products import grouped_product, prefers_grouped


class HFExperts(RoutedExperts):
    """A mixin for a class of experts of transformers."""

    tally: Tally

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:  # type: ignore[override]
        """The sum of the outputs of the chosen experts; transformers gives the choice first."""
        return self._routed(x_ND, chosen_NK, weights_NK)

    # The number of rows of each expert depends on values, which a compiler cannot trace.
    @torch.compiler.disable
    def _routed(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            weights_NK = observe(weights_NK, chosen_NK, self.num_experts, None, self.tally)
        return RoutedExperts.forward(self, x_ND, weights_NK, chosen_NK)

    def _compute(
        self, rows: Tensor, counts: Tensor, sizes: list[int] | None = None, **_: Any
    ) -> Tensor:
        module: Any = self
        first, gate = ("gate_up_proj", "_apply_gate") if module.has_gate else ("up_proj", "act_fn")
        between = getattr(module, gate)
        up, down = _layers(module, first), _layers(module, "down_proj")
        if prefers_grouped(rows, down[0]):
            ends = counts.cumsum(0).to(torch.int32)
            each = torch.arange(len(counts), device=rows.device)
            each = each.repeat_interleave(counts, output_size=len(rows))

            def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
                y = grouped_product(x, weight, ends)
                return y if bias is None else y + bias.index_select(0, each)

            return product(between(product(rows, *up)), *down)
        parts = rows.split(sizes or host_sizes(len(rows), counts)[0])
        ups, downs = (zip(*(one.unbind() for one in of), strict=True) for of in (up, down))
        of_experts = zip(parts, ups, downs, strict=True)
        return torch.cat([F.linear(between(F.linear(x, *w)), *v) for x, w, v in of_experts])


def _layers(experts: Any, name: str) -> list[Tensor]:
    """The weights [E, out, in] of this rank's experts and, if they have any, their biases."""
    names = (name, f"{name}_bias") if experts.has_bias else (name,)
    tensors = (getattr(experts, one) for one in names)
    weight, *biases = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return [weight.mT if experts.is_transposed else weight, *biases]


def adopt(model: nn.Module) -> None:
    """Make each layer of experts of `model` one of titanlite's, if all weights are stacked."""
    layer: Any
    experts: Any
    for layer in list(model.modules()):
        experts = layer._modules.get("experts")
        if hasattr(experts, "has_gate") and not experts.has_post_expert_norm:
            experts.__class__ = _with(HFExperts, experts)
            layer.__class__ = _with(RoutedLayer, layer)
            layer.num_experts, layer.expert_bias = experts.num_experts, None
            layer.tally = experts.tally = Tally()


def _with(mixin: type[nn.Module], module: nn.Module) -> Any:
    return type(type(module).__name__, (mixin, type(module)), {})
