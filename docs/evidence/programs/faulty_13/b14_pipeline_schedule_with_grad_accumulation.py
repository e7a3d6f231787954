"""A small decoder split over two pipeline stages, trained with torch's GPipe schedule and gradient accumulation.

Thread: pytorch/torchtitan pull request #1732 "fix: pp grad accumulation is broken" (2025). The pipeline schedule divides every
gradient by its number of microbatches at the end of each of its steps, also those of earlier accumulation steps; loss curves
and gradient norms with accumulation departed from the run without pipelining.
Fault: in build_schedule, the schedule keeps the default scale_grads=True although Trainer.train_step calls it several times
before the optimizer steps. What the first calls left in .grad is divided again by each later call.
REPAIR: `ScheduleGPipe(stage, n_microbatches, loss_fn=Rescaled(token_loss, accumulation_steps))` ->
`ScheduleGPipe(stage, n_microbatches, loss_fn=Rescaled(token_loss, accumulation_steps * n_microbatches), scale_grads=False)`
A right first sentence says: the GPipe schedule is built with scale_grads=True, so each schedule.step() divides the already
accumulated gradients of all stage parameters by the number of microbatches again, and earlier accumulation steps count too
little.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import titanlite

VOCAB, DIM, HEADS, LAYERS, SEQ = 32, 16, 2, 4, 6
ACCUMULATION_STEPS = 3
MICROBATCHES = 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.wqkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.w1 = nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    """Stages of a pipeline are copies of it with the parts of other stages taken out."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x):
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def token_loss(pred, labels):
    return F.cross_entropy(pred.flatten(0, 1), labels.flatten())


class Rescaled:
    def __init__(self, loss_fn, divisor):
        self.loss_fn, self.divisor = loss_fn, divisor

    def __call__(self, pred, labels):
        return self.loss_fn(pred, labels) / self.divisor


def split_model(model, stage_index, num_stages):
    first, last = stage_index == 0, stage_index == num_stages - 1
    per_stage = LAYERS // num_stages
    keep = {str(i) for i in range(stage_index * per_stage, (stage_index + 1) * per_stage)}
    for name in list(model.layers):
        if name not in keep:
            del model.layers[name]
    if not first:
        model.tok_embeddings = None
    if not last:
        model.norm = None
        model.output = None
    return model


def build_schedule(stage, n_microbatches, accumulation_steps):
    return ScheduleGPipe(stage, n_microbatches, loss_fn=Rescaled(token_loss, accumulation_steps))


class Trainer:
    def __init__(self, mesh):
        group = mesh.get_group("pp")
        self.rank, self.size = mesh.get_local_rank("pp"), mesh.size()
        self.model = split_model(Transformer(), self.rank, self.size)
        stage = PipelineStage(self.model, self.rank, self.size, torch.device("cpu"), group=group)
        self.schedule = build_schedule(stage, MICROBATCHES, ACCUMULATION_STEPS)

    def forward_backward(self, tokens, labels, losses):
        if self.rank == 0:
            self.schedule.step(tokens)
        elif self.rank == self.size - 1:
            self.schedule.step(target=labels, losses=losses)
        else:
            self.schedule.step()

    def train_step(self, batch):
        losses = []
        for tokens, labels in zip(
            batch["tokens"].chunk(ACCUMULATION_STEPS), batch["labels"].chunk(ACCUMULATION_STEPS)
        ):
            micro_losses = []
            self.forward_backward(tokens, labels, micro_losses)
            losses += micro_losses
        if not losses:
            return None
        return torch.stack(losses).mean().detach() * self.schedule._loss_fn.divisor


def parallel(mesh):
    trainer = Trainer(mesh)
    return trainer.model, trainer


def step(built, batch):
    return built[1].train_step(batch)


def loss(model, batch):
    return token_loss(model(batch["tokens"]), batch["labels"])


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(11)
    for _ in range(count):
        text = torch.randint(VOCAB, (rows, SEQ + 1), generator=generator)
        yield {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


batches = list(make_batches(3, rows=2 * ACCUMULATION_STEPS * MICROBATCHES))
arguments = Transformer, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 2},
    microbatches=ACCUMULATION_STEPS * MICROBATCHES,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
