"""LoRALinear: a frozen linear layer with a trained update of low rank (arXiv 2106.09685).

    y = x W.T + alpha / rank * (x A.T) B.T        A: lora_a [rank, in], B: lora_b [out, rank]

The names are TorchTitan's. The update is linear in x, so it can be cut like W over tp: by output
features, A is whole and B is cut; by input features, A is cut, B is whole, and the update is
summed together with x W.T. No collective is added.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

A, B = ".lora_a.weight", ".lora_b.weight"


class Adapter(nn.Linear):
    """A or B, without bias; takes a shard, or a DTensor from PyTorch's styles."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; of a cut layer, B's output is a shard, or a part of a sum."""
        weight = self.weight
        if isinstance(weight, DTensor) and not isinstance(x, DTensor):
            # The gradient of a whole adapter of a cut layer is a part of a sum.
            is_whole = weight.placements[0].is_replicate()
            weight = weight.to_local(grad_placements=[Partial()] if is_whole else None)
        return F.linear(x, weight)


class LoRALinear(nn.Linear):
    """A linear layer that also adds a trained low-rank update of its weight, which is frozen."""

    lora_a: Adapter
    lora_b: Adapter
    scale: float
    starts_at_zero: bool
    dropout: nn.Module

    @staticmethod
    def convert(
        layer: nn.Linear, rank: int, alpha: float, dropout: float, *, starts_at_zero: bool = True
    ) -> None:
        """Make `layer` a LoRALinear in place; its adapters get values by `init_adapter`.

        `dropout` is that of the input of A. Without `starts_at_zero`, B is random.
        """
        layer.__class__ = LoRALinear
        assert isinstance(layer, LoRALinear)
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        layer.lora_a = Adapter(layer.in_features, rank, bias=False, **like)
        layer.lora_b = Adapter(rank, layer.out_features, bias=False, **like)
        layer.scale, layer.starts_at_zero = alpha / rank, starts_at_zero
        layer.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        if starts_at_zero:
            nn.init.zeros_(layer.lora_b.weight)

    def init_adapter(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """Initial values of "lora_a" or "lora_b", as peft and nn.Linear have them."""
        if name == "lora_b" and self.starts_at_zero:
            whole.zero_()
        else:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return super().forward(x) + self._update(x)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product with a shard of the weight, for the styles of tensor parallelism."""
        return F.linear(x, weight) + self._update(x)

    def _update(self, x: Tensor) -> Tensor:
        return self.scale * self.lora_b(self.lora_a(self.dropout(x)))

    def shard(self, mesh: DeviceMesh) -> None:
        """Cut the adapters like the weight, which a style has cut over the 1-D `mesh`."""
        assert isinstance(self.weight, DTensor)
        (placement,) = self.weight.placements
        for layer, dim in ((self.lora_a, 1), (self.lora_b, 0)):
            place = placement if placement == Shard(dim) else Replicate()
            cut = distribute_tensor(layer.weight.detach(), mesh, [place], src_data_rank=None)
            layer.weight = nn.Parameter(cut, layer.weight.requires_grad)


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, LoRALinear layers have only their own parameters: PyTorch's styles cut all alike."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoRALinear)]
    taken = [dict(layer._modules) for layer in layers]
    for layer in layers:
        layer._modules.clear()
    try:
        yield
    finally:
        for layer, children in zip(layers, taken, strict=True):
            layer._modules.update(children)


def adapted_layer(name: str) -> str | None:
    """The layer whose adapter the parameter `name` is; None for any other parameter."""
    for leaf in (A, B):
        if name.endswith(leaf):
            return name.removesuffix(leaf)
    return None


def merged(
    parameters: Iterable[tuple[str, Tensor]], scales: Mapping[str, float]
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole parameter) of the plain model, the adapters of LoRALinear added to the weights.

    `scales` is alpha / rank of each adapted layer. A weight is held until its adapters come.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, whole in parameters:
        layer = adapted_layer(name) or name.removesuffix(".weight")
        if layer not in scales or name == f"{layer}.bias":
            yield name, whole
            continue
        parts = held.setdefault(layer, {})
        parts[name] = whole
        if len(parts) == 3:
            del held[layer]
            weight = f"{layer}.weight"
            yield weight, parts[weight] + scales[layer] * (parts[layer + B] @ parts[layer + A])
    assert not held, "an adapter has no weight"
