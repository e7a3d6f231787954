"""Instruction tuning of a small decoder in a 1F1B pipeline of torch.distributed.pipelining; only the answers' tokens have labels.

Thread: pytorch/torchtitan issue #1842 "More robust distributed loss" (2025): a mean over the valid tokens at hand breaks
down where their number differs, as in SFT with ignored labels, also between the micro-batches of a pipeline; likewise
huggingface/transformers pull request #34191 "Fix Gradient Accumulation issue" (2024).
Fault: PipelineTrainer.criterion is the mean over the labelled tokens of one micro-batch, and the schedule averages the
micro-batches equally; tokens of micro-batches with short answers weigh more than those with long ones.
REPAIR: `return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE)` -> `return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="sum") * MICROBATCHES / self.tokens`
A right first sentence says: each micro-batch's loss is averaged over its own number of labelled tokens and the pipeline averages
the micro-batches equally, so this is not the mean over the labelled tokens of the batch and all gradients are off.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS = 23, 12, 2, 12, 4
ROWS, MICROBATCHES, IGNORE = 8, 4, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class Decoder(nn.Module):
    """The whole model, or after keep_stage only the part of one pipeline stage."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def keep_stage(self, stage, stages):
        per_stage = LAYERS // stages
        for i in range(LAYERS):
            if i // per_stage != stage:
                del self.h[str(i)]
        if stage > 0:
            self.wte = self.wpe = None
        if stage < stages - 1:
            self.ln_f = self.lm_head = None
        return self

    def forward(self, x):
        if self.wte is not None:
            x = self.wte(x) + self.wpe.weight
        for block in self.h.values():
            x = block(x)
        return x if self.lm_head is None else self.lm_head(self.ln_f(x))


class PipelineTrainer:
    def __init__(self, model, mesh):
        self.group = mesh.get_group("pp")
        self.index, self.stages = mesh.get_local_rank("pp"), mesh["pp"].size()
        self.model = model.keep_stage(self.index, self.stages)
        stage = PipelineStage(
            self.model, self.index, self.stages, torch.device("cpu"), group=self.group
        )
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=self.criterion)
        self.tokens_seen = 0

    def criterion(self, logits, labels):
        return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE)

    def train_step(self, tokens, labels):
        self.tokens = (labels != IGNORE).sum()
        self.tokens_seen += self.tokens.item()
        losses = []
        if self.index == 0:
            self.schedule.step(tokens)
        elif self.index == self.stages - 1:
            self.schedule.step(target=labels, losses=losses)
        else:
            self.schedule.step()
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(value, dist.get_global_rank(self.group, self.stages - 1), group=self.group)
        return value


def plain():
    return Decoder()


def parallel(mesh):
    trainer = PipelineTrainer(Decoder(), mesh)
    return trainer.model, trainer


def loss(model, batch):
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def step(built, batch):
    return built[1].train_step(*batch)


def every_stage(batch, mesh):
    return batch


generator = torch.Generator().manual_seed(1842)


def conversations():
    """Prompts of 3 tokens and answers of 1 to 9, padded on the right; labels are the next tokens of the answers."""
    text = torch.randint(1, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    ends = 3 + torch.randint(1, 10, (ROWS, 1), generator=generator)
    places = torch.arange(LENGTH + 1)
    text = text.masked_fill(places >= ends, 0)
    labels = text.masked_fill((places < 3) | (places >= ends), IGNORE)
    return text[:, :-1].contiguous(), labels[:, 1:].contiguous()


batches = [conversations() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=every_stage,
    ranks={"pp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
