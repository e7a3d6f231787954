"""A tied embedding on the first and the last pipeline stage: the gradients of the copies are averaged.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/299 "[Question]: Anyone help explain what it's for
_EMBEDDING_GROUP?" (the gradients of both copies have to be all-reduced), 2023-03-27.
Wrong: the two copies hold different terms of one gradient, which have to be added. The all-reduce over the
embedding group averages, as for replicas of data parallelism.
EXPECT: the gradient of embed.weight is 0.5 = 1/pp times the reference's on both stages (averaged instead of
summed over pp). All other gradients of step 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy, linear

import titanlite

VOCAB, DIM = 12, 10


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
        self.stages = stages
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Mlp() for i in stages})

    def forward(self, x):
        if 0 in self.stages:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return linear(x, self.embed.weight) if 1 in self.stages else x


def loss_func(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return loss_func(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    whole, index = GPT(), mesh.get_local_rank("pp")
    part = GPT([index])
    part.load_state_dict({n: t for n, t in whole.state_dict().items() if n in part.state_dict()})
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return part, ScheduleGPipe(stage, 2, loss_fn=loss_func), mesh.get_group("pp")


def allreduce_embedding_grads(model, embedding_group):
    grad = model.embed.weight.grad
    dist.all_reduce(grad, group=embedding_group)
    grad /= embedding_group.size()


def step(built, batch):
    model, schedule, group = built
    losses, inputs = [], [batch["tokens"]] if group.rank() == 0 else []
    schedule.step(*inputs, target=batch["labels"], losses=losses)
    allreduce_embedding_grads(model, group)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(299)
batches = [
    {n: torch.randint(VOCAB, (4, 6), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
