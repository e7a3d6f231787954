"""A mixture of experts over four ranks: experts split over two of them, each half held twice, tokens sent by all-to-all.

Thread: deepspeedai/DeepSpeed issue #6545 "[BUG]Expert Grad Scaling Problem With Zero Optimizer" (2024), repaired by pull
request #6546: with expert parallelism the gradients of expert weights came out ep_size times as large as without it.
Fault: in GradientReducer.average_tensor, a gradient is divided by the size of the group it is summed over. For experts that is
the expert data parallel group (2), but their gradient already sums over the tokens of all ranks of the expert group, each with
the mean loss of its own rows: it stands for all 4 data parallel ranks. So it is ep_size (2) times too large.
REPAIR: `tensor.div_(dist.get_world_size(group))` -> `tensor.div_(dist.get_world_size())`
A right first sentence says: the gradients of the expert weights (experts.w1, experts.w2) are twice (ep_size times) too large,
because average_tensor divides them by the expert data parallel size instead of by the whole data parallel world size.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

DIM, HIDDEN, EXPERTS, VOCAB, SEQ = 16, 24, 4, 24, 5


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.splits = send, receive
        ctx.group = group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.splits
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, receive, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    """The experts [first, first + number) of a layer; each has two matrices."""

    def __init__(self, w1, w2, first=0):
        super().__init__()
        self.w1, self.w2, self.first = nn.Parameter(w1), nn.Parameter(w2), first

    def forward(self, x, expert_of_row):
        out = torch.zeros_like(x)
        for i in range(self.w1.shape[0]):
            rows = (expert_of_row == self.first + i).nonzero().flatten()
            out = out.index_add(0, rows, F.gelu(x[rows] @ self.w1[i]) @ self.w2[i])
        return out


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(
            torch.randn(EXPERTS, DIM, HIDDEN) / 4, torch.randn(EXPERTS, HIDDEN, DIM) / 5
        )
        self.ep_group = None

    def split_experts(self, group):
        self.ep_group = group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        w1, w2 = (
            self.experts.w1.detach().chunk(size)[rank],
            self.experts.w2.detach().chunk(size)[rank],
        )
        self.experts = Experts(w1.clone(), w2.clone(), first=rank * w1.shape[0])
        for p in self.experts.parameters():
            p.allreduce = False

    def forward(self, x):
        flat = x.reshape(-1, DIM)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        if self.ep_group is None:
            return (self.experts(flat, chosen) * weight[:, None]).view_as(x)
        order = chosen.argsort(stable=True)
        size = dist.get_world_size(self.ep_group)
        send = torch.bincount(chosen // (EXPERTS // size), minlength=size)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.ep_group)
        send, receive = send.tolist(), receive.tolist()
        arrived = AllToAll.apply(flat[order], send, receive, self.ep_group)
        arrived_expert = AllToAll.apply(chosen[order], send, receive, self.ep_group)
        done = AllToAll.apply(self.experts(arrived, arrived_expert), receive, send, self.ep_group)
        out = torch.zeros_like(flat).index_copy(0, order, done)
        return (out * weight[:, None]).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.dense = nn.Linear(DIM, DIM)
        self.moe = nn.ModuleList(MoE() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + torch.tanh(self.dense(x))
        for layer in self.moe:
            x = x + layer(x)
        return self.head(self.norm(x))


class GradientReducer:
    """Sums gradients in buckets, each over the ranks that hold the same parameters, and averages them."""

    def __init__(self, model, expert_data_group):
        self.buckets = {}
        for p in model.parameters():
            group = dist.group.WORLD if getattr(p, "allreduce", True) else expert_data_group
            self.buckets.setdefault(group, []).append(p)

    def average_tensor(self, tensor, group):
        tensor.div_(dist.get_world_size(group))
        dist.all_reduce(tensor, group=group)
        return tensor

    def reduce_gradients(self):
        for group, params in self.buckets.items():
            bucket = torch.cat([p.grad.flatten() for p in params])
            bucket = self.average_tensor(bucket, group)
            for p, grad in zip(params, bucket.split([p.numel() for p in params])):
                p.grad.copy_(grad.view_as(p))


def parallel(mesh):
    model = Model()
    for layer in model.moe:
        layer.split_experts(mesh.get_group("ep"))
    return model, GradientReducer(model, mesh.get_group("edp"))


def shard(name):
    return (0, "ep") if ".experts." in name else None


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def loss(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def step(built, batch):
    model, reducer = built
    value = loss(model, batch)
    value.backward()
    reducer.reduce_gradients()
    return value


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        text = torch.randint(VOCAB, (rows, SEQ + 1), generator=generator)
        yield {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


arguments = Model, parallel
options = dict(
    batches=list(make_batches(3, rows=8)),
    loss=loss,
    step=step,
    ranks={"edp": 2, "ep": 2},
    split={"edp": 0, "ep": 0},
    shard=shard,
    optimizer=optimizer,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
