"""A block causal mask that every stage gives to the schedule, which cuts it into microbatches.

Thread: https://github.com/pytorch/pytorch/pull/164111 "[PP] Let PP split BlockMask into micro-BlockMask",
2025-09-29.
Right: the mask has the batch in dimension 0 and goes through the schedule as a keyword argument, so each
microbatch has its own rows.
Must not be accused: an argument of the stages that the plain model makes itself.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, BATCH, EOS = 12, 10, 8, 4, 0


def attention_mask(tokens):
    document = (tokens == EOS).cumsum(-1)
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    return causal & (document[:, :, None] == document[:, None])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, mask):
        q, k, v = self.wqkv(x).chunk(3, -1)
        scores = q @ k.mT / DIM**0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        return self.wo(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()

    def forward(self, x, mask):
        return x + self.attention(self.norm(x), mask)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, x, mask):
        x = self.tok_embeddings(x) if self.tok_embeddings else x
        for layer in self.layers.values():
            x = layer(x, mask)
        return self.output(x) if self.output else x


def cross_entropy_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    logits = model(batch["tokens"], attention_mask(batch["tokens"]))
    return cross_entropy_loss(logits, batch["labels"])


def parallel(mesh):
    model, index = Transformer(), mesh.get_local_rank("pp")
    del model.layers[str(1 - index)]
    if index == 0:
        model.output = None
    else:
        model.tok_embeddings = None
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return model, ScheduleGPipe(stage, BATCH, loss_fn=cross_entropy_loss)


def step(built, batch):
    _, schedule = built
    losses = []
    schedule.step(
        *([batch["tokens"]] if dist.get_rank() == 0 else []),
        mask=attention_mask(batch["tokens"]),
        target=batch["labels"],
        losses=losses,
    )
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(1723)
batches = [
    {n: torch.randint(5, (BATCH, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
