"""torch's ZBV schedule: the stages go to the last rank and back, and the weights have their gradients later than the inputs.

Thread: of the kind pytorch/pytorch pull request #142084 "[pipelining] Add ZBV schedule" (2024) and pytorch/torchtitan
issue #774 "ZBVZeroBubble error" (2025), on the order of the stages that it requires.
Correct: rank 0 has the first and the last stage, rank 1 the two between. The schedule divides the gradients by the number
of microbatches, and all microbatches are of the same size. Only rank 0 has inputs, targets, and a loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, STAGES, MICROBATCHES = 12, 8, 4, 4


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
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(STAGES)})
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, x):
        if hasattr(self, "embed"):
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def cut(model, index):
    """The model with the layers of one stage only."""
    for i in range(STAGES):
        if i != index:
            del model.blocks[str(i)]
    if index != 0:
        del model.embed
    if index != STAGES - 1:
        del model.norm, model.head
    return model


def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return mean(model(batch["tokens"]), batch["targets"])


def parallel(mesh):
    rank, modules = mesh.get_local_rank("pp"), []
    state = Model().state_dict()
    for index in (rank, STAGES - 1 - rank):
        model = Model()
        model.load_state_dict(state)
        modules.append((index, cut(model, index)))
    stages = [
        PipelineStage(module, index, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
        for index, module in modules
    ]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=mean)
    return modules[0][1], modules[1][1], schedule


def step(built, batch):
    losses = []
    if dist.get_rank() == 0:
        built[2].step(batch["tokens"], target=batch["targets"], losses=losses)
    else:
        built[2].step()
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(234)


def draw():
    return torch.randint(VOCAB, (8, 5), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
