"""A transformer's feed-forward layer on sharded tensors: O = gelu(X W1 + b1) W2 + b2.

The layout of GSPMD (Xu et al. 2021, https://arxiv.org/abs/2105.04663, section 5.1) shards the batch
and both weights over the data axes, and the model and hidden dimensions over the tensor axes; X,
W1, W2 and O are not replicated. Weights are all-gathered over the data axes when needed, as in
FSDP. The product is reduce-scattered over the tensor axes, as in tensor parallelism with
activations sharded between layers.

Between the collectives, every device computes in one local layout: its shard of the batch, the full
model dimension, and its shard of the hidden dimension. Other layouts are resharded to it and back.
"""

import enum
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.operation import ShardedOperation
from titanlite.tools.lab.resharding import reshard
from titanlite.tools.lab.sharding import ShardingError, TensorSharding, whole

Axes = str | tuple[str, ...]
Tensors = tuple[torch.Tensor, ...]


class FeedForwardShardingPolicy(enum.Enum):
    """The ways to compute a sharded feed-forward layer."""

    Unsharded = "every device computes all of it"
    GSPMD = "all-gather X, W1 and W2; local products; reduce-scatter O"
    Resharding = "any other: reshard the inputs, local products, all-reduce, reshard O"


@dataclass(frozen=True)
class FeedForwardSharding:
    """The shardings of X and O (batch, sequence, model), W1 (model, hidden), W2 (hidden, model) and
    the biases; replicated by default."""

    x: TensorSharding = field(default_factory=lambda: whole(3))
    w1: TensorSharding = field(default_factory=lambda: whole(2))
    b1: TensorSharding = field(default_factory=lambda: whole(1))
    w2: TensorSharding = field(default_factory=lambda: whole(2))
    b2: TensorSharding = field(default_factory=lambda: whole(1))
    o: TensorSharding = field(default_factory=lambda: whole(3))

    @classmethod
    def gspmd(cls, data: Axes, tensor: Axes) -> "FeedForwardSharding":
        """The GSPMD layout with these data and tensor axes."""
        return cls(
            x=TensorSharding(data, None, tensor),
            w1=TensorSharding(data, tensor),
            b1=TensorSharding(tensor),
            w2=TensorSharding(tensor, data),
            b2=TensorSharding(tensor),
            o=TensorSharding(data, None, tensor),
        )

    @property
    def policy(self) -> FeedForwardShardingPolicy:
        if self == FeedForwardSharding():
            return FeedForwardShardingPolicy.Unsharded
        data, tensor = self.w1[0], self.w1[1]
        if data and tensor and self == FeedForwardSharding.gspmd(data, tensor):
            return FeedForwardShardingPolicy.GSPMD
        return FeedForwardShardingPolicy.Resharding

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that shard the batch in the local layout."""
        return self.x[0]

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The axes that shard the hidden dimension in the local layout."""
        return tuple(axis for axis in self.w1[1] if axis not in self.data_axes)


@dataclass(frozen=True)
class FeedForward(ShardedOperation):
    """O = gelu(X W1 + b1) W2 + b2: `FeedForward(sharding)(cluster, x, w1, b1, w2, b2)`.

    Shapes: X and O (batch, sequence, model), W1 (model, hidden), b1 (hidden), W2 (hidden, model),
    b2 (model). Any sharding that divides the dimensions evenly works.
    """

    sharding: FeedForwardSharding

    @property
    def inputs(self) -> dict[str, TensorSharding]:
        s = self.sharding
        return {"X": s.x, "W1": s.w1, "b1": s.b1, "W2": s.w2, "b2": s.b2}

    @property
    def outputs(self) -> dict[str, TensorSharding]:
        return {"O": self.sharding.o}

    def check(self, mesh: Mesh, *tensors: torch.Tensor) -> None:
        for (name, sharding), tensor in zip(self.inputs.items(), tensors, strict=True):
            sharding.check(mesh, tensor.shape, name)
        x, w1, b1, w2, b2 = (tuple(tensor.shape) for tensor in tensors)
        model, hidden = w1
        expected = {"X": (*x[:2], model), "b1": (hidden,), "W2": (hidden, model), "b2": (model,)}
        for name, shape in {"X": x, "b1": b1, "W2": w2, "b2": b2}.items():
            if shape != expected[name]:
                raise ShardingError(f"{name} has shape {shape}; W1 of {w1} needs {expected[name]}")
        self.sharding.o.check(mesh, x, "O")

    def run(self, device: VirtualDevice, *share: torch.Tensor) -> torch.Tensor:
        s = self.sharding
        b2 = share[4]
        if s.policy is FeedForwardShardingPolicy.GSPMD:
            x, w1, b1, w2 = gathered(device, s, *share[:4])
            return device.reduce_scatter(hidden(x, w1, b1) @ w2, s.tensor_axes, dim=2) + b2
        x, w1, b1, w2, b2 = resharded(device, s, *share)
        o = hidden(x, w1, b1) @ w2
        if s.tensor_axes:
            o = device.all_reduce(o, s.tensor_axes, label="O")
        return reshard(device, o + b2, local(s).o, s.o, "O")


