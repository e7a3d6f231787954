"""Layers with one input are one product, and autograd keeps no copy of their joined weights."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from titanlite.parallelize.tensor_parallel.styles import _products


@pytest.mark.parametrize("recomputes", [False, True])
def test_joined_weights_are_not_kept(monkeypatch: pytest.MonkeyPatch, recomputes: bool) -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(6, width, bias=False) for name, width in (("q", 8), ("k", 4))}
    x = torch.randn(3, 5, 6, requires_grad=True)
    cat, made = torch.cat, list[Any]()

    def noted(tensors: Any, *args: Any) -> torch.Tensor:
        made.append(weakref.ref(joined := cat(tensors, *args)))
        return joined

    monkeypatch.setattr(torch, "cat", noted)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return list(_products(layers, x))

    found = checkpoint(run, x, use_reentrant=False) if recomputes else run(x)
    assert [one() for one in made] == [None]
    sum(one.square().sum() for one in found).backward()
    weights = [layer.weight for layer in layers.values()]
    gradients = [one.grad for one in (x, *weights)]
    alone = x.detach().requires_grad_()
    loss = sum(layer(alone).square().sum() for layer in layers.values())
    torch.testing.assert_close(gradients, list(torch.autograd.grad(loss, [alone, *weights])))
