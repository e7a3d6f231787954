"""A pipeline that runs the backward passes from the last microbatch to the first and sends the gradients at the end.

Thread: https://github.com/pytorch/pytorch/issues/139404 "[pipelining] stage only stores most recent backward result",
2024-10-31.
Right: a stage keeps the gradient of its input per microbatch. Both stages take the microbatches in the opposite order
of the forward pass, and the gradients are sent after all backward passes of the stage.
Must not be accused: another order of microbatches in backward than in forward, and gradients sent late.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, MICROBATCHES = 12, 8, 6, 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, stages=(0, 1)):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if 0 in stages else None
        self.blocks = nn.ModuleDict({str(i): Mlp() for i in stages})
        self.head = nn.Linear(DIM, VOCAB) if 1 in stages else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Stage:
    def __init__(self, module):
        self.module = module
        self.inputs, self.outputs = {}, {}
        self.grad_input = {}

    def forward_one(self, i, x):
        self.inputs[i] = x
        self.outputs[i] = self.module(x)
        return self.outputs[i]

    def backward_one(self, i, grad=None):
        self.outputs.pop(i).backward(grad)
        self.grad_input[i] = self.inputs.pop(i).grad


def loss_func(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return loss_func(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    whole, index = GPT(), mesh.get_local_rank("pp")
    part = GPT([index])
    part.load_state_dict({n: t for n, t in whole.state_dict().items() if n in part.state_dict()})
    return part, Stage(part)


def step(built, batch):
    stage, rank = built[1], dist.get_rank()
    tokens, labels = (batch[n].chunk(MICROBATCHES) for n in ("tokens", "labels"))
    buffer = torch.empty(*tokens[0].shape, DIM)
    if rank == 0:
        for i, x in enumerate(tokens):
            dist.send(stage.forward_one(i, x).detach(), 1)
        for i in reversed(range(MICROBATCHES)):
            dist.recv(buffer, 1)
            stage.outputs.pop(i).backward(buffer)
        return None
    losses = []
    for i in range(MICROBATCHES):
        dist.recv(buffer, 0)
        logits = stage.forward_one(i, buffer.clone().requires_grad_())
        stage.outputs[i] = loss_func(logits, labels[i]) / MICROBATCHES
        losses.append(stage.outputs[i].detach())
    for i in reversed(range(MICROBATCHES)):
        stage.backward_one(i)
    for i in reversed(range(MICROBATCHES)):
        dist.send(stage.grad_input.pop(i), 0)
    return sum(losses)


generator = torch.Generator().manual_seed(139404)
batches = [
    {n: torch.randint(VOCAB, (8, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
