"""A policy trained by CISPO on sampled answers and by supervision on an expert's (CHORD), accumulating under FSDP2.

Thread: modelscope/ms-swift pull request #10116 "fix(rlhf): undo gradient-accumulation scaling for DAPO/CISPO/FIPO
losses" (2026): the policy loss is normalized by all tokens of the accumulation window, and the trainer divides by the
number of steps again, which is to be undone for that term alone: "multiplying the combined loss left the auxiliary
gradient at `contribution * GAS` instead of the window mean".
Fault: compute_loss multiplies the sum of the policy loss and of the expert's loss, a mean over the micro-batch, by the
number of accumulation steps, so that the expert's term counts three times as much as in one process.
REPAIR: `return loss * self.accumulation_steps` -> `return loss`; and `loss = loss.sum() / normalizer` ->
`loss = loss.sum() / normalizer * self.accumulation_steps`
A right first sentence says: Trainer.compute_loss multiplies the expert's (CHORD, supervised) loss by the accumulation
steps though it is a mean over the micro-batch, so that term is three times too large; the policy's term is right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

WORDS, WIDTH, HEADS, PROMPT, LENGTH, ROWS = 20, 16, 2, 3, 9, 12
EPSILON_HIGH, MU = 0.2, 0.3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        heads = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words) + self.positions.weight[: words.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_log_probabilities(model, words):
    logits = model(words[:, :-1])
    logs = logits.log_softmax(-1).gather(-1, words[:, 1:].unsqueeze(-1)).squeeze(-1)
    return logs[:, PROMPT - 1 :]


def per_token_losses(model, batch):
    """Of the sampled answers, by CISPO, and of the expert's, which have no padding."""
    both = torch.cat((batch["sampled"], batch["expert"]))
    logs, expert = token_log_probabilities(model, both).chunk(2)
    ratio = (logs - batch["old_logs"]).exp().detach().clamp(max=1 + EPSILON_HIGH)
    return -ratio * batch["advantage"].unsqueeze(-1) * logs * batch["mask"], -expert


class Trainer:
    def __init__(self, model, group, accumulation_steps):
        self.model, self.group, self.accumulation_steps = model, group, accumulation_steps

    def reduce(self, value, mean=False):
        value = value.detach().clone()
        dist.all_reduce(value, group=self.group)
        return value / self.group.size() if mean else value

    def compute_loss(self, batch, num_items_in_batch):
        normalizer = num_items_in_batch / self.group.size()
        loss, expert = per_token_losses(self.model, batch)
        loss = loss.sum() / normalizer
        loss = (1 - MU) * loss + MU * expert.mean()
        return loss * self.accumulation_steps

    def training_step(self, batch, num_items_in_batch):
        loss = self.compute_loss(batch, num_items_in_batch) / self.accumulation_steps
        loss.backward()
        return loss.detach()

    def train_window(self, batch):
        num_items_in_batch = self.reduce(batch["mask"].sum())
        parts = {name: value.chunk(self.accumulation_steps) for name, value in batch.items()}
        total = 0.0
        for values in zip(*parts.values(), strict=True):
            total = total + self.training_step(dict(zip(parts, values)), num_items_in_batch)
        return self.reduce(total, mean=True)


def plain():
    return Policy()


def parallel(mesh):
    model = Policy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, Trainer(model, mesh.get_group("dp"), accumulation_steps=3)


def loss(model, batch):
    sampled, expert = per_token_losses(model, batch)
    return (1 - MU) * sampled.sum() / batch["mask"].sum() + MU * expert.mean()


def step(built, batch):
    return built[1].train_window(batch)


generator = torch.Generator().manual_seed(10116)


def rollout():
    sampled, expert = torch.randint(WORDS, (2, ROWS, LENGTH), generator=generator)
    expert[:, :PROMPT] = sampled[:, :PROMPT]
    lengths = torch.randint(2, LENGTH - PROMPT + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTH - PROMPT) < lengths).double()
    noise = torch.randn(ROWS, LENGTH - PROMPT, generator=generator, dtype=torch.float64)
    reward = torch.randn(ROWS // 4, 4, generator=generator, dtype=torch.float64)
    advantage = (reward - reward.mean(1, keepdim=True)).flatten()
    data = {"sampled": sampled, "expert": expert, "mask": mask, "advantage": advantage}
    return data | {"old_logs": -3.0 + 0.3 * noise}


batches = [rollout() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
