"""`titanlite.compare` on small programs, each with one kind of wrong gradient or argument."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from titanlite.tools.verify.program.comparison import Comparer

VOCAB, DIM, LENGTH = 40, 8, 6
MASK = torch.stack([torch.full((LENGTH, DIM), -math.inf).tril(-n) for n in (1, 2)])
TOKENS = torch.randint(VOCAB, (2, 8, LENGTH), generator=torch.Generator().manual_seed(0))
BATCHES = [{"tokens": TOKENS[0], "targets": TOKENS[1]}] * 2


class Tied(nn.Module):
    """A tied embedding, and a layer that runs three times."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.embed, self.layer = fault, nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)

    def forward(self, tokens, mask):
        x, weight, own = self.embed(tokens), self.embed.weight, self.layer.weight
        for use in range(3):
            x = x + torch.tanh(linear(x, own.detach() if self.fault == "use" and use == 1 else own))
        return linear(x, weight.detach() if self.fault == "tied" else weight)


class Expert(nn.Linear):
    def forward(self, x, gate, mask):
        return super().forward(x) * gate + mask.exp().sum(0)[: x.size(1)]


class Model(nn.Module):
    """Two experts of half of the positions each, with a mask for both."""

    def __init__(self, fault="", *, is_frozen=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, scale_grad_by_freq=fault != "counts")
        self.embed.requires_grad_(not is_frozen)
        self.fault, self.body, self.head = fault, nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)
        self.experts = nn.ModuleList(Expert(DIM, DIM) for _ in range(2))

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        x = checkpoint(self.body, x, use_reentrant=True) if self.fault == "cut" else self.body(x)
        gates = x.detach().mean(-1, keepdim=True).roll(int(self.fault == "gates"), 1)
        halves = zip(self.experts, x.chunk(2, 1), gates.chunk(2, 1), strict=True)
        return self.head(torch.cat([e(own, gate, mask) for e, own, gate in halves], 1))


class Gated(nn.Module):
    """Gates, a scale, and weights by how often a token occurs; three faults, if it is odd."""

    def __init__(self, fault=""):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.fault, self.kept = fault, self.head.weight.detach().clone()

    def gates(self, scores):
        return scores.gather(-1, (scores + 1).argsort(-1))

    def scale(self, scores):
        return 2 * scores.square().mean()

    def often(self, tokens):
        return torch.bincount(tokens.flatten(), minlength=VOCAB)

    def weights(self, tokens):
        return self.often(tokens).clamp(min=1)[tokens]

    def forward(self, tokens, mask):
        scores, weights = self.embed(tokens).exp(), self.weights(tokens)[..., None].double()
        return self.head(self.gates(scores) / weights) * self.scale(scores)


class Odd(Gated):
    def gates(self, scores):
        biased = scores + 1
        return (biased if self.fault == "operand" else scores).gather(-1, biased.argsort(-1))

    def scale(self, scores):
        scores = scores.detach() if self.fault == "detach" else scores
        if self.fault == "back":
            scores = scores.detach() + (turned := scores.roll(1, 0)) - turned.detach()
        return (3 if self.fault == "number" else 2) * scores.square().mean()

    def weights(self, tokens):
        return torch.stack([self.often(tokens)]).clamp(min=1)[0][tokens]


def odd(fault):
    model = Odd(fault)
    hooks = {
        "old": lambda m, x, _: linear(*x, m.weight + (model.kept - m.weight).detach()),
        "shift": lambda m, x, y: y.where(x[0][..., None] < 9, m.weight[(x[0] + 1) % VOCAB]),
    }
    if fault in hooks:
        (model.head if fault == "old" else model.embed).register_forward_hook(hooks[fault])
    return model


def norm(model):
    return 1.0 if isinstance(model, Odd) else model.head.weight.grad.norm()


def loss(built, batch):
    model = built[0] if isinstance(built, tuple) else built
    logits = model(batch["tokens"], batch.get("mask", MASK))
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def averaged(model, batch, fault=""):
    """Averages over ranks; with a fault, of a row that the last rank has, only its part is kept."""
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        parts = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(parts, p.grad)
        p.grad = sum(parts) / 2
        if fault and p is model.embed.weight:
            p.grad = (parts[1] / 2).where(parts[1].any(-1, keepdim=True), p.grad)
    return value


def microbatches(model, batch, fault=""):
    """Two microbatches, of the mask, too; turned, with one gradient doubled; only of modules."""
    order = torch.arange(7, -1, -1) if fault == "turned" else torch.arange(8)
    parts = {name: value[order].chunk(2) for name, value in batch.items()}
    parts |= {"mask": MASK.chunk(2)} if fault == "mask" else {}
    forward = model.forward if fault == "modules" else model
    values = [loss(forward, {n: part[i] for n, part in parts.items()}) / 2 for i in range(2)]
    sum(values).backward()
    if fault == "turned":
        model.head.weight.grad *= 2
    return sum(values).detach()


def sharded(mesh):
    model = PLAIN()
    fully_shard(model.body, mesh=mesh["dp"]).set_requires_gradient_sync(False)
    return fully_shard(model, mesh=mesh["dp"])


def of_step_three(mesh):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(2.0 * (p is model.embed.weight)), **zeros}
    return model, optimizer


