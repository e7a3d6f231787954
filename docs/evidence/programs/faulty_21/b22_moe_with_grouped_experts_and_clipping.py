"""Pretraining of a mixture of experts: attention tensor parallel, stacked expert weights over the same ranks, gradients clipped.

Thread: NVIDIA/Megatron-LM pull request #5916 "Fix gradient-norm undercounting when using EP and TP" (2026): the grouped experts
are taken for duplicates over the tensor parallel ranks, the norm leaves some of them out and clipping is weaker than asked for.
Fault: SPLIT lists the attention's weights as different on each rank but not the stacked expert weights, so grad_norm counts the
experts of the first rank only, as if the others were copies of them.
REPAIR: `SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj")` -> `SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "experts")`
A right first sentence says: the total gradient norm used for clipping leaves out the experts of all ranks but the first (they
are treated as replicated parameters), so it is too small and the gradients are clipped too little.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEAD_DIM, HIDDEN, LENGTH, EXPERTS, TOP_K, MAX_NORM = 20, 12, 3, 10, 8, 6, 2, 0.25
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj")


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Leave.forward(ctx, grad, ctx.group), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        if group is not None:
            x = x.contiguous().clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        x = Enter.apply(x, self.group)
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Leave.apply(self.o_proj(y.transpose(1, 2).flatten(2)), self.group)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = 0
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x, gates):
        hidden = torch.einsum("btd,edh->beth", x, self.w1)
        own = gates[..., self.first : self.first + len(self.w1)]
        return torch.einsum("beth,ehd,bte->btd", F.gelu(hidden), self.w2, own)


class MoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x):
        values, chosen = self.router(x).topk(TOP_K, dim=-1)
        gates = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, values.softmax(-1))
        x, gates = Enter.apply(x, self.group), Enter.apply(gates, self.group)
        return Leave.apply(self.experts(x, gates), self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.moe = Attention(), MoE()

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def cut(module, name, dim, rank, world):
    whole = getattr(module, name)
    setattr(module, name, nn.Parameter(whole.detach().chunk(world, dim)[rank].clone()))


def plain():
    return Model()


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for block in model.blocks:
        block.attention.group = block.moe.group = group
        for name, module in block.attention.named_children():
            cut(module, "weight", 1 if name == "o_proj" else 0, rank, world)
        for name in ("w1", "w2"):
            cut(block.moe.experts, name, 0, rank, world)
        block.moe.experts.first = rank * len(block.moe.experts.w1)
    return model


def grad_norm(model):
    group = model.blocks[0].attention.group
    total = 0.0
    for name, parameter in model.named_parameters():
        if group is None or any(part in name for part in SPLIT) or dist.get_rank(group) == 0:
            total += parameter.grad.square().sum()
    return Leave.apply(total, group).sqrt()


@torch.no_grad()
def clip(model):
    norm = grad_norm(model)
    for parameter in model.parameters():
        parameter.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    return norm


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


generator = torch.Generator().manual_seed(5916)
batches = [torch.randint(0, VOCAB, (6, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
options = dict(batches=batches, loss=loss, clip=clip, ranks={"tp": 2}, optimizer=sgd)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
