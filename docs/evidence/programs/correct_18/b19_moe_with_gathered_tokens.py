"""A mixture-of-experts language model whose ranks gather all ranks' tokens, run their own experts on them and scatter the sums.

Might be accused because: the experts are dealt to the ranks in turn, not in blocks; the backward pass of the scattering divides
by the number of ranks and that of the gathering multiplies by it; the experts' gradients are reduced by nobody, all others are
averaged; the balance loss takes the load from all ranks but the probabilities from its own tokens.
Correct because: the loss is the mean of the ranks' losses. An expert sees the tokens of all ranks, so its gradient is whole up
to the factor 1/ranks, which the scattering's backward pass brings in; the gathering's takes it out again for the layers below,
whose gradients are averaged later. The load has no gradient, and the balance loss is linear in the probabilities.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS = 24, 12, 2, 20, 8, 2
EXPERTS, TOP_K, BALANCE = 5, 2, 0.05


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def own_part_of_sum(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return own_part_of_sum(grad, ctx.group) * dist.get_world_size(ctx.group), None


class ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_part_of_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group) / dist.get_world_size(ctx.group), None


def expert():
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))


class MixtureOfExperts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(i): expert() for i in range(EXPERTS)})

    def deal(self, group):
        self.group = group
        for i in range(EXPERTS):
            if i % dist.get_world_size(group) != dist.get_rank(group):
                del self.experts[str(i)]

    def balance(self, probs, chosen):
        load = chosen.mean(0)
        if self.group is not None:
            dist.all_reduce(load, group=self.group)
            load = load / dist.get_world_size(self.group)
        return EXPERTS * (load * probs.mean(0)).sum()

    def forward(self, x):
        tokens = x.flatten(0, 1)
        probs = self.router(tokens).softmax(-1)
        values, indices = probs.topk(TOP_K, dim=-1)
        chosen = torch.zeros_like(probs).scatter(-1, indices, 1.0)
        balance = self.balance(probs, chosen.detach())
        values = values / values.sum(-1, keepdim=True)
        weights = torch.zeros_like(probs).scatter(-1, indices, values)
        if self.group is not None:
            tokens, weights = (GatherTokens.apply(t, self.group) for t in (tokens, weights))
        y = sum(weights[:, int(i), None] * f(tokens) for i, f in self.experts.items())
        if self.group is not None:
            y = ScatterSums.apply(y, self.group)
        return y.view_as(x), balance


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MixtureOfExperts()

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y, balance = self.moe(self.norm_2(x))
        return x + y, balance


class MoELM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x, total = self.words(tokens) + self.places.weight, 0.0
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return self.head(x), total


def plain():
    return MoELM()


def parallel(mesh):
    model = MoELM()
    for block in model.blocks:
        block.moe.deal(mesh.get_group("ep"))
    return model


def loss(model, batch):
    logits, balance = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + BALANCE * balance


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    value = value.detach() / dist.get_world_size()
    dist.all_reduce(value)
    return value


generator = torch.Generator().manual_seed(5)
batches = [torch.randint(0, VOCAB, (6, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="ep",
    ranks={"ep": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
