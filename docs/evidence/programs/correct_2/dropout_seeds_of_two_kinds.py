"""Dropout under tensor parallelism: activations share a mask, attention weights are cut by heads.

Thread: https://github.com/awslabs/slapo/issues/21 "[Feature] Random seed management for dropout layers in
distributed environment", 2023-01-26 ("the activation dropout needs to use the same random seed, while
attention weight dropout requires to use different random seeds").
Right: masks are drawn from the batch's seed. All ranks draw the mask of the residual stream alike; of
the attention weights' mask, drawn for all heads, each rank uses that of its heads. In the checkpointed
layer the recomputation draws the same masks.
Must not be accused: random numbers, different masks on the ranks, a collective that runs again in the
backward pass.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import titanlite

DIM, HEADS, HEAD_DIM, VOCAB, P = 16, 4, 4, 20, 0.2


class Forward(torch.autograd.Function):
    """identity, and all-reduce in the backward pass"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def draw_mask(shape, seed):
    rng = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=rng, dtype=torch.float64) >= P) / (1 - P)


class SelfAttention(nn.Module):
    def __init__(self, n=1, rank=0, group=None):
        super().__init__()
        self.n, self.rank, self.group = n, rank, group
        self.query, self.key, self.value = (nn.Linear(DIM, DIM // n) for _ in range(3))
        self.out_proj = nn.Linear(DIM // n, DIM, bias=False)

    def forward(self, x, seed):
        if self.group is not None:
            x = Forward.apply(x, self.group)
        q, k, v = (
            m(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        )
        probs = (q @ k.transpose(-1, -2) / HEAD_DIM**0.5).softmax(-1)
        mask = draw_mask((len(x), HEADS, x.shape[1], x.shape[1]), seed)
        probs = probs * mask.chunk(self.n, 1)[self.rank].to(probs.dtype)
        out = self.out_proj((probs @ v).transpose(1, 2).flatten(2))
        return out if self.group is None else AllReduce.apply(out, self.group)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = SelfAttention(), nn.LayerNorm(DIM)

    def forward(self, x, seed):
        h = self.attention(x, seed)
        return self.norm(x + h * draw_mask(h.shape, seed + 1).to(h.dtype))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(BertLayer() for _ in range(2))
        self.decoder = nn.Linear(DIM, VOCAB)

    def forward(self, ids, seed):
        x = self.embeddings(ids)
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, seed + 10 * i, use_reentrant=False)
        return self.decoder(x)


def loss(model, batch):
    logits = model(batch["ids"], int(batch["seed"]))
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def shard_model(mesh):
    model, n, rank = Bert(), mesh["tp"].size(), mesh.get_local_rank("tp")
    for layer in model.layers:
        whole, layer.attention = layer.attention, SelfAttention(n, rank, mesh.get_group("tp"))
        for name, p in layer.attention.named_parameters():
            dim = 1 if name == "out_proj.weight" else 0
            p.data = whole.get_parameter(name).data.chunk(n, dim)[rank].clone()
    return model


generator = torch.Generator().manual_seed(55)
batches = [
    {
        **{name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("ids", "labels")},
        "seed": torch.tensor(1000 * step),
    }
    for step in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Bert, shard_model, batches=batches, loss=loss, ranks={"tp": 2}))
