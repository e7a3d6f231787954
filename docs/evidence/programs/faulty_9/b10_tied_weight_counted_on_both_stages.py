"""A pipeline of two stages with one weight for embedding and head: the norm for clipping counts it on both stages.

Thread: deepspeedai/DeepSpeed pull request #1252 "Cleaning up tensor/pipe parallel accounting" (2021): "Pipeline
parallelism may replicate parameters. Avoid multi-counting."
Fault: in clip, the squares of all parameters of both stages are added up; the tied weight's gradient, which is summed
over the stages before, is on both and is counted twice.
REPAIR: `counted = list(stage.parameters())` -> `counted = [p for n, p in stage.named_parameters() if n != "head.weight"]`
Expected: loss and gradients before clipping agree; the gradient norm is too large, by the square of the tied weight's
gradient, and so all clipped gradients are too small by one factor: embed.weight, which is head.weight on the last stage,
is counted on both stages. Count it on one.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LENGTH, MICROBATCHES, MAX_NORM = 12, 8, 5, 2, 0.2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


class Stage(nn.Module):
    """The embedding and the first block, or the second block and the head with a copy of the tied weight."""

    def __init__(self, whole, index):
        super().__init__()
        if index == 0:
            self.embed = whole.embed
        self.blocks = nn.ModuleDict({str(index): whole.blocks[str(index)]})
        if index == 1:
            self.head = whole.head

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x

    def tied(self):
        return self.embed.weight if hasattr(self, "embed") else self.head.weight


def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return mean(model(batch["tokens"]), batch["targets"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def parallel(mesh):
    return Stage(Model(), mesh.get_local_rank("pp"))


def step(stage, batch):
    tokens, targets = batch["tokens"].chunk(MICROBATCHES), batch["targets"].chunk(MICROBATCHES)
    total = None
    if dist.get_rank() == 0:
        sent = [stage(stage.embed(part)) for part in tokens]
        for x in sent:
            dist.send(x.detach().contiguous(), 1)
        for x in sent:
            gradient = torch.empty_like(x)
            dist.recv(gradient, 1)
            x.backward(gradient)
    else:
        total, inputs = 0.0, []
        for part in tokens:
            x = torch.empty(*part.shape, DIM, dtype=stage.tied().dtype)
            dist.recv(x, 0)
            inputs.append(x.requires_grad_())
        for x, part in zip(inputs, targets):
            value = mean(stage.head(stage(x)), part) / MICROBATCHES
            value.backward()
            dist.send(x.grad, 0)
            total = total + value.detach()
    dist.all_reduce(stage.tied().grad)
    return total


def clip(stage):
    if isinstance(stage, Model):
        return nn.utils.clip_grad_norm_(stage.parameters(), MAX_NORM)
    counted = list(stage.parameters())
    total = torch.stack([p.grad.square().sum() for p in counted]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    for p in stage.parameters():
        p.grad *= (MAX_NORM / (norm + 1e-6)).clamp(max=1)
    return norm


generator = torch.Generator().manual_seed(214)


def draw():
    return torch.randint(VOCAB, (4, LENGTH), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    clip=clip,
    optimizer=make_optimizer,
    ranks={"pp": 2},
    rename={"head.weight": "embed.weight"},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
