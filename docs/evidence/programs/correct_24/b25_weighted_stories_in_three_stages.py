"""A story model in three hand-written pipeline stages that free the data of what they have sent on.

Thread: NVIDIA/apex pull request #1279 "T5 pipeline parallel changes" (2022): "dealloc output.data and call C++ backward
engine directly to skip output.shape == grad.shape check".
Correct: a stage's output gets a single uninitialized number for data after it has been sent, and the gradient that comes
back doesn't fit its shape; but the last operation of a stage is an addition, whose backward pass needs no output, and
the engine checks gradients against the shape that the graph recorded. The backward passes run from the last microbatch
to the first on all stages, so gradients meet their own activations. The loss of a microbatch is a sum over the weights
of the whole batch, so nothing has to be divided by the number of microbatches. Ranks other than the last report zero
and the all-reduce hands them the sum.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, ROWS = 30, 16, 4, 10, 8
LAYERS, MICROBATCHES = 5, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class StoryModel(nn.Module):
    """The whole model, or the layers of one stage with their numbers in the whole model."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def keep_stage(self, stage, stages):
        for i in range(LAYERS):
            if i * stages // LAYERS != stage:
                del self.layers[str(i)]
        if stage > 0:
            self.words = self.positions = None
        if stage < stages - 1:
            self.norm = self.head = None
        return self

    def forward(self, x):
        if self.words is not None:
            x = self.words(x) + self.positions.weight
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def weighted_loss(logits, targets, weights):
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def deallocate_output(output):
    """The graph behind the output is needed, its data is not."""
    output.data = torch.empty((1,), dtype=output.dtype)


def custom_backward(output, grad_output):
    """Goes past torch.autograd.backward, which wouldn't take a gradient of another shape than the output."""
    Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(grad_output,),
        keep_graph=False,
        create_graph=False,
        inputs=tuple(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class Pipeline:
    def __init__(self, stage_model, mesh):
        self.model, self.group = stage_model, mesh.get_group()
        self.rank, self.stages = mesh.get_local_rank(), mesh.size()
        self.first, self.last = self.rank == 0, self.rank == self.stages - 1

    def receive(self, rows, rank):
        x = torch.empty(rows, LENGTH, WIDTH)
        dist.recv(x, group=self.group, group_src=rank)
        return x

    def forward_step(self, batch, total):
        tokens, weights = batch
        if self.first:
            x = tokens[:, :-1]
        else:
            x = self.receive(len(tokens), self.rank - 1).requires_grad_()
        output = self.model(x)
        if self.last:
            return x, weighted_loss(output, tokens[:, 1:], weights) / total
        dist.send(output.detach(), group=self.group, group_dst=self.rank + 1)
        deallocate_output(output)
        return x, output

    def backward_step(self, x, output):
        grad = torch.ones(()) if self.last else self.receive(len(x), self.rank + 1)
        custom_backward(output, grad)
        if not self.first:
            dist.send(x.grad, group=self.group, group_dst=self.rank - 1)

    def step(self, batch):
        total = batch[1].sum()
        microbatches = list(zip(*(part.chunk(MICROBATCHES) for part in batch)))
        kept = [self.forward_step(microbatch, total) for microbatch in microbatches]
        value = torch.zeros(())
        if self.last:
            value += sum(output.detach() for _, output in kept)
        while kept:
            self.backward_step(*kept.pop())
        dist.all_reduce(value, group=self.group)
        return value


def plain():
    return StoryModel()


def parallel(mesh):
    model = StoryModel().keep_stage(mesh.get_local_rank("pp"), mesh["pp"].size())
    return model, Pipeline(model, mesh["pp"])


def loss(model, batch):
    tokens, weights = batch
    return weighted_loss(model(tokens[:, :-1]), tokens[:, 1:], weights) / weights.sum()


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(1279)


def stories():
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return tokens, torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)


batches = [stories() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
