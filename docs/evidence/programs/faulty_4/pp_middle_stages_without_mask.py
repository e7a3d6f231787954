"""Four pipeline stages of which only the first and the last read a batch, and with it the attention mask.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/752 "[QUESTION] attention_mask is None in middle pipeline
stage?", 2024-03-27.
Wrong: on the stages in the middle attention_mask is None, so their layers attend to padding.
EXPECT: the output of layers.1.attention (the layer of the second stage) is the first that differs, its input
agrees: its scores are not masked. The stages 1 and 2 have no mask.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, LAYERS = 12, 10, 6, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.dense = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / DIM**0.5
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None], -10000.0)
        return self.dense(scores.softmax(-1) @ v)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()

    def forward(self, x, attention_mask):
        return x + self.attention(self.norm(x), attention_mask)


class Bert(nn.Module):
    def __init__(self, stage=None):
        super().__init__()
        first, last = stage in (None, 0), stage in (None, LAYERS - 1)
        self.embedding = nn.Embedding(VOCAB, DIM) if first else None
        layers = range(LAYERS) if stage is None else [stage]
        self.layers = nn.ModuleDict({str(i): Layer() for i in layers})
        self.head = nn.Linear(DIM, VOCAB) if last else None

    def forward(self, x, attention_mask):
        x = self.embedding(x) if self.embedding else x
        for layer in self.layers.values():
            x = layer(x, attention_mask)
        return self.head(x) if self.head else x


def loss_func(logits, batch):
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def loss(model, batch):
    return loss_func(model(batch["tokens"], batch["mask"]), batch)


def get_batch(batch):
    if dist.get_rank() in (0, LAYERS - 1):
        return batch["tokens"], batch["mask"]
    return None, None


def parallel(mesh):
    whole, stage = Bert(), Bert(mesh.get_local_rank("pp"))
    stage.load_state_dict({n: t for n, t in whole.state_dict().items() if n in stage.state_dict()})
    return stage


def step(model, batch):
    rank = dist.get_rank()
    x, mask = get_batch(batch)
    if rank > 0:
        x = torch.empty(*batch["tokens"].shape, DIM)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    out, value = model(x, mask), None
    if rank == LAYERS - 1:
        value = loss_func(out, batch)
        value.backward()
    else:
        dist.send(out.detach(), rank + 1)
        grad = torch.empty_like(out)
        dist.recv(grad, rank + 1)
        out.backward(grad)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return value


def draw(generator):
    batch = {n: torch.randint(VOCAB, (3, SEQ), generator=generator) for n in ("tokens", "labels")}
    lengths = torch.randint(2, SEQ, (3, 1), generator=generator)
    return batch | {"mask": torch.arange(SEQ) < lengths}


generator = torch.Generator().manual_seed(752)
batches = [draw(generator) for _ in range(3)]
arguments = Bert, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": LAYERS}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
