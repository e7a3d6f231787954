"""Experts with a capacity under data parallelism: which tokens are dropped depends on the tokens of the ranks before.

Thread: of the kind microsoft/Tutel issue #173 "Is simple_all_reduce also required for capacity_factor > 0 cases?" (2022) and
AI-Hypercomputer/maxtext pull request #833 "Add dropping strategy" (2024).
Correct: the capacity is that of the whole batch, and a token's place in its expert's queue counts the tokens of the same
expert on the ranks before. So the ranks keep different numbers of tokens per expert, and the last ones drop more. The balance
loss multiplies the whole batch's counts by the own probabilities, and DDP's mean makes that the whole batch's product.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, one_hot
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, EXPERTS, FACTOR, BALANCE = 16, 8, 4, 0.75, 0.05


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Switch(nn.Module):
    """Each token goes to one expert, unless that has its fill; then the layer gives zero for it."""

    def __init__(self, group):
        super().__init__()
        self.group, self.router = group, nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def counts(self, chosen):
        """The experts' tokens on the ranks before this one, and on all ranks."""
        own = chosen.sum(0)
        if self.group is None:
            return torch.zeros_like(own), own
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        return sum(parts[: dist.get_rank(self.group)], torch.zeros_like(own)), sum(parts)

    def forward(self, x):
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(-1)
        gate, choice = probabilities.max(-1)
        chosen = one_hot(choice, EXPERTS)
        before, total = self.counts(chosen)
        place = ((chosen.cumsum(0) - 1 + before) * chosen).sum(-1)
        kept = place < int(FACTOR * total.sum() / EXPERTS)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mine = ((choice == e) & kept).nonzero()[:, 0]
            out = out.index_add(0, mine, gate[mine, None] * expert(flat[mine]))
        balance = EXPERTS * (total / total.sum() * probabilities.mean(0)).sum()
        return out.view_as(x), balance


class Model(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.layers = nn.ModuleList(Switch(group) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x, balance = self.embed(tokens), 0.0
        for norm, layer in zip(self.norms, self.layers):
            past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
            y, term = layer(norm(x + past))
            x, balance = x + y, balance + term
        return self.head(x), balance


def loss(model, batch):
    logits, balance = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) + BALANCE * balance


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(Model(group), process_group=group)


generator = torch.Generator().manual_seed(140)


def draw():
    return torch.randint(VOCAB, (6, 8), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 3}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
