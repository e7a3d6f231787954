"""An image captioner in three stages by hand; the first, with the frozen image encoder, runs ahead of the others.

Thread: NVIDIA/Megatron-LM issue #1043 "[QUESTION] LLaVA model_type, pipeline parallel training" (2024): the vision part
belongs to the start of the pipeline, the other stages exchange "intermediate states" of the language model.
What could be accused: the first rank sends all images before it takes back a gradient, which ends at the projector;
only the other two take turns of one forward and one backward pass; and the pieces' losses are sums over three, two and
one captions; but the encoder is frozen on the plain side too, and each sum is divided by the words of the whole batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

PIXELS, PATCHES, WIDTH, HEADS, WORDS, LENGTH, PIECES, PAD = 6, 4, 12, 2, 15, 6, (3, 2, 1), 0
KEPT = (("encoder", "projector"), ("words", "blocks"), ("blocks", "norm", "head"))


class Block(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, WIDTH), Block(causal=False))
        self.encoder.requires_grad_(False)
        self.projector, self.words = nn.Linear(WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def enter(self, features, captions):
        return torch.cat([features, self.words(captions[:, :-1])], 1)

    def leave(self, x):
        return self.head(self.norm(x[:, PATCHES:]))

    def forward(self, image, captions):
        x = self.enter(self.projector(self.encoder(image)), captions)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def loss_sum(logits, captions):
    targets = captions[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=PAD, reduction="sum")


class Stage(Captioner):
    def __init__(self, index):
        super().__init__()
        for name in [name for name, _ in self.named_children() if name not in KEPT[index]]:
            delattr(self, name)
        if index:
            self.blocks = nn.ModuleDict({str(index - 1): self.blocks[index - 1]})

    def block(self, x):
        return next(iter(self.blocks.values()))(x)


class Pipeline:
    def __init__(self, group):
        self.rank, self.group = dist.get_rank(group), group
        self.stage = Stage(self.rank)

    def send(self, x, to):
        return dist.isend(x.detach().contiguous(), group=self.group, group_dst=to)

    def receive(self, rows, length, source):
        x = torch.empty(rows, length, WIDTH)
        dist.recv(x, group=self.group, group_src=source)
        return x

    def step(self, batch):
        pieces = zip(batch["image"].split(PIECES), batch["captions"].split(PIECES))
        words = (batch["captions"][:, 1:] != PAD).sum()
        return (self.encode, self.first, self.last)[self.rank](pieces, words)

    def encode(self, pieces, words):
        features = [self.stage.projector(self.stage.encoder(image)) for image, _ in pieces]
        for work in [self.send(x, 1) for x in features]:
            work.wait()
        for x in features:
            x.backward(self.receive(*x.shape[:2], 1))

    def first(self, pieces, words):
        waiting, sends = [], []
        for captions in [captions for _, captions in pieces] + [None]:
            if captions is not None:
                features = self.receive(len(captions), PATCHES, 0).requires_grad_()
                out = self.stage.block(self.stage.enter(features, captions))
                waiting.append((features, out))
                sends.append(self.send(out, 2))
            if len(waiting) > 1 or captions is None:
                features, out = waiting.pop(0)
                out.backward(self.receive(*out.shape[:2], 2))
                sends.append(self.send(features.grad, 0))
        for work in sends:
            work.wait()

    def last(self, pieces, words):
        values = []
        for _, captions in pieces:
            x = self.receive(len(captions), PATCHES + LENGTH, 1).requires_grad_()
            values.append(loss_sum(self.stage.leave(self.stage.block(x)), captions) / words)
            values[-1].backward()
            self.send(x.grad, 1).wait()
        return sum(values).detach()


def parallel(mesh):
    return Pipeline(mesh.get_group("pp"))


def loss(model, batch):
    words = (batch["captions"][:, 1:] != PAD).sum()
    return loss_sum(model(batch["image"], batch["captions"]), batch["captions"]) / words


generator = torch.Generator().manual_seed(1043)


def photographs():
    captions = torch.randint(1, WORDS, (6, LENGTH + 1), generator=generator)
    lengths = torch.randint(3, LENGTH + 2, (6, 1), generator=generator)
    captions = captions.masked_fill(torch.arange(LENGTH + 1) >= lengths, PAD)
    return {"image": torch.randn(6, PATCHES, PIXELS, generator=generator), "captions": captions}


batches = [photographs() for _ in range(3)]
plain = Captioner
arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=Pipeline.step, ranks={"pp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
