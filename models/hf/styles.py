"""TP styles for Conv1D, GPT-2's linear layer, whose weight is [in, out].

They compute on local shards, like those of parallelize/styles.py. Activations between layers are
replicated over the ranks, except between a column-wise and a row-wise layer.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from transformers.pytorch_utils import Conv1D

from titanlite.errors import TitanliteError
from titanlite.models.hf.model import JoinedConv1D
from titanlite.parallelize.tensor_parallel.styles import distribute, replace_forward


class ColwiseConv1D(ParallelStyle):
    """A Conv1D sharded by its output features: replicated input, local shard of the output.

    The gradient of the input is all-reduced.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_conv1d(module, self)
        distribute(module, device_mesh, {"weight": Shard(1), "bias": Shard(0)}, self.src_data_rank)

        def forward(module: Any, x: Tensor) -> Tensor:
            return _shared(x, device_mesh) @ module.weight.to_local() + module.bias.to_local()

        return replace_forward(module, forward)


class RowwiseConv1D(ParallelStyle):
    """A Conv1D sharded by its input features: local shard of the input, replicated output.

    The output is all-reduced; the bias is added once, after that.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_conv1d(module, self)
        placements = {"weight": Shard(0), "bias": Replicate()}
        distribute(module, device_mesh, placements, self.src_data_rank)

        def forward(module: Any, x: Tensor) -> Tensor:
            partial = x @ module.weight.to_local()
            total = DTensor.from_local(partial, device_mesh, [Partial()], run_check=False)
            return total.redistribute(placements=[Replicate()]).to_local() + module.bias.to_local()

        return replace_forward(module, forward)


class JoinedHeads(ParallelStyle):
    """The attention of GPT-2, sharded by heads: its c_attn computes the q, k and v of a few heads.

    The weight [E, 3, E] of c_attn is sharded along its last dimension. Replicated input, local
    heads. The gradient of the input is all-reduced.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        joined = attention.c_attn
        assert isinstance(joined, JoinedConv1D)
        distribute(joined, device_mesh, {"weight": Shard(2), "bias": Shard(1)}, self.src_data_rank)

        def forward(joined: Any, x: Tensor) -> Tensor:
            weight, bias = joined.weight.to_local().flatten(-2), joined.bias.to_local().flatten()
            return _shared(x, device_mesh) @ weight + bias

        replace_forward(joined, forward)
        # The attention splits the output of c_attn into pieces of this size.
        attention.split_size //= device_mesh.size()
        return module


def _shared(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x`, which is the same on every rank, with a gradient that is summed over the ranks."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _require_conv1d(module: nn.Module, style: ParallelStyle) -> None:
    if type(module) is not Conv1D:
        raise TitanliteError(
            f"{type(style).__name__} is for Conv1D of transformers, and this is a "
            f"{type(module).__name__}"
        )
