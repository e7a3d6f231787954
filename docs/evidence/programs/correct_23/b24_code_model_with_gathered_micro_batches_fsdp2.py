"""A small decoder for program code, FSDP2 with accumulation: parameters are gathered once per step (as in ZeRO-1).

Thread: pytorch/pytorch pull request #124319 "[FSDP2] Added `set_reshard_after_backward`" (2024), whose description
gives this loop: the flags for synchronization, resharding and the last backward pass are all set per micro-batch.
Correct: reshard_after_forward is off and, in all micro-batches but the last, resharding after backward and the
gradients' reduction are off too, so every backward pass but the last leaves whole parameters and unreduced gradients
behind; nothing changes the parameters in between, and the last pass reduces the sum and frees them before the
optimizer's step. Micro-batches hold unequally many tokens, but each loss is a sum over the count of all ranks and
micro-batches, and FSDP's average over the ranks is turned into a sum by the divide factor 1.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

TOKENS, PAD, WIDTH, HEADS, LENGTH, LAYERS, ROWS, MICRO_BATCHES = 32, 0, 16, 2, 10, 2, 12, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class CodeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def summed_loss(model, rows):
    logits = model(rows[:, :-1])
    return F.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
    )


class AccumulatingTrainer:
    def __init__(self, model, mesh):
        self.model, self.group = model, mesh.get_group()

    def training_step(self, rows):
        count = (rows[:, 1:] != PAD).sum()
        dist.all_reduce(count, group=self.group)
        total = torch.zeros(())
        micro_batches = rows.chunk(MICRO_BATCHES)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
            self.model.set_is_last_backward(last)
            value = summed_loss(self.model, micro_batch) / count
            value.backward()
            total += value.detach()
        dist.all_reduce(total, group=self.group)
        return total


def plain():
    return CodeModel()


def parallel(mesh):
    model = CodeModel()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(1.0)
    return model, AccumulatingTrainer(model, mesh["dp"])


def loss(model, rows):
    return summed_loss(model, rows) / (rows[:, 1:] != PAD).sum()


def step(built, rows):
    return built[1].training_step(rows)


generator = torch.Generator().manual_seed(124319)


def functions():
    rows = torch.randint(1, TOKENS, (ROWS, LENGTH + 1), generator=generator)
    lengths = torch.randint(3, LENGTH + 2, (ROWS, 1), generator=generator)
    return rows * (torch.arange(LENGTH + 1) < lengths)


batches = [functions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
