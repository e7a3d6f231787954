"""A row-parallel projector of a vision-language model whose activation comes before the all-reduce.

Thread: of the kind "results differ with tensor parallelism, nonlinearity applied to the partial sums" (PyTorch forums
on RowwiseParallel and on hand-written row-parallel layers; LLaVA-like projectors in trainers with their own TP).
Wrong: fc2 gives a part of a sum over the ranks. GELU is applied to the part, and the results are added up; but GELU
of a sum is not the sum of GELUs. The backward pass has the same error.
PLACE: projector, forward pass, between projector.fc2 and its reduction (projector.act2)
KIND: nonlinear activation applied to partial sums before the all-reduce over tp
REPAIR: `return Sum.apply(self.act2(self.fc2(x)), self.group)` -> `return self.act2(Sum.apply(self.fc2(x), self.group))`
EXPECT: in the forward pass, the output of projector.fc2 is Partial over tp (correct after a sum), and projector.act2 is
applied to it before it is reduced: a nonlinear function of the parts. All-reduce the output of fc2 before act2.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, IMAGE, DIM, HIDDEN = 12, 10, 8, 24


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act1 = nn.Linear(IMAGE, HIDDEN), nn.GELU()
        self.fc2, self.act2 = nn.Linear(HIDDEN, DIM, bias=False), nn.GELU()

    def forward(self, x):
        return self.act2(self.fc2(self.act1(self.fc1(x))))


class ParallelProjector(Projector):
    def __init__(self, whole, group):
        super().__init__()
        n, i, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.fc1.weight = nn.Parameter(whole.fc1.weight.detach().chunk(n, 0)[i].clone())
        self.fc1.bias = nn.Parameter(whole.fc1.bias.detach().chunk(n, 0)[i].clone())
        self.fc2.weight = nn.Parameter(whole.fc2.weight.detach().chunk(n, 1)[i].clone())

    def forward(self, x):
        x = self.act1(self.fc1(Copy.apply(x, self.group)))
        return Sum.apply(self.act2(self.fc2(x)), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Linear(IMAGE, IMAGE)
        self.projector = Projector()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixer = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, image, tokens):
        prefix = self.projector(torch.tanh(self.vision(image)))
        x = torch.cat([prefix, self.embed(tokens)], 1)
        return self.head(self.mixer(x)[0][:, prefix.shape[1] :])


def loss(model, batch):
    logits = model(batch["image"], batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    model.projector = ParallelProjector(model.projector, mesh.get_group("tp"))
    return model


def shard(name):
    if name.startswith("projector.fc1"):
        return 0, "tp"
    return (1, "tp") if name == "projector.fc2.weight" else None


generator = torch.Generator().manual_seed(5)


def draw():
    return torch.randint(VOCAB, (4, 5), generator=generator)


batches = [
    {"image": torch.randn(4, 3, IMAGE, generator=generator), "tokens": draw(), "targets": draw()}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
