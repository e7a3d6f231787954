"""A tied embedding on two pipeline stages: its gradient is summed over pp after the reduce-scatter over dp.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/844 "[BUG] Wrong embedding gradients with distributed optimizer
and shared embedding", 2024-05-28.
Wrong: after the reduce-scatter of the gradient buffer a rank has reduced gradients in its own part only. The embedding
is first in the buffer of the first stage and last in that of the last one, so the sum over pp adds a reduced gradient
and one that is still the rank's own. It has to come before the reduce-scatter.
EXPECT: the gradient of embed.weight (head.weight on stage 1) differs on both stages, and differently on each: the
tied copies' gradients are summed over pp while one of them is not yet reduced over dp (only the rank's own part of
the batch). All other gradients of step 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy, linear, pad

import titanlite

VOCAB, DIM = 12, 8


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Mlp() for i in range(2)})

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return linear(x, self.embed.weight)


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        self.embed = whole.embed if index == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(index): whole.layers[str(index)]})
        self.head = nn.Linear(DIM, VOCAB, bias=False) if index == 1 else nn.Identity()
        if index == 1:
            self.head.weight = whole.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def loss_func(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return loss_func(model(batch["tokens"]), batch["labels"])


class GradBuffer:
    def __init__(self, module, group):
        self.parameters, self.group = list(module.parameters()), group

    def fill(self):
        flat = torch.cat([p.grad.flatten() for p in self.parameters]) / self.group.size()
        self.flat, start = pad(flat, (0, -len(flat) % self.group.size())), 0
        for p in self.parameters:
            p.grad = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        self.shard = self.flat.chunk(self.group.size())[self.group.rank()]

    def reduce_scatter(self):
        shard = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(shard, self.flat, group=self.group)
        self.shard.copy_(shard)

    def all_gather(self):
        dist.all_gather_into_tensor(self.flat, self.shard.clone(), group=self.group)


def parallel(mesh):
    index = mesh.get_local_rank("pp")
    module = Stage(GPT(), index)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    buffer = GradBuffer(module, mesh.get_group("dp"))
    return module, ScheduleGPipe(stage, 2, loss_fn=loss_func), buffer, mesh.get_group("pp")


def finalize_model_grads(module, buffer, embedding_group):
    buffer.fill()
    buffer.reduce_scatter()
    shared = module.embed if isinstance(module.embed, nn.Embedding) else module.head
    dist.all_reduce(shared.weight.grad, group=embedding_group)
    buffer.all_gather()


def step(built, batch):
    module, schedule, buffer, group = built
    losses, inputs = [], [batch["tokens"]] if group.rank() == 0 else []
    schedule.step(*inputs, target=batch["labels"], losses=losses)
    finalize_model_grads(module, buffer, group)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(844)
batches = [
    {n: torch.randint(VOCAB, (8, 6), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": 2, "dp": 2}, split="dp", step=step)
options["rename"] = {"head.weight": "embed.weight"}

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
