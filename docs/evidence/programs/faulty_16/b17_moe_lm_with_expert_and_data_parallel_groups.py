"""A mixture-of-experts language model on four ranks: two groups of expert parallel ranks, each with all the experts.

Thread: deepspeedai/DeepSpeed pull request #6546 "Fix expert grad scaling problem with ZeRO optimizer" (2024, issue #6545): the
expert gradients were divided by the size of the expert data parallel group in place of that of the data parallel group, so
they depended on the sizes of the groups.
Fault: GradientReducer.reduce divides the experts' gradients by the number of ranks which hold the same experts; through the
all-to-all an expert already sums over the tokens of all ranks, so its gradient is too large by the expert parallel size.
REPAIR: `replicas = dist.get_world_size(self.expert_data_group)` -> `replicas = dist.get_world_size()`
A right first sentence says: the gradients of the expert weights (w1, w2) are too large by the expert parallel size 2, because
the reducer divides them by the expert data parallel size instead of the number of all data parallel ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import titanlite

VOCAB, WIDTH, HIDDEN, EXPERTS, TOP = 23, 12, 16, 4, 2


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_counts, in_counts, group):
        ctx.counts, ctx.group = (out_counts, in_counts), group
        output = x.new_empty((sum(out_counts), *x.shape[1:]))
        dist.all_to_all_single(output, x.contiguous(), out_counts, in_counts, group=group)
        return output

    @staticmethod
    def backward(ctx, grad):
        out_counts, in_counts = ctx.counts
        return AllToAll.apply(grad, in_counts, out_counts, ctx.group), None, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x, counts):
        """The rows of x are sorted by expert, counts of them per expert."""
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        parts = x.split(counts)
        return torch.cat([F.gelu(part @ w1[i]) @ w2[i] for i, part in enumerate(parts)])


class MoE(nn.Module):
    ep_group = None

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        rows = tokens[order // TOP]
        rows = self.run(rows, counts) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // TOP, rows).view_as(x)

    def run(self, rows, counts):
        if self.ep_group is None:
            return self.experts(rows, counts.tolist())
        size, received = dist.get_world_size(self.ep_group), torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.ep_group)
        received = received.view(size, -1)
        sent_counts, got_counts = counts.view(size, -1).sum(1).tolist(), received.sum(1).tolist()
        rows = AllToAll.apply(rows, got_counts, sent_counts, self.ep_group)

        # What came is sorted by sender, then by expert; the experts want it by expert.
        local = torch.arange(received.size(1)).repeat(size).repeat_interleave(received.flatten())
        by_expert = local.argsort(stable=True)
        output = self.experts(rows[by_expert], received.sum(0).tolist())
        output = output[by_expert.argsort()]
        return AllToAll.apply(output, sent_counts, got_counts, self.ep_group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoE()

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class MoELM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GradientReducer:
    def __init__(self, model, mesh):
        self.model, self.expert_data_group = model, mesh.get_group("edp")

    def reduce(self):
        replicas = dist.get_world_size(self.expert_data_group)
        for parameter in self.model.parameters():
            expert = isinstance(parameter, DTensor)
            gradient = parameter.grad.to_local() if expert else parameter.grad
            dist.all_reduce(gradient, group=self.expert_data_group if expert else None)
            gradient.div_(replicas if expert else dist.get_world_size())


def plain():
    return MoELM()


def parallel(mesh):
    model = MoELM()
    for block in model.blocks:
        block.moe.ep_group = mesh.get_group("ep")
        for name, weight in list(block.moe.experts.named_parameters()):
            sharded = distribute_tensor(weight.detach(), mesh, [Replicate(), Shard(0)])
            setattr(block.moe.experts, name, nn.Parameter(sharded))
    return model, GradientReducer(model, mesh)


def loss(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def step(built, batch):
    model, reducer = built
    value = loss(model, batch)
    value.backward()
    reducer.reduce()
    return value.detach()


def split(batch, mesh):
    return batch.chunk(mesh.size())[mesh.get_rank()]


generator = torch.Generator().manual_seed(6545)
batches = [torch.randint(0, VOCAB, (8, 9), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"edp": 2, "ep": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
