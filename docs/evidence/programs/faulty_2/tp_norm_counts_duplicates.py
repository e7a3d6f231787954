"""A hybrid-parallel optimizer adds the squared norms of all parameters over tp.

Thread: https://github.com/hpcaitech/ColossalAI/pull/4837 "[feature] Add clip_grad_norm for
hybrid_parallel_plugin", 2023-09-28 (review: a gradient whose parameter is not distributed over tp_group
must be divided before the sum).
Wrong: embedding, norms, the bias of linear_2 and the head are the same on every rank of tp and are
counted once per rank.
A right diagnosis says: all gradients agree before clipping, but the norm is too large: the replicated
parameters count tp times in it, so that the clipped gradients and all weights are wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM, HIDDEN, VOCAB, MAX_NORM = 16, 32, 20, 0.5


class Region(torch.autograd.Function):
    """all-reduce in the forward or in the backward pass"""

    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.args = group, in_forward
        if in_forward:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        group, in_forward = ctx.args
        if not in_forward:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        return grad, None, None


class FeedForward(nn.Module):
    def __init__(self, tp_size=1, tp_group=None):
        super().__init__()
        self.tp_group = tp_group
        self.linear_1 = nn.Linear(DIM, HIDDEN // tp_size)
        self.linear_2 = nn.Linear(HIDDEN // tp_size, DIM, bias=False)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x):
        if self.tp_group is None:
            return self.linear_2(gelu(self.linear_1(x))) + self.bias
        x = gelu(self.linear_1(Region.apply(x, self.tp_group, False)))
        return Region.apply(self.linear_2(x), self.tp_group, True) + self.bias


class Model(nn.Module):
    tp_group = None

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.ffn = FeedForward()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.ffn(self.norm(x)))


def clip_grad_norm(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total_norm_exponentiated = torch.stack([grad.norm() ** 2 for grad in grads]).sum()
    if model.tp_group is not None:
        dist.all_reduce(total_norm_exponentiated, group=model.tp_group)
    total_norm = total_norm_exponentiated.sqrt()
    for grad in grads:
        grad.mul_(torch.clamp(MAX_NORM / (total_norm + 1e-6), max=1.0))
    return total_norm


def boost(mesh):
    model, tp_size, rank = Model(), mesh["tp"].size(), mesh.get_local_rank("tp")
    whole, model.ffn = model.ffn, FeedForward(tp_size, mesh.get_group("tp"))
    model.tp_group = mesh.get_group("tp")
    model.ffn.bias = whole.bias
    for name, dim in (("linear_1.weight", 0), ("linear_1.bias", 0), ("linear_2.weight", 1)):
        model.ffn.get_parameter(name).data = whole.get_parameter(name).data.chunk(tp_size, dim)[
            rank
        ]
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


generator = torch.Generator().manual_seed(25)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"tp": 2}, clip=clip_grad_norm, optimizer=sgd)
    print(titanlite.compare(Model, boost, **options))
