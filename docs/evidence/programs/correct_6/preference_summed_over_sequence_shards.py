"""DPO with sequence shards: log-probabilities are gathered, and a rank's gradient is that of its own tokens.

Thread: https://github.com/OpenRLHF/OpenRLHF/pull/439 "Add context parallel to DPO", 2024-09-17; also
https://github.com/hiyouga/LlamaFactory/pull/6506 "add Sequence Parallelism" (2025-01-02).
Right: every rank replaces its own part in the gathered sums and takes the loss of the whole answers. So the gradient
is complete for its tokens, and those of the weights are added over sp.
Must not be accused: a gather without gradient, equal losses on all ranks though their tokens differ, weight gradients
that are summed and not averaged, chosen and rejected answers in one batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid

import titanlite

VOCAB, DIM, SEQ, BETA = 12, 10, 12, 0.3


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers, self.head = nn.Sequential(Mlp(), Mlp()), nn.Linear(DIM, VOCAB)

    def forward(self, tokens, position_ids):
        return self.head(self.layers(self.embed(tokens) + self.positions(position_ids)))


def get_batch_logps(model, batch):
    logits = model(batch["tokens"], batch["position_ids"])
    mask, labels = batch["labels"] != -100, batch["labels"].clamp(min=0)
    logps = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return ((logps - batch["reference"]) * mask).sum(-1)


def preference_loss(logratios):
    chosen, rejected = logratios.chunk(2)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def loss(model, batch):
    return preference_loss(get_batch_logps(model, batch))


def parallel(mesh):
    return Model(), mesh.get_group("sp")


def step(built, batch):
    model, group = built
    own = get_batch_logps(model, batch)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.detach(), group=group)
    parts[group.rank()] = own
    value = preference_loss(torch.stack(parts).sum(0))
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
    return value.detach()


generator = torch.Generator().manual_seed(6506)


def pairs():
    tokens, labels = (torch.randint(VOCAB, (6, SEQ), generator=generator) for _ in range(2))
    labels[torch.arange(SEQ) >= torch.randint(3, SEQ + 1, (6, 1), generator=generator)] = -100
    return {
        "tokens": tokens,
        "labels": labels,
        "position_ids": torch.arange(SEQ).repeat(6, 1),
        "reference": -2.5 + 0.3 * torch.randn(6, SEQ, generator=generator),
    }


batches = [pairs() for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 3}, split={"sp": 1}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
