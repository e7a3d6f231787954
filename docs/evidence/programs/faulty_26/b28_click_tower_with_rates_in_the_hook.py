"""A click model whose gradients are scaled layer by layer; under DDP a communication hook does that bucket by bucket.

Thread: pytorch/pytorch pull requests #48867 "Replace the key of error_dict in PowerSGD state with bucket index"
(2020) and #50981 (2021), "Bucket rebuilding occurs in the 2nd iteration": what a hook keeps per bucket index doesn't
fit any more once DDP has put the parameters into the order in which their gradients arrive.
Fault: RateState.rates caches the flat multipliers under bucket.index(). They're built in the first iteration, in
DDP's first order; afterwards the only bucket has the same size, but another order, and elements get other layers'
rates.
REPAIR: `key = bucket.index()` -> `key = tuple(id(p) for p in bucket.parameters())`
A right first sentence says: from the second step on the gradients are multiplied by the rates of other layers,
because the hook's multipliers are cached by bucket index, and DDP rebuilds its buckets in another order after the
first backward.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

FIELDS, VALUES, DENSE, WIDTH, ROWS = 3, 7, 4, 8, 12
RATES = {"click": 2.0, "cross": 1.0, "deep": 0.5, "fields": 0.25}


class CrossLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Linear(width, width)

    def forward(self, x0, x):
        return x0 * self.weight(x) + x


class ClickModel(nn.Module):
    """A deep and cross network; what is trained fastest is declared first."""

    def __init__(self):
        super().__init__()
        width = FIELDS * WIDTH + DENSE
        self.click = nn.Linear(width + WIDTH, 1)
        self.cross = nn.ModuleList(CrossLayer(width) for _ in range(2))
        self.deep = nn.Sequential(
            nn.Linear(width, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU()
        )
        self.fields = nn.ModuleList(nn.Embedding(VALUES, WIDTH) for _ in range(FIELDS))

    def forward(self, dense, fields):
        embedded = [table(column) for table, column in zip(self.fields, fields.unbind(1))]
        x0 = torch.cat([*embedded, dense], -1)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return self.click(torch.cat([x, self.deep(x0)], -1)).squeeze(-1)


def rate_of(name):
    return RATES[name.split(".")[0]]


class RateState:
    """What the hook needs: the multipliers of a bucket's elements."""

    def __init__(self, model, group):
        self.group = group
        self.rate = {parameter: rate_of(name) for name, parameter in model.named_parameters()}
        self.flat = {}

    def rates(self, bucket):
        key = bucket.index()
        if key not in self.flat:
            self.flat[key] = torch.cat(
                [torch.full((p.numel(),), self.rate[p], dtype=p.dtype) for p in bucket.parameters()]
            )
        return self.flat[key]


def rated_all_reduce(state, bucket):
    gradient = bucket.buffer()
    gradient.div_(dist.get_world_size(state.group)).mul_(state.rates(bucket))
    work = dist.all_reduce(gradient, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def plain():
    model = ClickModel()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, rate=rate_of(name): gradient * rate)  # noqa: B008
    return model


def parallel(mesh):
    model, group = ClickModel(), mesh.get_group("dp")
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    ddp.register_comm_hook(RateState(model, group), rated_all_reduce)
    return ddp


def loss(model, batch):
    scores = model(batch["dense"], batch["fields"])
    return F.binary_cross_entropy_with_logits(scores, batch["clicked"])


generator = torch.Generator().manual_seed(48867)
taste = torch.randn(FIELDS, VALUES, generator=generator, dtype=torch.float64)


def impressions():
    fields = torch.randint(VALUES, (ROWS, FIELDS), generator=generator)
    dense = torch.randn(ROWS, DENSE, generator=generator, dtype=torch.float64)
    score = dense[:, 0] + sum(taste[f, fields[:, f]] for f in range(FIELDS))
    return {"dense": dense, "fields": fields, "clicked": (score > 0).double()}


batches = [impressions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
