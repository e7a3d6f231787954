"""A GPT cut into pipeline stages: each stage keeps the final norm, not only the last.

Thread: of the kind "loss is higher with pipeline parallelism, final_layernorm in every stage" (post_process of
Megatron-LM's TransformerBlock, nanotron and torchtune stage splits, PyTorch forums on manual model splits with
PipelineStage: "set norm to None on all but the last"), 2021 to 2025.
Wrong: the first stage's module still has norm, and its forward applies what it has. So the hidden states are normalized
between the stages, which the plain model does not do.
PLACE: the end of stage 0, forward pass: norm applied after blocks.1, before blocks.2; also norm.* on rank 0 is trained
KIND: final norm applied in every stage instead of only in the last
REPAIR: `self.norm = whole.norm` -> `self.norm = whole.norm if index == 1 else nn.Identity()`
EXPECT: in the forward pass, blocks.2 (the first of stage 1) is the first module that receives a wrong input: the output
of blocks.1 agrees, and stage 0 applies norm to it before it is sent, whereas the plain model applies norm once, after
blocks.3. Rank 0 should have no norm.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LAYERS = 12, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.down(torch.relu(self.up(x + past)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        mine = range(index * LAYERS // 2, (index + 1) * LAYERS // 2)
        self.embed = whole.embed if index == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(i): whole.blocks[str(i)] for i in mine})
        self.norm = whole.norm
        self.head = whole.head if index == 1 else nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return mean(model(batch["tokens"]), batch["targets"])


def parallel(mesh):
    index = mesh.get_local_rank("pp")
    module = Stage(Model(), index)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, ScheduleGPipe(stage, 2, loss_fn=mean)


def step(built, batch):
    losses = []
    inputs = [batch["tokens"]] if dist.get_rank() == 0 else []
    built[1].step(*inputs, target=batch["targets"], losses=losses)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(19)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
