"""Ring attention: the gradients of keys and values travel with them and are returned one hop too early.

Thread: https://github.com/NVIDIA/TransformerEngine/issues/2484 "Regarding the reverse implementation in ring
attention, where the communication of dkv is not performed within [0, cp-1) ...", 2025-12-05.
Wrong: after the last step the accumulated dk and dv are on the rank before their owner. The last exchange,
which brings them home, is missing.
EXPECT: in the backward pass, inside ring (RingAttention's backward), the gradients of k and v are the first that
differ, the gradient of q agrees: each rank has the k and v gradients of another rank's chunk.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, SEQ = 10, 8


def pass_on(tensors, group):
    rank, size = group.rank(), group.size()
    tensors, received = [t.contiguous() for t in tensors], [torch.empty_like(t) for t in tensors]
    to = dist.get_global_rank(group, (rank + 1) % size)
    source = dist.get_global_rank(group, (rank - 1) % size)
    ops = [dist.P2POp(dist.isend, t, to, group) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, source, group) for t in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


class RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        out, lse, kv = None, None, [k, v]
        for i in range(group.size()):
            scores = q @ kv[0].mT / DIM**0.5
            block_lse = scores.logsumexp(-1, keepdim=True)
            block = (scores - block_lse).exp() @ kv[1]
            if out is None:
                out, lse = block, block_lse
            else:
                new = torch.logaddexp(lse, block_lse)
                out, lse = out * (lse - new).exp() + block * (block_lse - new).exp(), new
            if i + 1 < group.size():
                kv = pass_on(kv, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        delta, dq = (grad * out).sum(-1, keepdim=True), torch.zeros_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i in range(ctx.group.size()):
            p = (q @ k.mT / DIM**0.5 - lse).exp()
            ds = p * (grad @ v.mT - delta) / DIM**0.5
            dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ grad
            if i + 1 < ctx.group.size():
                k, v, dk, dv = pass_on([k, v, dk, dv], ctx.group)
        return dq, dk, dv, None


class RingAttention(nn.Module):
    group = None

    def forward(self, q, k, v):
        if self.group is not None:
            return RingFunction.apply(q, k, v, self.group)
        return (q @ k.mT / DIM**0.5).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.ring = nn.LayerNorm(DIM), RingAttention()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        h = self.norm(x)
        return x + self.proj(self.ring(self.q(h), self.k(h), self.v(h)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Encoder()
    for block in model.blocks:
        block.ring.group = mesh.get_group("cp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(2484)
batches = [{n: torch.randn(2, SEQ, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Encoder, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 4}, split={"cp": 1}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
