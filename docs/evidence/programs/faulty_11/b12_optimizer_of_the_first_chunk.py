"""An interleaved pipeline: each rank has two chunks of the model, and the optimizer is made as for one.

Thread: of the kind hpcaitech/ColossalAI pull request #72 "add interleaved pipeline (#71)" (2021): "Model must be a
torch.nn.Module. And If not, users cannot call model.parameters() directly when initializing optimizer."
Fault: in parallel, the optimizer gets the parameters of the rank's first chunk only.
REPAIR: `list(chunks[0].parameters())` -> `[p for chunk in chunks for p in chunk.parameters()]`
A right first sentence says: step 1's loss and gradients agree; after step 1, the weights of each rank's second chunk
(layers.2 on rank 0, layers.3, norm and head on rank 1) are unchanged: the optimizer does not have their parameters, only those
of the first chunk.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, LAYERS = 12, 8, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, DIM)
        self.w1, self.w2 = nn.Linear(DIM, 16, bias=False), nn.Linear(16, DIM, bias=False)

    def forward(self, x):
        past = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.w2(silu(self.w1(x)))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def criterion(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return criterion(model(batch["input"]), batch["labels"])


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def make_chunk(index):
    torch.manual_seed(0)
    chunk = LanguageModel()
    chunk.layers = nn.ModuleDict({str(index): chunk.layers[str(index)]})
    if index > 0:
        chunk.embed = None
    if index < LAYERS - 1:
        chunk.norm = chunk.head = None
    return chunk


def parallel(mesh):
    rank, size, group = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh.get_group("pp")
    numbers = range(rank, LAYERS, size)
    chunks = [make_chunk(i) for i in numbers]
    stages = [
        PipelineStage(chunk, i, LAYERS, torch.device("cpu"), group=group)
        for chunk, i in zip(chunks, numbers)
    ]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=criterion)
    optimizer = make_optimizer(list(chunks[0].parameters()))
    return *chunks, optimizer, schedule


def step(built, batch):
    schedule = built[-1]
    if dist.get_rank() == 0:
        schedule.step(batch["input"])
        return None
    losses = []
    schedule.step(target=batch["labels"], losses=losses)
    return torch.stack(losses).mean()


rng = torch.Generator().manual_seed(405)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, 6), generator=rng)
    batches.append({"input": rows[:, :-1], "labels": rows[:, 1:]})
arguments = LanguageModel, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2}, optimizer=make_optimizer)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