@dataclass(frozen=True)
class FeedForwardBackward(ShardedOperation):
    """The gradients of X, W1, b1, W2 and b2, each sharded like its tensor.

    The inputs are those of FeedForward and dO, the gradient of O (sharded like O). The hidden layer
    is recomputed, as in activation checkpointing: five products, for two in the forward pass.
    """

    sharding: FeedForwardSharding

    @property
    def inputs(self) -> dict[str, TensorSharding]:
        return {**FeedForward(self.sharding).inputs, "dO": self.sharding.o}

    @property
    def outputs(self) -> dict[str, TensorSharding]:
        return {f"d{name}": where for name, where in FeedForward(self.sharding).inputs.items()}

    def check(self, mesh: Mesh, *tensors: torch.Tensor) -> None:
        FeedForward(self.sharding).check(mesh, *tensors[:5])
        if tensors[5].shape != tensors[0].shape:
            raise ShardingError(
                f"dO has shape {tuple(tensors[5].shape)}; O has {tuple(tensors[0].shape)}"
            )

    def run(self, device: VirtualDevice, *share: torch.Tensor) -> Tensors:
        s = self.sharding
        if s.policy is FeedForwardShardingPolicy.GSPMD:
            return self._gspmd(device, *share)
        do = reshard(device, share[5], s.o, local(s).o, "dO")
        x, w1, b1, w2, _ = resharded(device, s, *share[:5])
        dx, *of_weights = local_backward(x, w1, b1, w2, do)
        if s.tensor_axes:
            dx = device.all_reduce(dx, s.tensor_axes, label="dX")
        names = ["dX", "dW1", "db1", "dW2", "db2"]
        if s.data_axes:
            of_weights = [
                device.all_reduce(each, s.data_axes, label=name)
                for each, name in zip(of_weights, names[1:], strict=True)
            ]
        lies, wanted = FeedForward(local(s)).inputs.values(), FeedForward(s).inputs.values()
        return tuple(
            reshard(device, each, source, target, name)
            for each, source, target, name in zip(
                [dx, *of_weights], lies, wanted, names, strict=True
            )
        )

    def _gspmd(self, device: VirtualDevice, *share: torch.Tensor) -> Tensors:
        """All-gathers of the forward become reduce-scatters, and reduce-scatters all-gathers."""
        s = self.sharding
        data, tensor = s.data_axes, s.tensor_axes
        x, w1, b1, w2 = gathered(device, s, *share[:4])
        # db2 needs only this device's shard of dO.
        db2 = device.all_reduce(share[5].sum((0, 1)), data, label="db2")
        do = device.all_gather(share[5], tensor, dim=2, label="dO")
        dx, dw1, db1, dw2, _ = local_backward(x, w1, b1, w2, do)
        return (
            device.reduce_scatter(dx, tensor, dim=2, label="dX"),
            device.reduce_scatter(dw1, data, dim=0, label="dW1"),
            device.all_reduce(db1, data, label="db1"),
            device.reduce_scatter(dw2, data, dim=1, label="dW2"),
            db2,
        )


def hidden(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w1 + b1)


def local_backward(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, do: torch.Tensor
) -> Tensors:
    """dX, dW1, db1, dW2, db2 of o = gelu(x w1 + b1) w2 + b2, on shards of batch and hidden."""
    before = x @ w1 + b1
    h = F.gelu(before)
    dbefore = torch.ops.aten.gelu_backward(do @ w2.T, before)
    dw2 = h.flatten(0, 1).T @ do.flatten(0, 1)
    dw1 = x.flatten(0, 1).T @ dbefore.flatten(0, 1)
    return dbefore @ w1.T, dw1, dbefore.sum((0, 1)), dw2, do.sum((0, 1))


def gathered(
    device: VirtualDevice,
    s: FeedForwardSharding,
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
) -> Tensors:
    """Bring X, W1, b1 and W2 from the GSPMD layout to the local one."""
    return (
        device.all_gather(x, s.tensor_axes, dim=2, label="x1"),
        device.all_gather(w1, s.data_axes, dim=0, label="w1"),
        b1,
        device.all_gather(w2, s.data_axes, dim=1, label="w2"),
    )


def resharded(device: VirtualDevice, s: FeedForwardSharding, *share: torch.Tensor) -> Tensors:
    """Bring X, W1, b1, W2 and b2 from any layout to the local one."""
    source, target = FeedForward(s).inputs, FeedForward(local(s)).inputs
    return tuple(
        reshard(device, tensor, source[name], target[name], name)
        for name, tensor in zip(source, share, strict=True)
    )


def local(s: FeedForwardSharding) -> FeedForwardSharding:
    """The local layout, in which devices compute without communication."""
    return FeedForwardSharding(
        x=TensorSharding(s.data_axes, None, None),
        w1=TensorSharding(None, s.tensor_axes),
        b1=TensorSharding(s.tensor_axes),
        w2=TensorSharding(s.tensor_axes, None),
        o=TensorSharding(s.data_axes, None, None),
    )
