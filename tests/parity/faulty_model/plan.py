"""The faulty model's plan, in styles made by hand."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from faulty_model.model import Copy, FaultyModel, Sum
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.tensor_parallel.styles import distribute, replace_forward


class Columns(ParallelStyle):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def _apply(self, module: nn.Module, mesh) -> nn.Module:
        distribute(module, mesh, {"weight": Shard(0), "bias": Shard(0)}, self.src_data_rank)

        def forward(module, x):
            x = x if "no sum backward" in self.fault else Copy.apply(x, mesh.get_group())
            return F.linear(x, module.weight.to_local(), module.bias.to_local())

        return replace_forward(module, forward)


class Rows(ParallelStyle):
    calls = 0

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def _apply(self, module: nn.Module, mesh) -> nn.Module:
        distribute(module, mesh, {"weight": Shard(1), "bias": Replicate()}, self.src_data_rank)
        group, fault = mesh.get_group(), self.fault

        def forward(module, x):
            bias = module.bias.to_local()
            Rows.calls += 1
            if fault == "bias on each rank":
                return Sum.apply(F.linear(x, module.weight.to_local(), bias), group)
            if fault.startswith("reduced by the block"):
                # A share of the bias, with the whole gradient.
                share = bias + (bias / mesh.size() - bias).detach()
                own = bias if fault.endswith("with its bias") else share
                return F.linear(x, module.weight.to_local(), own)
            y = F.linear(x, module.weight.to_local())
            if fault != "not reduced in evaluation" or module.training:
                y = Sum.apply(y, group)
            if fault == "later calls" and Rows.calls > 4:
                y = y * Rows.calls
            return y + bias

        return replace_forward(module, forward)


class Blocks(ParallelStyle):
    """Reduces in the block what its layer leaves."""

    def _apply(self, module: nn.Module, mesh) -> nn.Module:
        module.reduce = lambda y: Sum.apply(y, mesh.get_group())
        return module


def plan_of(model: FaultyModel) -> ParallelPlan:
    fault = model.config.fault
    styles: dict[str, ParallelStyle] = {
        "layers.*.up": Columns(fault),
        "layers.*.gate": Columns(fault),
        "layers.*.down": Rows(fault),
    }
    if fault.startswith("reduced by the block"):
        styles["layers.*"] = Blocks()
    return ParallelPlan(
        tensor_parallel=styles,
        blocks="layers",
        embeddings=("tok_emb",),
        head=("output",),
        whole_gradients=("tok_emb.*", "layers.*.norm.*", "layers.*.scale.*", "output.*"),
    )


PLANS = {FaultyModel: plan_of}
