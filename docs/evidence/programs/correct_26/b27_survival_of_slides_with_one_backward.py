"""Survival from slides: bags of any size go through DDP one by one, one Cox loss over the bags of both ranks goes back.

Thread: clemsgrs/hipt pull request #19 "add cox-based survival training via prediction accumulation" (2026): "Standard
gradient accumulation can't form a Cox risk set (each microbatch is one patient), so this accumulates graph-connected
risk scalars across N single-bag forwards, computes one Cox loss over the window, and backprops once."
What could be accused: DDP's forward is called five or six times before its only backward, both ranks compute the same
loss of all gathered risks, so that each risk's gradient is summed over two equal losses, the ranks have a different
number of patients, and risks that fill up are gathered and thrown away; but DDP divides by two what the gather's
backward has doubled, whatever the number of patients on a rank.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, WIDTH, PATIENTS, SHARES, MOST_TILES = 9, 12, 11, (6, 5), 7


class AttentionPooling(nn.Module):
    """Gated attention over the tiles of a slide."""

    def __init__(self):
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.weight = nn.Linear(8, 1, bias=False)

    def forward(self, tiles):
        scores = self.weight(torch.tanh(self.value(tiles)) * torch.sigmoid(self.gate(tiles)))
        return (scores.softmax(0) * tiles).sum(0)


class SlideNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tiles = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.pooling, self.risk = AttentionPooling(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, bag):
        return self.risk(self.pooling(self.tiles(bag)))


def cox_loss(risks, time, event):
    """The negative partial log-likelihood, ties after Breslow."""
    at_risk = time.unsqueeze(0) >= time.unsqueeze(1)
    log_sum = risks.expand(len(risks), -1).masked_fill(~at_risk, -torch.inf).logsumexp(1)
    return ((log_sum - risks) * event).sum() / event.sum()


class RiskWindow:
    """Collects the risks of single-bag forwards, with their graphs."""

    def __init__(self, model, group):
        self.model, self.group, self.size = model, group, max(SHARES)

    def accumulate(self, batch):
        bags = zip(batch["tiles"], batch["count"].tolist())
        return torch.cat([self.model(tiles[:count]) for tiles, count in bags])

    def everyones(self, own, rows):
        padded = torch.cat([own, own.new_zeros(self.size - len(own))])
        parts = all_gather(padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, rows)])

    def step(self, batch):
        rows = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(rows, len(batch["time"]), group=self.group)
        risks = self.everyones(self.accumulate(batch), rows)
        with torch.no_grad():
            time, event = (self.everyones(batch[name], rows) for name in ("time", "event"))
        value = cox_loss(risks, time, event)
        value.backward()
        return value.detach()


def plain():
    return SlideNet()


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(SlideNet(), process_group=group)
    return model, RiskWindow(model, group)


def split(batch, mesh):
    rank = mesh.get_local_rank("dp")
    return {name: tensor.split(SHARES)[rank] for name, tensor in batch.items()}


def loss(model, batch):
    risks = torch.cat([model(t[:n]) for t, n in zip(batch["tiles"], batch["count"].tolist())])
    return cox_loss(risks, batch["time"], batch["event"])


def step(built, batch):
    return built[1].step(batch)


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


generator = torch.Generator().manual_seed(19)


def patients():
    tiles = torch.randn(PATIENTS, MOST_TILES, FEATURES, generator=generator)
    event = torch.rand(PATIENTS, generator=generator) < 0.6
    event[0] = True
    return {
        "tiles": tiles,
        "count": torch.randint(1, MOST_TILES + 1, (PATIENTS,), generator=generator),
        "time": torch.randint(1, 9, (PATIENTS,), generator=generator).double(),
        "event": event.double(),
    }


batches = [patients() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2},
    clip=clip,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
