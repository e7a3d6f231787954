"""Code search: questions and snippets are embedded by an encoder in two pipeline stages, with negatives of all
replicas.

Thread: HobbitLong/SupContrast issue #36 "Questions about DataParallel" (2020): is the contrastive loss computed "in
the batch m (with more negative samples) or the small parts n (with less negative samples)"; microsoft/UniCL issue #5
(2022) asks the same of the ranks, in a loss without a gather.
Fault: the contrastive loss is the loss_fn of a GPipe schedule with four microbatches, so that the pairs of a
microbatch have those of the same microbatch as negatives (of both replicas, as it should be) and not those of the
whole batch.
REPAIR: `ScheduleGPipe(stage, MICROBATCHES, loss_fn=` -> `ScheduleGPipe(stage, 1, loss_fn=`
A right first sentence says: the contrastive loss is computed for each of the pipeline's four microbatches alone, so
that negatives of the other microbatches are missing; it must be computed once for the whole batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import titanlite

VOCABULARY, LENGTH, WIDTH, HEADS, PAIRS, STAGES = 30, 6, 16, 2, 16, 2
TEMPERATURE, MICROBATCHES = 0.2, 4


class GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        y = F.scaled_dot_product_attention(*(part.transpose(-3, -2) for part in (q, k, v)))
        x = x + self.out(y.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Tokens (pairs, 2, length) to embeddings (pairs, 2, width)."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.places.weight
        for layer in self.layers.values():
            x = layer(x)
        if self.projection is None:
            return x
        return F.normalize(self.projection(x.mean(-2)), dim=-1)


def contrastive(embeddings, group=None):
    """Both ways; the replica's own rows against the columns of all replicas."""
    questions, snippets = embeddings.unbind(1)
    labels = torch.arange(len(questions))
    if group is None:
        every_question, every_snippet = questions, snippets
    else:
        labels = labels + dist.get_rank(group) * len(questions)
        every_question = GatherWithGradient.apply(questions, group)
        every_snippet = GatherWithGradient.apply(snippets, group)
    there = F.cross_entropy(questions @ every_snippet.T / TEMPERATURE, labels)
    back = F.cross_entropy(snippets @ every_question.T / TEMPERATURE, labels)
    return (there + back) / 2


class PipelineTrainer:
    def __init__(self, mesh):
        self.model, self.index = Encoder(), mesh.get_local_rank("pp")
        self.dp, pp = mesh.get_group("dp"), mesh.get_group("pp")
        for number in list(self.model.layers):
            if int(number) * STAGES // 4 != self.index:
                del self.model.layers[number]
        if self.index == 0:
            self.model.projection = None
        else:
            self.model.tokens = self.model.places = None
        stage = PipelineStage(self.model, self.index, STAGES, torch.device("cpu"), group=pp)
        self.schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=self.loss)

    def loss(self, embeddings, _):
        return contrastive(embeddings, self.dp)

    def mean_over_replicas(self, value):
        dist.all_reduce(value, group=self.dp)
        return value.div_(dist.get_world_size(self.dp))

    def step(self, tokens):
        losses = []
        self.schedule.step(*([tokens] if self.index == 0 else []), target=tokens, losses=losses)
        for parameter in self.model.parameters():
            self.mean_over_replicas(parameter.grad)
        return self.mean_over_replicas(torch.stack(losses).mean().detach()) if losses else None


def plain():
    return Encoder()


def parallel(mesh):
    trainer = PipelineTrainer(mesh)
    return trainer.model, trainer


def loss(model, batch):
    return contrastive(model(batch["pairs"]))


def step(built, batch):
    return built[1].step(batch["pairs"])


generator = torch.Generator().manual_seed(36)
shape = PAIRS, 2, LENGTH
batches = [{"pairs": torch.randint(VOCABULARY, shape, generator=generator)} for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"pp": 2, "dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
