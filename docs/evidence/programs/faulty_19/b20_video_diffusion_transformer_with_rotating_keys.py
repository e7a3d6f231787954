"""A small video diffusion transformer (rectified flow) with ring attention over the latent tokens, on data parallel replicas.

Thread: huggingface/diffusers issue #14265 "Ring attention backward uses stale iteration-0 KV from ctx.saved_tensors" (2026):
keys and values rotate in local variables, but the backward op reads the saved local ones; the forward is right.
Fault: RingAttention.backward rotates k and v from hop to hop, but calls block_gradients with ctx.saved_tensors, that is with
the rank's own keys and values at every hop; the gradients of the queries and of the keys and values that travel are wrong.
REPAIR: `block_gradients(grad, *ctx.saved_tensors, ctx.scale)` -> `block_gradients(grad, q, k, v, out, lse, ctx.scale)`
A right first sentence says: the backward pass of the ring attention uses the rank's own saved keys and values at every hop and
not the ones that have arrived from the other ranks, so the gradients through the attention are wrong though the outputs are
right.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, FRAMES, PATCHES, WIDTH, HEADS, LAYERS = 4, 4, 6, 16, 2, 2
TOKENS = FRAMES * PATCHES


def rotate(tensors, group):
    """Sends the tensors to the next rank of the ring and receives those of the previous one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = torch.stack(tensors)
    received = torch.empty_like(sent)
    following = dist.get_global_rank(group, (rank + 1) % size)
    previous = dist.get_global_rank(group, (rank - 1) % size)
    work = dist.isend(sent, following, group=group)
    dist.recv(received, previous, group=group)
    work.wait()
    return received.unbind()


def block_gradients(grad, q, k, v, out, lse, scale):
    """Gradients of one block of keys and values; lse is that of all blocks."""
    weights = (q @ k.mT * scale - lse).exp()
    delta = (grad * out).sum(-1, keepdim=True)
    scores = weights * (grad @ v.mT - delta) * scale
    return scores @ k, scores.mT @ q, weights.mT @ grad


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group, ctx.scale = group, 1 / math.sqrt(q.size(-1))
        own_k, own_v = k, v
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:-1], 1), -torch.inf)
        for _ in range(dist.get_world_size(group)):
            scores = q @ k.mT * ctx.scale
            block = scores.logsumexp(-1, keepdim=True)
            both = torch.logaddexp(lse, block)
            out = out * (lse - both).exp() + (scores - both).exp() @ v
            lse = both
            k, v = rotate([k, v], group)
        ctx.save_for_backward(q, own_k, own_v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors  # noqa: RUF059
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for _ in range(dist.get_world_size(ctx.group)):
            block = block_gradients(grad, *ctx.saved_tensors, ctx.scale)
            dq, dk, dv = dq + block[0], dk + block[1], dv + block[2]
            k, v, dk, dv = rotate([k, v, dk, dv], ctx.group)
        return dq, dk, dv, None


class Block(nn.Module):
    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def attention(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, condition):
        s1, b1, g1, s2, b2, g2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        x = x + g1 * self.attention(self.norm(x) * (1 + s1) + b1)
        return x + g2 * self.mlp(self.norm(x) * (1 + s2) + b2)


class VideoTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.frame, self.place = nn.Embedding(FRAMES, WIDTH), nn.Embedding(PATCHES, WIDTH)
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, noisy, t, tokens):
        angles = t.unsqueeze(-1) * 2.0 ** torch.arange(4, device=t.device)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.patch(noisy) + self.frame(tokens // PATCHES) + self.place(tokens % PATCHES)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


def loss(model, batch):
    latents, noise, t, tokens = batch
    velocity = model(latents.lerp(noise, t[:, None, None]), t, tokens)
    return F.mse_loss(velocity, noise - latents)


def plain():
    return VideoTransformer()


def parallel(mesh):
    model = VideoTransformer()
    for block in model.blocks:
        block.attend = lambda q, k, v: RingAttention.apply(q, k, v, mesh.get_group("cp"))
    return DistributedDataParallel(model)


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def split(batch, mesh):
    """The videos over dp; their tokens, in order, over cp."""
    dp, cp = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    latents, noise, t, tokens = (x.chunk(mesh["dp"].size())[dp] for x in batch)
    place = slice(cp * TOKENS // mesh["cp"].size(), (cp + 1) * TOKENS // mesh["cp"].size())
    return latents[:, place], noise[:, place], t, tokens[:, place]


generator = torch.Generator().manual_seed(14265)


def videos(number=4):
    shape = 2, number, TOKENS, CHANNELS
    latents, noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    t = torch.rand(number, generator=generator, dtype=torch.float64)
    return latents, noise, t, torch.arange(TOKENS).repeat(number, 1)


batches = [videos() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2, "cp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
