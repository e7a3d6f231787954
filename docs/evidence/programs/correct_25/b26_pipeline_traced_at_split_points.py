"""A small Llama cut into pipeline stages by torch.export: every rank traces the whole model and keeps one piece of it.

Thread: pytorch/torchtitan pull request #362 "Fix 1D PP tracer test" (2024), of the time when TorchTitan had a tracer
frontend beside the manual one: pipeline_llama_tracer gives torch.distributed.pipelining.pipeline a split_spec, and the
stages are graph modules.
Correct: the graph modules keep the parameters under their names in the whole model, and each stage holds only those
that it uses. The table of the rotary embedding, a buffer of the whole model, belongs to each stage as a copy of its
own. The stages run microbatches of the shape for which they were traced; the schedule divides the sum of their
gradients by their number.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

import titanlite

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, ROWS, MICROBATCHES = 32, 16, 4, 4, 9, 12, 6


def rotary_table():
    frequencies = 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2 + 1)[:-1]
    angles = torch.outer(torch.arange(LENGTH, dtype=frequencies.dtype), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotate(x, table):
    cos, sin = table.chunk(2, dim=1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wkv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w3 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x, table):
        y = self.attention_norm(x)
        q = rotate(self.wq(y).unflatten(-1, (HEADS, -1)).transpose(1, 2), table)
        k, v = self.wkv(y).unflatten(-1, (2, 1, -1)).permute(2, 0, 3, 1, 4)
        k, v = (part.expand(-1, HEADS, -1, -1) for part in (rotate(k, table), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("freqs", rotary_table(), persistent=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.freqs)
        return self.output(self.norm(x))


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, mesh):
        group, rank = mesh.get_group(), mesh.get_local_rank()
        example = torch.zeros(ROWS // MICROBATCHES, LENGTH, dtype=torch.long)
        split = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 3)}
        pipe = pipeline(Transformer(), mb_args=(example,), split_spec=split)
        assert pipe.num_stages == mesh.size()
        stage = pipe.build_stage(rank, torch.device("cpu"), group)
        self.module = stage.submod
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=token_loss)
        self.first, self.last = stage.is_first, stage.is_last
        self.group = group

    def step(self, batch):
        tokens, targets = batch
        losses = []
        inputs = (tokens,) if self.first else ()
        self.schedule.step(*inputs, target=targets if self.last else None, losses=losses)
        value = torch.stack(losses).mean().detach() if self.last else torch.zeros(())
        dist.all_reduce(value, group=self.group)
        return value


def plain():
    return Transformer()


def parallel(mesh):
    trainer = Trainer(mesh["pp"])
    return trainer.module, trainer


def loss(model, batch):
    tokens, targets = batch
    return token_loss(model(tokens), targets)


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(362)


def texts():
    words = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


batches = [texts() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
