"""A masked language model of protein sequences, two stages of torch.distributed.pipelining with the 1F1B schedule.

Thread: pytorch/torchtitan issue #2972 "PP and non-PP produce differently scaled gradients" (2026): the schedule goes
back from the raw sum loss; the division by the number of valid tokens comes after it and serves the metrics only.
Fault: the schedule's loss function sums over the masked residues and scale_grads is off; step divides only the losses
which the schedule has collected, after its backward passes, so gradients are as many times too large as residues count.
REPAIR: `return summed_loss(logits, labels)` -> `return summed_loss(logits, labels) / self.valid`
REPAIR: `value = torch.stack(losses).sum() / self.valid` -> `value = torch.stack(losses).sum()`
A right first sentence says: in the pipeline the loss is divided by the number of masked residues only after the
schedule's backward passes, for the report; the gradients of all parameters are those of the sum, too large by it.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import titanlite

RESIDUES, MASK, WIDTH, HEADS, LENGTH, ROWS = 21, 20, 16, 4, 12, 8
LAYERS, MICROBATCHES = 4, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.residues, self.positions = nn.Embedding(RESIDUES, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, sequence):
        return self.residues(sequence) + self.positions.weight


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, RESIDUES)

    def forward(self, x):
        return self.decoder(self.norm(F.gelu(self.dense(x))))


class ProteinLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.head = Head()

    def forward(self, x):
        if self.embeddings is not None:
            x = self.embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def summed_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def split_model(model, stage, stages):
    per_stage = LAYERS // stages
    for i in range(LAYERS):
        if i // per_stage != stage:
            del model.layers[str(i)]
    if stage > 0:
        model.embeddings = None
    if stage < stages - 1:
        model.head = None
    return model


class PipelineTrainer:
    def __init__(self, model, mesh):
        self.group, self.valid = mesh.get_group("pp"), None
        rank, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
        self.first, self.last = rank == 0, rank == stages - 1
        stage = PipelineStage(model, rank, stages, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=self.loss_fn, scale_grads=False)

    def loss_fn(self, logits, labels):
        return summed_loss(logits, labels)

    def step(self, sequences, labels):
        self.valid = (labels != -100).sum()
        value = torch.zeros(())
        arguments = (sequences,) if self.first else ()
        if self.last:
            losses = []
            self.schedule.step(*arguments, target=labels, losses=losses)
            value = torch.stack(losses).sum() / self.valid
        else:
            self.schedule.step(*arguments)
        value = value.detach().clone()
        dist.all_reduce(value, group=self.group)
        return value


def plain():
    return ProteinLM()


def parallel(mesh):
    model = split_model(ProteinLM(), mesh.get_local_rank("pp"), mesh["pp"].size())
    return model, PipelineTrainer(model, mesh)


def loss(model, batch):
    sequences, labels = batch
    return summed_loss(model(sequences), labels) / (labels != -100).sum()


def step(built, batch):
    return built[1].step(*batch)


generator = torch.Generator().manual_seed(2972)


def masked_proteins():
    residues = torch.randint(0, MASK, (ROWS, LENGTH), generator=generator)
    masked = torch.rand(ROWS, LENGTH, generator=generator) < 0.3
    return residues.masked_fill(masked, MASK), residues.masked_fill(~masked, -100)


batches = [masked_proteins() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 2},
    microbatches=MICROBATCHES,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