PLAIN, FROZEN = partial(Model, "counts"), partial(Model, is_frozen=True)
ROWS = {"split": "dp", "step": partial(averaged, fault="rows")}
FAULTS = {
    "operand": (Gated, partial(odd, "operand"), {}, r"something else is .*result of .*\(biased"),
    "number": (Gated, partial(odd, "number"), {}, "computes mul with 3, on one process 2"),
    "detach": (Gated, partial(odd, "detach"), {}, "reads the result of .*detach.* has no gradient"),
    "back": (Gated, partial(odd, "back"), {}, r"comes back to [^:]*:\d+ \(scores = scores\.det"),
    "old": (Gated, partial(odd, "old"), {}, "^head is .* of before the update of step 1"),
    "shift": (Gated, partial(odd, "shift"), {}, r"mostly gives the row of that index \+1"),
    "share": (Gated, partial(odd, "share"), {"split": "dp"}, "bincount.* only the sum over dp is"),
    "norm": (Gated, partial(odd, "norm"), {"clip": norm}, "it is 1 in every step, whatever"),
    "tied": (Tied, lambda: Tied("tied"), {}, r"embed\.w.* that of use 2 of 2, .*\(ret.* missing"),
    "use": (Tied, lambda: Tied("use"), {}, r"layer\.weight.* wrong.* that of use 2 of 3 is miss"),
    "cut": (FROZEN, lambda: FROZEN("cut"), {}, "output of body is in a reentrant checkpoint, on"),
    "counts": (Model, PLAIN, {}, r"too large by a factor of their own.* is in \['tokens'\]"),
    "gates": (Model, lambda: Model("gates"), {}, "gate of experts.0.* are right for experts.1 on"),
    "modules": (
        Model,
        lambda: Model("gates"),
        {"step": partial(microbatches, fault="modules")},
        "^the input gate of experts.0 is the first",
    ),
    "rows": (PLAIN, PLAIN, ROWS, "In these rows the part of rank 0 is missing"),
    "mask": (Model, Model, {"step": partial(microbatches, fault="mask")}, r"is \[1, 6, 8\], \[2"),
    "turned": (Model, Model, {"step": partial(microbatches, fault="turned")}, "^the gradient of h"),
    "sync": (PLAIN, sharded, {"split": "dp"}, r"body\.weight\) are missing .*_sync\(True\)"),
    "Adam": (
        Tied,
        of_step_three,
        {"step": microbatches},
        "update of embed.weight .* correction of step 3: see",
    ),
}
GIVEN = {"batches": BATCHES, "loss": loss, "ranks": {"dp": 2}}
OFTEN = ("tied", "rows", "modules", "turned")


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in FAULTS]
)
def test_the_kind_of_fault_is_named(comparer, name):
    reference, parallel, options, cause = FAULTS[name]
    found = comparer.compare(reference, parallel, **GIVEN, **options)
    assert re.search(cause, found.cause), "\n".join(found.findings)


class Shy(Tied):
    """Wrong only where nobody looks."""

    def forward(self, tokens, mask):
        return super().forward(tokens, mask) * (1.0 if self.layer._forward_hooks else 2.0)


def test_what_differs_only_unwatched_differs(comparer):
    # The layer's hooks are those of the record: it is never called itself.
    found = comparer.compare(Tied, Shy, **GIVEN)
    assert not found.agrees
    assert any("the difference is gone" in note for note in found.notes)


def penalized(model, batch, scale=0.1):
    return loss(model, batch) + scale * model.embed.weight.square().mean()


@pytest.mark.parametrize(
    ("parallel_loss", "cause"),
    [
        (partial(penalized, scale=0.05), r"of its 2 terms, that of .*square.* alone is 0.5 times"),
        (loss, r"A term of one process is missing: .*square\(\)\.mean\(\)"),
    ],
)
def test_the_wrong_term_of_a_loss_is_named(comparer, parallel_loss, cause):
    given = GIVEN | {"loss": penalized, "parallel_loss": parallel_loss}
    found = comparer.compare(Tied, Tied, **given)
    assert re.search(cause, found.cause, re.IGNORECASE), "\n".join(found.findings)


def next_tokens(model, batch):
    logits, labels = model(batch["tokens"], MASK), batch["targets"]
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def cut_with_next_labels(batch, mesh):
    """The labels of the next tokens, cut as the tokens are."""
    place = mesh.get_local_rank("dp")
    labels = torch.cat([batch["targets"][:, 1:], torch.full((8, 1), -100)], 1)
    return {"tokens": batch["tokens"].chunk(2, 1)[place], "targets": labels.chunk(2, 1)[place]}


def test_labels_that_are_shifted_twice_are_named(comparer):
    given = GIVEN | {"loss": next_tokens, "split": cut_with_next_labels}
    found = comparer.compare(Tied, Tied, **given)
    assert "1 further on than this rank's. Is it shifted twice" in found.cause, found.findings


@pytest.mark.parametrize("options", [{"split": "dp", "step": averaged}, {"step": microbatches}])
def test_without_a_fault_it_agrees(comparer, options):
    comparer.compare(PLAIN, PLAIN, **GIVEN, **options).check()
