"""A language model trained with data parallelism and Ulysses sequence parallelism, with its own bucketed gradient all-reduce.

Thread: deepspeedai/DeepSpeed pull request #5555 "fix sequence parallel(Ulysses) grad scale for zero0" (2024). Without
ZeRO the gradients were divided by the ranks of the combined sequence and data parallel group instead of the data
parallel ones, so that the gradient norm with four sequence ranks was a quarter of that of ZeRO 1.
Fault: in GradientBuckets.flush the sum over all ranks is divided by the size of the group that it is reduced over (dp
x sp). The ranks of one sequence each hold a part of the gradient, which must be added, so all gradients are too small
by the factor sp.
REPAIR: `bucket.div_(dist.get_world_size(self.group))` -> `bucket.div_(self.mesh["dp"].size())`
A right first sentence says: The gradient reduction (GradientBuckets.flush) divides by the size of the combined dp x
sp group instead of the data parallel size, so every parameter's gradient is too small by the sequence parallel degree
(here half).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import titanlite

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 20, 16, 4, 2, 8


class SwapHeadsAndSequence(torch.autograd.Function):
    """[batch, length, heads, dim]: gather dimension `gather`, scatter dimension `scatter` over the group."""

    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.scatter, ctx.gather, ctx.group = scatter, gather, group
        return exchange(x, scatter, gather, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.gather, ctx.scatter, ctx.group), None, None, None


def exchange(x, scatter, gather, group):
    size = dist.get_world_size(group)
    sent = torch.stack([part.contiguous() for part in x.chunk(size, dim=scatter)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), dim=gather)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.group = None

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        if self.group is not None:
            q, k, v = (SwapHeadsAndSequence.apply(part, 2, 1, self.group) for part in (q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = SwapHeadsAndSequence.apply(y, 1, 2, self.group)
        return self.out(y.flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, offset=0):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.size(1)) + offset)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GradientBuckets:
    def __init__(self, model, mesh, numel=1500):
        self.mesh, self.numel = mesh, numel
        self.group = dist.group.WORLD
        self.parameters = list(model.parameters())

    def reduce(self):
        pending = []
        for parameter in reversed(self.parameters):
            pending.append(parameter.grad)
            if sum(grad.numel() for grad in pending) >= self.numel:
                self.flush(pending)
                pending = []
        if pending:
            self.flush(pending)

    def flush(self, grads):
        bucket = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(bucket, group=self.group)
        bucket.div_(dist.get_world_size(self.group))
        for grad, part in zip(grads, bucket.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


def plain():
    return Model()


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        block.attention.group = mesh.get_group("sp")
    return model, GradientBuckets(model, mesh), mesh


def loss(model, batch):
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def step(built, part):
    model, buckets, mesh = built
    tokens, labels = part
    sequence_ranks = mesh["sp"].size()
    logits = model(tokens, offset=mesh.get_local_rank("sp") * tokens.size(1))
    local = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    local = local / (labels.numel() * sequence_ranks)
    local.backward()
    buckets.reduce()
    total = local.detach().clone()
    dist.all_reduce(total)
    return total / mesh["dp"].size()


def make_batches(count=2, rows=4):
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator) for _ in range(count)]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


batches = make_batches()
arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, split={"dp": 0, "sp": 1}, ranks={"dp": 2, "sp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
