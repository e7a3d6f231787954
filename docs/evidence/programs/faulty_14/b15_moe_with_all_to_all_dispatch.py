"""A token classifier with top-1 mixture of experts layers: experts split over ep, tokens sent by all-to-all, replicas over dp.

Thread: databricks/megablocks pull request #20 "Fix weight gradients with expert model parallelism." (2023), explained in issue
#86: expert weights got gradients too large by the expert parallel size, as they see the tokens of all those ranks.
Fault: reduce_gradients divides an expert's gradient by the number of its replicas (dp) alone; the all-to-all has already summed
into it the gradients of every ep rank's own mean loss, so it comes out ep times too large, while the dense ones are right.
REPAIR: `p.grad /= mesh["dp"].size()` -> `p.grad /= world`
A right first sentence says: the gradients of the expert weights (experts.w1 and w2) are ep = 2 times too large, since
reduce_gradients divides them by the dp size instead of by all ranks whose tokens they hold.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HIDDEN, EXPERTS, CLASSES = 12, 16, 24, 4, 5


class Experts(nn.Module):
    def __init__(self, w1, w2):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(w1), nn.Parameter(w2)

    def forward(self, x, expert):
        y = torch.zeros_like(x)
        for e in range(len(self.w1)):
            rows = (expert == e).nonzero().flatten()
            y = y.index_add(0, rows, F.gelu(x[rows] @ self.w1[e]) @ self.w2[e])
        return y


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        scale = WIDTH**-0.5
        self.experts = Experts(
            torch.randn(EXPERTS, WIDTH, HIDDEN) * scale, torch.randn(EXPERTS, HIDDEN, WIDTH) * scale
        )

    def run_experts(self, x, expert):
        return self.experts(x, expert)

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, -2)
        gate, expert = self.router(x).softmax(dim=-1).max(dim=-1)
        return (self.run_experts(x, expert) * gate[:, None]).view(shape)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoE()

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None


class ExpertParallelMoE(MoE):
    def __init__(self, moe, mesh):
        nn.Module.__init__(self)
        self.group, self.ep = mesh.get_group("ep"), mesh["ep"].size()
        rank = mesh.get_local_rank("ep")
        self.router = moe.router
        self.experts = Experts(
            *(w.detach().chunk(self.ep)[rank].clone() for w in (moe.experts.w1, moe.experts.w2))
        )

    def run_experts(self, x, expert):
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent = counts.view(self.ep, -1).sum(dim=1).tolist()
        received = arriving.view(self.ep, -1).sum(dim=1).tolist()
        local = torch.arange(EXPERTS // self.ep).repeat(self.ep).repeat_interleave(arriving)
        y = self.experts(Exchange.apply(x[order], sent, received, self.group), local)
        y = Exchange.apply(y, received, sent, self.group)
        return y[order.argsort()]


def reduce_gradients(model, mesh):
    world = dist.get_world_size()
    for name, p in model.named_parameters():
        if "experts" in name:
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
            p.grad /= mesh["dp"].size()
        else:
            dist.all_reduce(p.grad)
            p.grad /= world


def plain():
    return Classifier()


def parallel(mesh):
    model = Classifier()
    for layer in model.layers:
        layer.moe = ExpertParallelMoE(layer.moe, mesh)
    return model, mesh


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def step(built, batch):
    model, mesh = built
    value = loss(model, batch)
    value.backward()
    reduce_gradients(model, mesh)
    return value.detach()


def split(batch, mesh):
    index = mesh.get_local_rank("dp") * mesh["ep"].size() + mesh.get_local_rank("ep")
    return {key: value.chunk(mesh.size())[index] for key, value in batch.items()}


def shard(name):
    return (0, "ep") if ".experts." in name else None


generator = torch.Generator().manual_seed(20)
batches = [
    {
        "tokens": torch.randint(0, VOCAB, (8, 6), generator=generator),
        "labels": torch.randint(0, CLASSES, (8, 6), generator=generator),
    }
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    shard=shard,
    ranks={"dp": 2, "ep": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
