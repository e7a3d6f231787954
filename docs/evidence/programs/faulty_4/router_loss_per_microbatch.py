"""Gradient accumulation under DDP: the token loss is divided for the whole step, the router's z-loss is not.

Thread: https://github.com/modelscope/ms-swift/pull/5823 "[bugfix] Fix aux loss & (gradient_accumulation_steps &
loss_scale)", 2025-09-15.
Wrong: the language-model loss of a microbatch is a sum divided by num_items_in_batch; the auxiliary loss is a
mean of the microbatch and is added in full each time, so it counts accumulation (2) times.
EXPECT: the auxiliary loss (router z-loss) is summed over the microbatches instead of averaged: its part of the
loss and of the gradients (router.weight and all before it) is 2 times, the number of microbatches, too large.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, EXPERTS, ACCUMULATION, AUX_COEF = 14, 10, 3, 2, 0.1


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, DIM) * 0.3)

    def forward(self, x):
        logits = self.router(x)
        h = torch.relu(torch.einsum("bsd,edh->bseh", x, self.up))
        out = torch.einsum("bseh,ehd,bse->bsd", h, self.down, logits.softmax(-1))
        return out, logits.logsumexp(-1).square().mean()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe, self.lm_head = MoE(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        out, aux_loss = self.moe(self.norm(x))
        return self.lm_head(x + out), aux_loss


def compute_loss(model, batch, num_items_in_batch):
    logits, aux_loss = model(batch["tokens"])
    loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return loss / num_items_in_batch + AUX_COEF * aux_loss


def loss(model, batch):
    return compute_loss(model, batch, batch["labels"].numel())


def parallel(mesh):
    return DistributedDataParallel(Model(), process_group=mesh.get_group("dp"))


def step(model, batch):
    parts = {n: t.chunk(ACCUMULATION) for n, t in batch.items()}
    num_items, total = batch["labels"].numel(), 0.0
    for i in range(ACCUMULATION):
        micro = {n: t[i] for n, t in parts.items()}
        model.require_backward_grad_sync = i == ACCUMULATION - 1
        value = compute_loss(model, micro, num_items)
        value.backward()
        total = total + value.detach()
    return total


generator = torch.Generator().manual_seed(5823)
batches = [
    {n: torch.randint(VOCAB, (8, 5), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
