"""A small language model under DDP whose text domains are reweighted by their excess loss over a reference (DoReMi).

Thread: sangmichaelxie/doremi issue #8 "question about only updating the domain weights on process 0" (2023): they are a
buffer and DDP is to bring them to the others; an asker's other ranks never got them. The trainer turns that off by
itself: huggingface/transformers, ddp_broadcast_buffers "will default to False if gradient checkpointing is used" (PR
#45519).
Fault: only rank 0 updates the buffer domain_weights and Trainer makes DDP with broadcast_buffers=False, so rank 1
weights its rows by the uniform weights of the start.
REPAIR: `DistributedDataParallel(model, broadcast_buffers=False)` -> `DistributedDataParallel(model)`
A right first sentence says: the buffer domain_weights is updated on rank 0 only and DDP doesn't broadcast buffers, so
rank 1 goes on with the initial domain weights; from the second step on the losses and all gradients are off.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, WIDTH, LENGTH, ROWS, DOMAINS, LAYERS = 24, 14, 10, 12, 3, 2
REWEIGHT_ETA, SMOOTHING = 1.0, 0.05


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(self.gru(self.norm(x))[0])


class DomainReweightedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("domain_weights", torch.full((DOMAINS,), 1 / DOMAINS))
        self.register_buffer("excess", torch.zeros(DOMAINS))

    @torch.no_grad()
    def update_weights(self):
        """An exponentiated gradient step on the domains, by the excess losses of the step before."""
        weights = (self.domain_weights.log() + REWEIGHT_ETA * self.excess).softmax(0)
        self.domain_weights[:] = (1 - SMOOTHING) * weights + SMOOTHING / DOMAINS

    def forward(self, tokens, domains):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        return losses, self.domain_weights[domains]


@torch.no_grad()
def excess_by_domain(losses, batch):
    """Sums of the clipped excess losses and numbers of tokens, for each domain."""
    excess = (losses - batch["reference"]).clamp(min=0)
    members = F.one_hot(batch["domains"], DOMAINS).to(excess.dtype)
    return torch.stack([members.T @ excess.sum(1), members.sum(0) * excess.size(1)])


class Trainer:
    def __init__(self, model):
        self.ddp, self.model = DistributedDataParallel(model, broadcast_buffers=False), model
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def train_step(self, batch):
        if self.rank == 0:
            self.model.update_weights()
        losses, weights = self.ddp(batch["tokens"], batch["domains"])
        normalizer = weights.sum() * losses.size(1)
        dist.all_reduce(normalizer)
        value = (losses * weights.unsqueeze(1)).sum() / normalizer * self.ranks
        value.backward()

        totals = excess_by_domain(losses, batch)
        dist.all_reduce(totals)
        self.model.excess.copy_(totals[0] / totals[1].clamp(min=1))
        value = value.detach() / self.ranks
        dist.all_reduce(value)
        return value


def plain():
    return DomainReweightedLM()


def parallel(mesh):
    trainer = Trainer(DomainReweightedLM())
    return trainer.ddp, trainer


def loss(model, batch):
    model.update_weights()
    losses, weights = model(batch["tokens"], batch["domains"])
    totals = excess_by_domain(losses, batch)
    model.excess.copy_(totals[0] / totals[1].clamp(min=1))
    return (losses * weights.unsqueeze(1)).sum() / (weights.sum() * losses.size(1))


def step(built, batch):
    return built[1].train_step(batch)


generator = torch.Generator().manual_seed(63916)


def texts():
    """The domains differ in how predictable they are, and in the reference model's losses."""
    domains = torch.randint(0, DOMAINS, (ROWS,), generator=generator)
    start = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    noise = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    noisy = torch.rand(ROWS, LENGTH + 1, generator=generator) < 0.3 * domains.unsqueeze(1)
    tokens = (start + 3 * torch.arange(LENGTH + 1) + noise * noisy) % VOCAB
    reference = (
        torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)
        + 0.5
        + domains.unsqueeze(1)
    )
    return {"tokens": tokens, "domains": domains, "reference": reference}


batches = [texts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
