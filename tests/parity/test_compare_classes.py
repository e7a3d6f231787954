"""`titanlite.compare` on small programs, one for each kind of wrong gradient, update or argument."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from titanlite.tools.verify.program.comparison import Comparer

VOCAB, DIM, LENGTH = 40, 8, 6
generator = torch.Generator().manual_seed(0)
TOKENS = torch.randint(VOCAB, (2, 8, LENGTH), generator=generator)
MASK = torch.stack([torch.full((LENGTH, DIM), -math.inf).tril(-n) for n in (1, 2)])
BATCHES = [{"tokens": TOKENS[0], "targets": TOKENS[1], "mask": MASK}] * 2


class Tied(nn.Module):
    """A tied embedding, and a layer that runs three times."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.embed = fault, nn.Embedding(VOCAB, DIM)
        self.layer = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        for use in range(3):
            weight, bias = self.layer[0].weight, self.layer[0].bias
            if self.fault == "use" and use == 1:
                weight, bias = weight.detach(), bias.detach()
            x = x + torch.tanh(linear(x, weight, bias))
        weight = self.embed.weight
        return linear(x, weight.detach() if self.fault == "tied" else weight)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, x, gate, mask):
        return x * self.scale * gate + mask.exp().sum(0)[: x.size(1)]


class Model(nn.Module):
    """Two experts of half of the positions each, with a mask for both."""

    def __init__(self, fault="", *, is_frozen=False):
        super().__init__()
        self.fault = fault
        self.embed = nn.Embedding(VOCAB, DIM, scale_grad_by_freq=fault != "counts")
        self.embed.requires_grad_(not is_frozen)
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)
        self.experts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        x = checkpoint(self.body, x, use_reentrant=True) if self.fault == "cut" else self.body(x)
        gates = x.detach().sigmoid().mean(-1, keepdim=True)
        gates = gates.roll(1, 1) if self.fault == "gates" else gates
        halves = zip(self.experts, x.chunk(2, 1), gates.chunk(2, 1), strict=True)
        return self.head(torch.cat([e(own, gate, mask) for e, own, gate in halves], 1))


def loss(model, batch):
    logits = model(batch["tokens"], batch["mask"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def averaged(model, batch, fault=""):
    """Averages over ranks; "rows": what the last rank has of a row is all that is kept of it."""
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        parts = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(parts, p.grad)
        p.grad = sum(parts)
        if fault == "rows" and p is model.embed.weight:
            p.grad = parts[1].where(parts[1].any(-1, keepdim=True), p.grad)
        p.grad /= 2
    return value


def microbatches(model, batch, fault=""):
    """Two microbatches; "mask": of the mask, too. "turned": in another order, and one gradient
    doubled.
    """
    order = torch.arange(7, -1, -1) if fault == "turned" else slice(None)
    parts = {n: v.chunk(2) if n != "mask" or fault == "mask" else [v, v] for n, v in batch.items()}
    parts |= {n: batch[n][order].chunk(2) for n in ("tokens", "targets")}
    total = 0.0
    for i in range(2):
        value = loss(model, {name: part[i] for name, part in parts.items()}) / 2
        value.backward()
        total = total + value.detach()
    if fault == "turned":
        model.head.weight.grad *= 2
    return total


def sharded(mesh):
    model = Model()
    fully_shard(model.body, mesh=mesh["dp"])
    model = fully_shard(model, mesh=mesh["dp"])
    model.body.set_requires_gradient_sync(False)
    return model


def of_step_three(mesh):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(2.0 * (p.ndim > 1)), **zeros}
    return model, optimizer


def by_root(mesh):
    model = Tied()
    return model, torch.optim.SGD(model.parameters(), lr=0.1 / 2**0.5)


def run(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


PLAIN = functools.partial(Model, "counts")
FROZEN = functools.partial(Model, is_frozen=True)
DP = {
    "ranks": {"dp": 2},
    "split": lambda batch, mesh: {n: part(n, v, mesh) for n, v in batch.items()},
}


def part(name, value, mesh):
    return value if name == "mask" else value.chunk(2)[mesh.get_local_rank("dp")]


def stepping(step, fault):
    return {"step": functools.partial(step, fault=fault)}


FAULTS = {
    "tied": (
        Tied,
        lambda: Tied("tied"),
        {},
        r"embed.weight, .* that of use 2 of 2, .*\(ret.* missing",
    ),
    "use": (
        Tied,
        lambda: Tied("use"),
        {},
        r"layer\.0\.bias .* wrong.* that of use 2 of 3 is missing",
    ),
    "cut": (FROZEN, lambda: FROZEN("cut"), {}, "output of body is in a reentrant checkpoint, on"),
    "counts": (Model, lambda: Model("counts"), {}, r"too large by a factor .* in \['tokens'\]"),
    "gates": (Model, lambda: Model("gates"), {}, "gate of experts.0.* are right for experts.1 on"),
    "rows": (PLAIN, PLAIN, {**DP, **stepping(averaged, "rows")}, "rows the part of rank 0 is miss"),
    "mask": (Model, Model, stepping(microbatches, "mask"), r"\[1, 6, 8\], \[2, 6, 8\] on one"),
    "turned": (Model, Model, stepping(microbatches, "turned"), "^the gradient of head.weight is 2"),
    "sync": (
        Model,
        sharded,
        DP,
        r"body.weight\) are missing .* set_requires_gradient_sync\(True\)",
    ),
    "Adam": (Tied, of_step_three, {"step": run}, "of embed.weight.* correction of step 3: see"),
    "root": (Tied, by_root, {"step": run, "optimizer": sgd}, "0.70.* the square root of the degr"),
}


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_the_kind_of_fault_is_named(comparer, name):
    reference, parallel, options, cause = FAULTS[name]
    given = {"batches": BATCHES, "loss": loss, "ranks": {"dp": 2}, **options}
    found = comparer.compare(reference, parallel, **given)
    assert re.search(cause, found.cause), "\n".join(found.findings)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (PLAIN, {**DP, "step": averaged}),
        (PLAIN, {"step": microbatches}),
        (Tied, {"step": averaged}),
    ],
)
def test_without_the_fault_it_agrees(comparer, model, options):
    given = {"batches": BATCHES, "loss": loss, "ranks": {"dp": 2}, **options}
    comparer.compare(model, model, **given).check()
