"""Context parallelism over padded sequences: the number of valid tokens per rank is the length divided by cp.

Thread: https://github.com/NVIDIA/TransformerEngine/issues/1930 "There is a bug when both packing and context
parallelism (CP) are enabled at the same time.", 2025-07-06.
Wrong: a sequence of 7 tokens, padded to 8, counts as 7 // 2 = 3 valid tokens on each of two ranks. So a valid token at
the end of the first chunk is masked as if it were padding, and padding in the second chunk is attended.
EXPECT: in the forward pass, the output of attention (blocks.0.attention) is the first that differs, on both ranks: its
mask of keys is wrong, as lengths are divided by cp (rounded down): valid keys of chunk 0 are masked, padded ones of
chunk 1 may be attended. q, k and v of block 0 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ = 12, 8, 8


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    group = None

    def forward(self, q, k, v, lengths):
        size = 1 if self.group is None else self.group.size()
        valid = torch.arange(k.shape[1]) < (lengths // size)[:, None]
        if self.group is not None:
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
            valid = Gather.apply(valid.to(torch.uint8), self.group).bool()
        scores = (q @ k.mT / DIM**0.5).masked_fill(~valid[:, None], float("-inf"))
        return scores.softmax(-1) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x, lengths):
        h = self.norm(x)
        return x + self.out(self.attention(self.q(h), self.k(h), self.v(h), lengths))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, lengths):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, lengths)
        return self.head(x)


def sum_of_losses(model, batch):
    logits = model(batch["tokens"], batch["lengths"]).flatten(0, 1)
    return cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def loss(model, batch):
    return sum_of_losses(model, batch) / (batch["labels"] != -100).sum()


def split(batch, mesh):
    size, rank = mesh["cp"].size(), mesh.get_local_rank("cp")
    return {n: t if n == "lengths" else t.chunk(size, 1)[rank] for n, t in batch.items()}


def parallel(mesh):
    model = Encoder()
    for block in model.blocks:
        block.attention.group = mesh.get_group("cp")
    return model


def step(model, batch):
    targets = (batch["labels"] != -100).sum()
    dist.all_reduce(targets)
    value = sum_of_losses(model, batch) / targets
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return value


def draw(generator):
    tokens, labels = (torch.randint(VOCAB, (3, SEQ), generator=generator) for _ in range(2))
    lengths = torch.tensor([7, 8, 5])
    labels[torch.arange(SEQ) >= lengths[:, None]] = -100
    return {"tokens": tokens, "labels": labels, "lengths": lengths}


generator = torch.Generator().manual_seed(1930)
batches = [draw(generator) for _ in range(3)]
arguments = Encoder, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split=split, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
