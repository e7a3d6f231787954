"""A SASRec-like sequential recommender: data parallel over users, with the table of items cut by rows over the same ranks.

Thread: pytorch/torchtitan pull request #4637 "Fix padding gradients in vocab-parallel embeddings" (2026): the global padding_idx
was handed to each rank's local part of the table; lower padding ids silently suppress the gradients of other rows on other ranks.
Fault: every rank's part of the table has padding_idx 0, so that its first row gets no gradient; item 0 is the padding on rank 0
only, on ranks 1 and 2 row 0 is item 8 and item 16.
REPAIR: `padding_idx=whole.padding_idx)` -> `padding_idx=whole.padding_idx if rank == 0 else None)`
A right first sentence says: the gradient of items.weight is zero in the first row of each rank's part but the first (items 8 and
16), because the whole table's padding_idx 0 is given to each local part; only the rank that holds item 0 may have it.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

ITEMS, DIM, LENGTH, RANKS = 24, 8, 7, 3


class ReduceScatter(torch.autograd.Function):
    """Gives each rank its part of the sum over the ranks; the gradients of all parts come back."""

    @staticmethod
    def forward(ctx, partial):
        summed = partial.clone()
        dist.all_reduce(summed)
        return summed.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        grads = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, grad.contiguous())
        return torch.cat(grads, 1)


class ShardedItems(nn.Embedding):
    def __init__(self, whole):
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = whole.num_embeddings // size
        super().__init__(rows, whole.embedding_dim, padding_idx=whole.padding_idx)
        self.start = rank * rows
        self.weight.data.copy_(whole.weight.data[self.start : self.start + rows])

    def forward(self, ids):
        everyone = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, ids.contiguous())
        local = torch.cat(everyone, 1) - self.start
        owned = (local >= 0) & (local < self.num_embeddings)
        vectors = super().forward(torch.where(owned, local, 0)) * owned[..., None]
        return ReduceScatter.apply(vectors)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.feed = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class SASRec(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, history, positive, negative):
        x, p, n = self.items(torch.stack([history, positive, negative])).unbind(0)
        x = (x * DIM**0.5 + self.positions.weight) * (history != 0)[..., None]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return (x * p).sum(-1), (x * n).sum(-1)


def plain():
    return SASRec()


def parallel(mesh):
    model = SASRec()
    model.items = ShardedItems(model.items)
    return model


def loss_sum(model, batch):
    positive, negative = model(batch["history"], batch["positive"], batch["negative"])
    each = F.softplus(-positive) + F.softplus(negative)
    valid = batch["positive"] != 0
    return (each * valid).sum(), valid.sum()


def loss(model, batch):
    value, count = loss_sum(model, batch)
    return value / count


def step(model, batch):
    value, count = loss_sum(model, batch)
    dist.all_reduce(count)
    value = value / count
    value.backward()
    for name, parameter in model.named_parameters():
        if name != "items.weight":
            dist.all_reduce(parameter.grad)
    return value.detach()


generator = torch.Generator().manual_seed(4637)


def draw(users=6):
    clicks = torch.randint(1, ITEMS, (users, LENGTH + 1), generator=generator)
    empty = torch.randint(0, LENGTH - 2, (users, 1), generator=generator)
    clicks[torch.arange(LENGTH + 1)[None] < empty] = 0
    negative = torch.randint(1, ITEMS, (users, LENGTH), generator=generator)
    return {
        "history": clicks[:, :-1].clone(),
        "positive": clicks[:, 1:].clone(),
        "negative": negative * (clicks[:, 1:] != 0),
    }


batches = [draw() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": RANKS},
    shard=lambda name: (0, "dp") if name == "items.weight" else None,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.98)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
