"""Data parallelism whose output layer is cut over the vocabulary: the ranks exchange logits and each gets those of its own rows.

Thread: of the kind sgl-project/sglang pull request #5558 "Performing Vocabulary Parallelism for LM Head across Attention TP
Groups" (2025), where "A scatter operation is called immediately after all-gather", and NVIDIA/TensorRT-LLM pull request #7128
"[TRTLLM-6741] [feat] enable LM tp for MTP, under attention dp case" (2025).
Correct: each rank computes its words' logits for the hidden states of all rows, an all-to-all gives every rank all words for
its own rows, and the loss is an ordinary one. The head's part sees all rows, so its gradient is complete and not reduced; all
other gradients are averaged.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, silu

import titanlite

VOCAB, DIM, LENGTH, RANKS = 12, 8, 6, 3


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, x.contiguous(), group=group)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def exchange(x, cut, join, group):
    sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)


class WordsForRows(torch.autograd.Function):
    """[all rows, length, own words] -> [own rows, length, all words]"""

    @staticmethod
    def forward(ctx, logits, group):
        ctx.group = group
        return exchange(logits, 0, -1, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, -1, 0, ctx.group), None


class Head(nn.Linear):
    group = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        return WordsForRows.apply(
            linear(GatherRows.apply(x, self.group), self.weight, self.bias), self.group
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.down(silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), Head(DIM, VOCAB)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def shard(name):
    return (0, "dp") if name.startswith("head.") else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("dp")
    model.head.group = group
    for name, p in list(model.head.named_parameters()):
        own = p.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
        setattr(model.head, name, nn.Parameter(own.clone()))
    return model


def step(model, batch):
    value = loss(model, batch)
    (value / RANKS).backward()
    for name, p in model.named_parameters():
        if shard(name) is None:
            dist.all_reduce(p.grad)
    return value.detach()


rng = torch.Generator().manual_seed(512)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (6, LENGTH + 1), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": RANKS}, split="dp", shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
