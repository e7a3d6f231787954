"""A language model whose experts choose their tokens among those of all data parallel ranks (expert choice routing).

Might be accused because: each rank's router sees its own rows only, tokens may be served by two experts or by none, the experts'
gradients aren't reduced while all other gradients are, and each rank's loss is divided by the number of ranks before backward.
Correct because: the scores and tokens of all ranks are gathered before the choice, so it is the one of the whole batch, and
gathering sums the gradients in its backward pass; an expert's gradient thus already contains all ranks' losses.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS, EXPERTS, PER_TOKEN, ROWS = 20, 12, 2, 16, 7, 2, 4, 2, 6


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class SumToOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        return GatherRows.forward(ctx, grad, ctx.group), None


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


class ExpertChoice(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def keep_own_experts(self, group):
        self.group = group
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        for i in range(EXPERTS):
            if i % world != rank:
                del self.experts[str(i)]

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        if self.group is not None:
            tokens, scores = (GatherRows.apply(t, self.group) for t in (tokens, scores))
        places = len(tokens) * PER_TOKEN // EXPERTS
        y = torch.zeros_like(tokens)
        for name, expert in self.experts.items():
            weights, chosen = scores[:, int(name)].topk(places)
            y = y.index_add(0, chosen, weights.unsqueeze(-1) * expert(tokens[chosen]))
        if self.group is not None:
            y = SumToOwnRows.apply(y, self.group)
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = ExpertChoice()

    def forward(self, x):
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.moe(self.ln_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def plain():
    return Model()


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        block.moe.keep_own_experts(mesh.get_group("dp"))
    return model


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(model, batch):
    group = model.blocks[0].moe.group
    value = loss(model, batch) / dist.get_world_size(group)
    value.backward()
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(parameter.grad, group=group)
    value = value.detach()
    dist.all_reduce(value, group=group)
    return value


generator = torch.Generator().manual_seed(22)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
