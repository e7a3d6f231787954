"""A pipelined multilayer perceptron: dense layers split into stages, with a manual backward."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from titanlite.tools.lab.pipelining import Pipeline, PipelinedOperation, PipelineError


class MLP(PipelinedOperation):
    """y = dense(gelu(dense(... x))), each dense layer x W + b; four layers as four stages.

    `sizes` are the numbers of features before, between and after the layers: five for four layers.
    With fewer stages than layers, the layers are distributed as evenly as possible. The loss is the
    mean squared error. Raises PipelineError if there are more stages than layers.
    """

    def __init__(
        self, pipeline: Pipeline, sizes: Sequence[int] = (16, 32, 32, 32, 8), *, lr: float = 1e-3
    ) -> None:
        super().__init__(pipeline, lr=lr)
        self.sizes = tuple(sizes)
        self.num_layers = len(sizes) - 1
        if pipeline.num_stages > self.num_layers:
            raise PipelineError(
                f"{self.num_layers} layers are too few for {pipeline.num_stages} stages"
            )
        # The layers of stage s are bounds[s] ... bounds[s + 1] - 1.
        self._bounds = [
            stage * self.num_layers // pipeline.num_stages
            for stage in range(pipeline.num_stages + 1)
        ]

    def build_parameters(
        self, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> list[list[torch.Tensor]]:
        """New weights and biases, [W, b, W, b, ...] per stage; equal for any number of stages."""
        stages = []
        for start, end in zip(self._bounds, self._bounds[1:], strict=False):
            tensors = []
            for layer in range(start, end):
                generator = torch.Generator().manual_seed(seed * self.num_layers + layer)
                shape = self.sizes[layer], self.sizes[layer + 1]
                weight = torch.randn(shape, generator=generator, dtype=torch.float64)
                bias = torch.randn(shape[1], generator=generator, dtype=torch.float64) / 10
                tensors += [(weight / math.sqrt(shape[0])).to(dtype), bias.to(dtype)]
            stages.append(tensors)
        return stages

    def forward(
        self, stage: int, parameters: Sequence[torch.Tensor], x: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        saved = []
        for layer, weight, bias in self._layers(stage, parameters):
            before = x @ weight + bias
            saved.append((x, before))
            x = before if self._is_output(layer) else F.gelu(before)
        return x, saved

    def backward(
        self, stage: int, parameters: Sequence[torch.Tensor], saved: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        gradients: list[torch.Tensor] = []
        for (layer, weight, _), (x, before) in zip(
            reversed(self._layers(stage, parameters)), reversed(saved), strict=True
        ):
            if not self._is_output(layer):
                dy = torch.ops.aten.gelu_backward(dy, before)
            gradients = [x.T @ dy, dy.sum(0), *gradients]
            dy = dy @ weight.T
        return dy, gradients

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        error = y - target
        return error.square().mean(), 2 * error / error.numel()

    def num_features(self, stage: int) -> int:
        return self.sizes[self._bounds[stage]]

    def _layers(
        self, stage: int, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        layers = range(self._bounds[stage], self._bounds[stage + 1])
        return list(zip(layers, parameters[0::2], parameters[1::2], strict=True))

    def _is_output(self, layer: int) -> bool:
        return layer == self.num_layers - 1
