"""A small video diffusion transformer whose latent tokens are split over the ranks, with a ring attention of its own.

Thread: huggingface/diffusers issue #14265 "Ring attention backward uses stale iteration-0 KV from ctx.saved_tensors — silent
gradient corruption when training with context parallelism" (2026): keys and values went round the ring in local variables, while
the backward op of every hop read those that the forward pass had saved, the rank's own ones.
Fault: RingAttention.backward passes ctx.saved_tensors to block_backward at each hop, so that all hops use the rank's own keys and
values; the ones that arrive from the neighbour are only passed on.
REPAIR: `block_backward(grad, *ctx.saved_tensors)` -> `block_backward(grad, q, k, v, *ctx.saved_tensors[3:])`
A right first sentence says: the backward pass of the ring attention is wrong (the gradients of q, k and v), while its forward
pass is right, because each hop computes with the rank's own saved keys and values instead of the block that has just been
received.
"""

import functools
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

CHANNELS, WIDTH, HEADS, LENGTH = 4, 16, 2, 12


def block_forward(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def block_backward(grad, q, k, v, out, lse):
    scale = 1 / math.sqrt(q.size(-1))
    p = (q @ k.transpose(-2, -1) * scale - lse).exp()
    dp = grad @ v.transpose(-2, -1)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ grad


def rotate(tensors, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    following = dist.get_global_rank(group, (rank + 1) % size)
    previous = dist.get_global_rank(group, (rank - 1) % size)
    sent = torch.stack(tensors)
    received = torch.empty_like(sent)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, following, group),
            dist.P2POp(dist.irecv, received, previous, group),
        ]
    )
    for work in works:
        work.wait()
    return received.unbind(0)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        own_k, own_v = k, v
        out, lse = block_forward(q, k, v)
        for _ in range(dist.get_world_size(group) - 1):
            k, v = rotate([k, v], group)
            block_out, block_lse = block_forward(q, k, v)
            total = torch.logaddexp(lse, block_lse)
            out = (lse - total).exp() * out + (block_lse - total).exp() * block_out
            lse = total
        ctx.group = group
        ctx.save_for_backward(q, own_k, own_v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors[:3]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for _ in range(dist.get_world_size(ctx.group)):
            hop_dq, hop_dk, hop_dv = block_backward(grad, *ctx.saved_tensors)
            dq = dq + hop_dq
            k, v, dk, dv = rotate([k, v, dk + hop_dk, dv + hop_dv], ctx.group)
        return dq, dk, dv, None


def ring_attention(q, k, v, group):
    return RingAttention.apply(q, k, v, group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)
        self.attend = F.scaled_dot_product_attention

    def forward(self, x, condition):
        scale1, gate1, scale2, gate2 = self.modulation(condition)[:, None].chunk(4, -1)
        y = self.qkv(self.norm1(x) * (1 + scale1)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (y[:, :, i].transpose(1, 2) for i in range(3))
        x = x + gate1 * self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2))


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.position = nn.Linear(CHANNELS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, CHANNELS)

    def forward(self, latents, position, time):
        angles = time[:, None] * 2.0 ** torch.arange(4)
        condition = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], -1)))
        x = self.patch(latents) + self.position(position)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def plain():
    return DiT()


def parallel(mesh):
    model = DiT()
    for block in model.blocks:
        block.attend = functools.partial(ring_attention, group=mesh.get_group("cp"))
    return model


def loss(model, batch):
    time = batch["time"][:, None, None]
    noisy = (1 - time) * batch["latents"] + time * batch["noise"]
    velocity = model(noisy, batch["position"], batch["time"])
    return F.mse_loss(velocity, batch["noise"] - batch["latents"])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return value.detach()


def split(batch, mesh):
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    return {
        name: value if name == "time" else value.chunk(size, 1)[rank]
        for name, value in batch.items()
    }


generator = torch.Generator().manual_seed(14265)
batches = [
    {
        "latents": torch.randn(2, LENGTH, CHANNELS, generator=generator, dtype=torch.float64),
        "noise": torch.randn(2, LENGTH, CHANNELS, generator=generator, dtype=torch.float64),
        "time": torch.rand(2, generator=generator, dtype=torch.float64),
        "position": torch.arange(LENGTH).repeat(2, 1),
    }
    for _ in range(3)
]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split=split, ranks={"cp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
