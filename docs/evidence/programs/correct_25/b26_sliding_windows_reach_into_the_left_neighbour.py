"""Local and global attention by turns under context parallelism: windows need only the left neighbour's last keys.

Thread: Dao-AILab/flash-attention issue #580 "Feature request: Sliding Window Attention" (2023), asked for long
sequences as in Mistral; Gemma 2 and 3 change between such layers and global ones, and cap the scores with tanh.
Correct: in a local layer each rank sends its last WINDOW - 1 keys and values to the right, and the backward pass sends
their gradients back to the left, where they are added in place to the end of the rank's own. The first rank gets
nothing, the last sends nothing. Global layers gather all keys, and the gradients of the gathered are summed and cut.
DDP's mean is undone by the number of ranks, as each rank divides its sum by the weights of all tokens of all ranks; the
ranks' losses themselves add up.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, HEADS, LAYERS, WINDOW, CAP = 40, 16, 2, 3, 4, 5.0
LENGTH, ROWS = 24, 3


class Halo(torch.autograd.Function):
    """Puts the last rows of the left neighbour before one's own (dimension 2)."""

    @staticmethod
    def forward(ctx, x, size, group):
        ctx.size, ctx.group = size, group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        received, operations = x.new_empty(*x.shape[:2], size if rank else 0, x.shape[3]), []
        if rank + 1 < ranks:
            tail = x[:, :, -size:].contiguous()
            operations.append(dist.P2POp(dist.isend, tail, group=group, group_peer=rank + 1))
        if rank:
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank - 1))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return torch.cat([received, x], dim=2)

    @staticmethod
    def backward(ctx, grad):
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        own, operations = grad, []
        if rank:
            head, own = grad[:, :, : ctx.size].contiguous(), grad[:, :, ctx.size :]
            operations.append(dist.P2POp(dist.isend, head, group=ctx.group, group_peer=rank - 1))
        own = own.clone()
        if rank + 1 < ranks:
            tail = torch.empty_like(own[:, :, -ctx.size :]).contiguous()
            operations.append(dist.P2POp(dist.irecv, tail, group=ctx.group, group_peer=rank + 1))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if rank + 1 < ranks:
            own[:, :, -ctx.size :] += tail
        return own, None, None


class GatherPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=2)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.window = window

    def forward(self, x, places, group):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, kv, rows = qkv[0], qkv[1:].flatten(0, 1), len(x)  # keys and values travel as one
        if group is None:
            first = 0
        elif self.window:
            kv = Halo.apply(kv, self.window - 1, group)
            first = places[0] - (kv.shape[2] - len(places))
        else:
            kv, first = GatherPlaces.apply(kv, group), 0
        k, v = kv.unflatten(0, (2, rows))
        distance = places[:, None] - (torch.arange(k.shape[2]) + first)
        visible = (distance >= 0) & (distance < (self.window or LENGTH))
        scores = CAP * torch.tanh(q @ k.mT / (q.shape[-1] ** 0.5 * CAP))
        scores = scores - 0.1 * distance.abs()
        y = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.attentions = nn.ModuleList(
            Attention(WINDOW if i % 3 < 2 else None) for i in range(LAYERS)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(LAYERS + 1))

    def forward(self, tokens, places, group=None):
        x = self.words(tokens) * WIDTH**0.5
        for attention, mlp, norm in zip(self.attentions, self.mlps, self.norms):
            x = x + attention(norm(x), places, group)
            x = x + mlp(x)
        return F.linear(self.norms[-1](x), self.words.weight)


def weighted_sum(logits, batch):
    losses = F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten(), reduction="none")
    return (losses * batch["weights"].flatten()).sum()


def plain():
    return Model()


def parallel(mesh):
    group = mesh.get_group("cp")
    return DistributedDataParallel(Model(), process_group=group), group


def loss(model, batch):
    logits = model(batch["tokens"], torch.arange(LENGTH))
    return weighted_sum(logits, batch) / batch["weights"].sum()


def step(built, part):
    model, group = built
    count, length = part["weights"].sum(), part["tokens"].shape[1]
    dist.all_reduce(count, group=group)
    places = dist.get_rank(group) * length + torch.arange(length)
    value = weighted_sum(model(part["tokens"], places, group), part) / count
    (value * dist.get_world_size(group)).backward()
    return value.detach()


generator = torch.Generator().manual_seed(580)


def stories():
    words = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    weights = torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    return {"tokens": words[:, :-1], "next": words[:, 1:], "weights": weights}


batches = [stories() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split={"cp": 1}, ranks={"cp": 4})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
