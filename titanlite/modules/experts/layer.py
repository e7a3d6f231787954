"""ExpertLayer: a feed-forward of which each token uses only some experts.

    x -> Router -> slots sorted by expert -> each expert's SwiGLU -> combined by weight -> + shared

Module names are TorchTitan's (`moe.router.gate`, `moe.experts.w1`, `moe.shared_experts`), so its
checkpoints fit. Activations have the sequence first, as in the blocks of the models.

Sources: Mixtral (arXiv 2401.04088), DeepSeek-V3 (arXiv 2412.19437), TorchTitan's MoE.
Shapes: T tokens, B sequences, D model width, H hidden width of an expert, E experts, K experts per
token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.modules.experts.balance import Tally, observe, sequence_loss
from titanlite.modules.experts.capacity import kept_slots
from titanlite.modules.experts.dispatch import Exchange, gather_back, order_slots, spread
from titanlite.modules.experts.products import swiglu
from titanlite.modules.experts.router import Router, ScoreFunction


class RoutedExperts(nn.Module):
    """Experts whose weights are stacked along dimension 0.

    With an `exchange`, this rank's weights are those of its experts only. A subclass computes the
    experts' outputs in `_compute`. models/hf makes the experts of transformers one.
    """

    num_experts: int
    exchange: Exchange | None = None
    _compute: Callable[..., Tensor]

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        score_first: bool = False,
        kept: Tensor | None = None,
    ) -> Tensor:
        """The sum of the outputs of each token's experts, multiplied by its weights.

        x is [..., D]; weights, chosen and kept are [..., K]. `score_first` multiplies the experts'
        inputs by the weights instead of their outputs. Slots that are not in `kept` (bool) are
        neither sent nor computed; their outputs are zero.
        """
        if kept is not None:
            # Sorted behind the slots of all experts.
            chosen = chosen.masked_fill(~kept, self.num_experts)
        x_ND, weights_NK, chosen_NK = (each.flatten(0, -2) for each in (x, weights, chosen))
        order = order_slots(chosen_NK, self.num_experts)
        rows = spread(x_ND, order)
        if score_first:
            factors = weights_NK.flatten().index_select(0, order.by_expert)
            rows = (rows * factors.unsqueeze(-1)).to(x.dtype)
        if self.exchange is not None:
            outputs = self.exchange(rows, order.counts, self._compute)
        else:
            outputs = self._compute(rows, order.counts, drops=kept is not None)
        if kept is not None:
            outputs = F.pad(outputs, (0, 0, 0, rows.size(0) - outputs.size(0)))
        y_NKD = gather_back(outputs, order).unflatten(0, chosen_NK.shape)
        if not score_first:
            y_NKD = y_NKD * weights_NK.unsqueeze(-1)
        return y_NKD.sum(1).to(x.dtype).view_as(x)


class Experts(RoutedExperts):
    """The routed experts, each a SwiGLU."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as nn.Linear draws its own."""
        for weight in (self.w1, self.w2, self.w3):
            bound = weight.size(-1) ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def _compute(
        self, rows: Tensor, counts: Tensor, sizes: list[int] | None = None, drops: bool = False
    ) -> Tensor:
        w1, w2, w3 = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.w1, self.w2, self.w3)
        )
        return swiglu(rows, w1, w2, w3, counts, sizes=sizes, drops=drops)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"


class RoutedLayer(nn.Module):
    """What a job knows of a layer of experts, whatever its router is."""

    experts: RoutedExperts
    num_experts: int
    tally: Tally
    expert_bias: Tensor | None
    bias_step: float | None = None
    loss_factor: float = 0.0
    capacity_factor: float | None = None
    sequence_groups: tuple[str, ...] = ()
    """The process groups over which a sequence is sharded, one after the other."""
    token_shard = (0, 1)
    """(index, number) of this rank's chunk of the tokens whose positions it gets."""
    held_places: Tensor | None = None
    """The numbers, in their sequence, of the tokens whose positions this rank gets, if a sequence
    is sharded by context parallelism."""
    force_balance = False
    """Whether tokens go to the experts in turn, whatever their scores."""


class ExpertLayer(RoutedLayer):
    """Routed experts and, if given, shared experts that every token uses.

    `bias_step` enables the balancing bias: a buffer `expert_bias` that is added to the scores for
    the choice of experts only. A Balancer changes it by this amount before each update of the
    weights. `loss_factor` is the factor on the sequence auxiliary loss; 0: none. With a
    `capacity_factor`, an expert computes at most this many times the mean of the experts' slots in
    each sequence, in training; the others are dropped (capacity.py).
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        shared_experts: nn.Module | None = None,
        score_func: ScoreFunction = "sigmoid",
        normalize: bool = False,
        scale: float = 1.0,
        score_first: bool = False,
        bias_step: float | None = None,
        loss_factor: float = 0.0,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(
            dim, num_experts, top_k, score_func=score_func, normalize=normalize, scale=scale
        )
        self.experts = Experts(dim, hidden_dim, num_experts)
        self.shared_experts = shared_experts
        self.num_experts, self.top_k = num_experts, top_k
        self.score_first, self.bias_step, self.loss_factor = score_first, bias_step, loss_factor
        self.capacity_factor = capacity_factor
        bias = None if bias_step is None else torch.zeros(num_experts)
        self.register_buffer("expert_bias", bias)
        self.tally = Tally()

    def init_buffers(self) -> None:
        """Set the balancing bias to zero."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x_TBD: Tensor, positions: Tensor) -> Tensor:
        """The layer's output, [T, B, D]; `positions` [T] or [B, T] are those of the tokens."""
        y_TBD = self._routed(x_TBD, positions=positions)
        return y_TBD if self.shared_experts is None else y_TBD + self.shared_experts(x_TBD)

    # The number of rows of each expert depends on values, which a compiler cannot trace.
    @torch.compiler.disable
    def _routed(self, x_TBD: Tensor, positions: Tensor) -> Tensor:
        slots = self._slots(x_TBD, positions) if self.force_balance else None
        weights, chosen, scores = self.router(x_TBD, self.expert_bias, slots)
        kept = None
        if self.capacity_factor is not None and self.training:
            places, groups = self._places(x_TBD, positions), self.sequence_groups
            kept = kept_slots(chosen, places, self.num_experts, self.capacity_factor, groups)
        if self.training and torch.is_grad_enabled():
            loss = sequence_loss(scores, chosen, self.sequence_groups, self.loss_factor)
            weights = observe(weights, chosen, self.num_experts, loss, self.tally, kept)
        return self.experts(x_TBD, weights, chosen, self.score_first, kept)

    def _places(self, x_TBD: Tensor, positions: Tensor) -> Tensor:
        """The numbers of this rank's tokens in their sequence, [T]."""
        index, number = self.token_shard
        places = self.held_places
        if places is None:
            # Positions that restart at documents are no numbers in a sequence.
            each = torch.arange(x_TBD.size(0) * number, device=x_TBD.device)
            places = positions if positions.ndim == 1 else each
        return places.unflatten(0, (number, -1))[index]

    def _slots(self, x_TBD: Tensor, positions: Tensor) -> Tensor:
        """Slot numbers [T, B, K] that count the slots of each sequence from 0."""
        index, number = self.token_shard
        own = positions.unflatten(-1, (number, -1)).select(-2, index)
        own_BT = own if own.ndim == 2 else own.expand(x_TBD.size(1), -1)
        each = torch.arange(self.top_k, device=own.device)
        return own_BT.T.unsqueeze(-1) * self.top_k + each
