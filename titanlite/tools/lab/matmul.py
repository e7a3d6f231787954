"""A matrix product C = A B on sharded matrices. The shardings determine the collectives.

If A and B are sharded over the same axes along the inner dimension k, the local products are
partial sums, which are reduced. Otherwise k is all-gathered first. The outer dimensions m and n
stay sharded. The policies are those of J. Austin et al., How to Scale Your Model, 2025, ch. 3,
https://jax-ml.github.io/scaling-book/sharding, and of pjit.
"""

import enum
from dataclasses import dataclass, field

import torch

from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.operation import ShardedOperation
from titanlite.tools.lab.resharding import reshard
from titanlite.tools.lab.sharding import ShardingError, TensorSharding, whole


class MatMulShardingPolicy(enum.Enum):
    """The ways to compute a sharded matrix product."""

    Unsharded = "every device computes all of it"
    MatchedInnerSharding = "A and B sharded alike along k: local products, all-reduce C"
    UnmatchedInnerSharding = "A and B sharded differently along k: all-gather both, then multiply"
    OuterSharding = "m sharded: all-gather A's k and B, local product, all-gather C's m"
    FullSharding = "m and n sharded: all-gather both k, local product, all-gather C"
    Resharding = "any other: reshard A and B, local products, reduce, reshard C"


@dataclass(frozen=True)
class MatMulSharding:
    """The shardings of A (m x k), B (k x n) and C (m x n); C is replicated by default."""

    a: TensorSharding
    b: TensorSharding
    c: TensorSharding = field(default_factory=lambda: whole(2))

    @property
    def policy(self) -> MatMulShardingPolicy:
        m, inner_a, inner_b, n = self.a[0], self.a[1], self.b[0], self.b[1]
        is_matched = inner_a == inner_b and bool(inner_a)
        if not self.c.is_whole or (n and not m) or (m and is_matched) or set(m) & set(n):
            return MatMulShardingPolicy.Resharding
        if m:
            return MatMulShardingPolicy.FullSharding if n else MatMulShardingPolicy.OuterSharding
        if is_matched:
            return MatMulShardingPolicy.MatchedInnerSharding
        if inner_a or inner_b:
            return MatMulShardingPolicy.UnmatchedInnerSharding
        return MatMulShardingPolicy.Unsharded


@dataclass(frozen=True)
class MatMul(ShardedOperation):
    """C = A B with every matrix sharded by `sharding`: `MatMul(sharding)(cluster, a, b)`.

    Shapes: A (m, k), B (k, n), C (m, n). Any sharding that divides the dimensions evenly works.
    """

    sharding: MatMulSharding

    @property
    def inputs(self) -> dict[str, TensorSharding]:
        return {"A": self.sharding.a, "B": self.sharding.b}

    @property
    def outputs(self) -> dict[str, TensorSharding]:
        return {"C": self.sharding.c}

    def check(self, mesh: Mesh, *tensors: torch.Tensor) -> None:
        a, b = tensors
        self.sharding.a.check(mesh, a.shape, "A")
        self.sharding.b.check(mesh, b.shape, "B")
        if a.shape[1] != b.shape[0]:
            raise ShardingError(
                f"A of shape {tuple(a.shape)} times B of shape {tuple(b.shape)}: "
                f"the inner dimensions {a.shape[1]} and {b.shape[0]} differ"
            )
        self.sharding.c.check(mesh, (a.shape[0], b.shape[1]), "C")

    def run(self, device: VirtualDevice, *share: torch.Tensor) -> torch.Tensor:
        a, b = share
        return sharded_matmul(device, a, b, self.sharding)


@dataclass(frozen=True)
class MatMulBackward(ShardedOperation):
    """(dA, dB) = (dC B^T, A^T dC), sharded like A and B: two more sharded products.

    The inputs are A, B and dC (sharded like C). The shardings of each product determine its policy.
    """

    sharding: MatMulSharding

    @property
    def inputs(self) -> dict[str, TensorSharding]:
        return {"A": self.sharding.a, "B": self.sharding.b, "dC": self.sharding.c}

    @property
    def outputs(self) -> dict[str, TensorSharding]:
        return {"dA": self.sharding.a, "dB": self.sharding.b}

    def check(self, mesh: Mesh, *tensors: torch.Tensor) -> None:
        a, b, dc = tensors
        MatMul(self.sharding).check(mesh, a, b)
        if dc.shape != (a.shape[0], b.shape[1]):
            raise ShardingError(f"dC has shape {tuple(dc.shape)}; C has {(len(a), b.shape[1])}")

    def run(self, device: VirtualDevice, *share: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, dc = share
        of_a, of_b, of_c = self.sharding.a, self.sharding.b, self.sharding.c
        da = sharded_matmul(device, dc, b.T, MatMulSharding(of_c, of_b.transposed(), of_a))
        db = sharded_matmul(device, a.T, dc, MatMulSharding(of_a.transposed(), of_c, of_b))
        return da, db


def sharded_matmul(
    device: VirtualDevice, a: torch.Tensor, b: torch.Tensor, sharding: MatMulSharding
) -> torch.Tensor:
    """This device's shard of C, from its shards of A and B."""
    match sharding.policy:
        case MatMulShardingPolicy.Unsharded:
            return a @ b
        case MatMulShardingPolicy.MatchedInnerSharding:
            return device.all_reduce(a @ b, sharding.a[1], label="C")
        case MatMulShardingPolicy.Resharding:
            return _resharded(device, a, b, sharding)
        case _:
            return _gathered(device, a, b, sharding)


def _gathered(
    device: VirtualDevice, a: torch.Tensor, b: torch.Tensor, sharding: MatMulSharding
) -> torch.Tensor:
    if inner := sharding.a[1]:
        a = device.all_gather(a, inner, dim=1, label="A")
    if inner := sharding.b[0]:
        b = device.all_gather(b, inner, dim=0, label="B")
    c = a @ b
    m, n = sharding.a[0], sharding.b[1]
    if not m:
        return c
    # One collective gathers both dimensions; the shards arrive in row-major order of (m, n).
    shards = device.all_gather_parts(c, m + n, label="C")
    num_n = device.mesh.degree(n)
    rows = [torch.cat(shards[start : start + num_n], 1) for start in range(0, len(shards), num_n)]
    return torch.cat(rows)


def _resharded(
    device: VirtualDevice, a: torch.Tensor, b: torch.Tensor, sharding: MatMulSharding
) -> torch.Tensor:
    """Reshard A and B so that m and n have the axes of C (or else their own), multiply, reshard C.

    Sharding m over C's axes is free if A is replicated (each device takes a slice), and leaves C in
    its final layout. An axis can shard only one of m, n and k.
    """
    m = sharding.c[0] or sharding.a[0]
    n = tuple(axis for axis in sharding.c[1] or sharding.b[1] if axis not in m)
    inner = sharding.a[1] if sharding.a[1] == sharding.b[0] else ()
    inner = () if set(inner) & {*m, *n} else inner
    a = reshard(device, a, sharding.a, TensorSharding(m, inner), "A")
    b = reshard(device, b, sharding.b, TensorSharding(inner, n), "B")
    c = a @ b
    if inner:
        c = device.all_reduce(c, inner, label="C")
    return reshard(device, c, TensorSharding(m, n), sharding.c, "C")
