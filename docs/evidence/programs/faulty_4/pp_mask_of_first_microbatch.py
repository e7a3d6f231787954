"""A block causal mask is made for the whole batch before the pipeline cuts it into microbatches.

Thread: https://github.com/pytorch/torchtitan/issues/1723 "PP microbatching + block-causal FlexAttention
composability issue", 2025-09-18.
Wrong: every microbatch of one sequence uses the first rows of the batch's mask, which are the mask of the
first microbatch.
EXPECT: the output of layers.0.attention is the first that differs, its input agrees; the first microbatch
(the first sequence) agrees, the others are masked by the first one's document mask.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, BATCH, EOS = 12, 10, 8, 4, 0


class Attention(nn.Module):
    mask = None

    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def init_attention_mask(self, tokens):
        document = (tokens == EOS).cumsum(-1)
        causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        self.mask = causal & (document[:, :, None] == document[:, None])

    def forward(self, x):
        q, k, v = self.wqkv(x).chunk(3, -1)
        scores = q @ k.mT / DIM**0.5
        scores = scores.masked_fill(~self.mask[: len(x)], float("-inf"))
        return self.wo(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.output = nn.Linear(DIM, VOCAB)

    def init_attention_mask(self, tokens):
        for layer in self.layers.values():
            layer.attention.init_attention_mask(tokens)

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x) if self.output else x


def cross_entropy_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    model.init_attention_mask(batch["tokens"])
    return cross_entropy_loss(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    model, index = Transformer(), mesh.get_local_rank("pp")
    del model.layers[str(1 - index)]
    if index == 0:
        model.output = None
    else:
        model.tok_embeddings = None
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    model.init_attention_mask(torch.ones(1, SEQ, dtype=torch.long))
    return model, ScheduleGPipe(stage, BATCH, loss_fn=cross_entropy_loss)


def step(built, batch):
    model, schedule = built
    model.init_attention_mask(batch["tokens"])
    losses = []
    schedule.step(
        *([batch["tokens"]] if dist.get_rank() == 0 else []), target=batch["labels"], losses=losses
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
