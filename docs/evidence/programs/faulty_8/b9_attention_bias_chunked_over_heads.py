"""torch.distributed.pipelining with an attention bias as keyword argument: the schedule cuts it along its heads.

Thread: pytorch/torchtitan issue #1723 "PP microbatching + block-causal FlexAttention composability issue" (2025), and
pytorch/pytorch pull request #164111 (2025): a schedule splits every tensor argument along dimension 0.
Wrong: bias has the shape (heads, tokens, tokens), without a batch dimension. The schedule takes dimension 0 for the
batch: microbatch 0 gets the bias of head 0, microbatch 1 that of head 1, and it is broadcast over both heads.
PLACE: blocks.0.attention, forward pass (stage 0), all microbatches; then all behind it
KIND: keyword argument without batch dimension split into microbatches along its heads
REPAIR: `bias=batch["bias"]` -> `bias=batch["bias"].expand(len(batch["tokens"]), -1, -1, -1)`
EXPECT: in the forward pass, blocks.0.attention is the first module whose output differs (its qkv agrees): it gets a
wrong bias, (1, 6, 6) in place of (2, 6, 6): the schedule chunks the keyword argument bias along dimension 0, the heads,
as if it were the batch. Replicate it over the microbatches, or give it a batch dimension.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HEADS, LENGTH, LAYERS = 16, 8, 2, 6, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x, bias):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, bias):
        x = x + self.attention(self.norm1(x), bias)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    """The whole model, or with `mine` a stage of it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, x, bias):
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x, bias)
        return self.head(x)

    def stage(self, index, stages):
        for i in range(LAYERS):
            if i * stages // LAYERS != index:
                del self.blocks[str(i)]
        self.embed = self.embed if index == 0 else nn.Identity()
        self.head = self.head if index == stages - 1 else nn.Identity()
        return self


def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return mean(model(batch["tokens"], batch["bias"]), batch["targets"])


def parallel(mesh):
    index = mesh.get_local_rank("pp")
    module = Model().stage(index, 2)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, ScheduleGPipe(stage, 2, loss_fn=mean)


def step(built, batch):
    losses = []
    inputs = [batch["tokens"]] if dist.get_rank() == 0 else []
    built[1].step(*inputs, target=batch["targets"], losses=losses, bias=batch["bias"])
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(108)


def draw():
    """Tokens, targets, and the causal bias that falls with the distance, at another rate in each head."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    bias = -torch.tensor([0.1, 1.5])[:, None, None] * distance
    tokens, targets = torch.randint(VOCAB, (2, 4, LENGTH), generator=generator)
    return {
        "tokens": tokens,
        "targets": targets,
        "bias": bias.masked_fill(distance < 0, float("-inf")),
    }


batches = [draw() for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
