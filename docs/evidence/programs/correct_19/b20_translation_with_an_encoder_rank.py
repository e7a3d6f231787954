"""A translation model whose encoder and decoder live on a rank each, with a tied embedding on both and parts of unequal size.

Might be accused because: both ranks get the whole batch but the encoder's never sees a loss; the batch is cut into parts of one,
two and five rows, whose losses aren't averaged; the loss is enlarged before the backward pass and the gradients are reduced
afterwards; the copies of the embedding get different gradients, which are summed though the rest is left alone.
Correct because: each part's loss is a sum over its target tokens divided by those of the whole batch, so the parts add up to the
loss of the batch; the enlargement is a power of two and taken back on both ranks; the embedding's gradient is the sum of that of
its use in the encoder and those in the decoder and as the output layer; every other weight exists once and gets its whole
gradient there.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, SOURCE, TARGET, PAD = 27, 12, 3, 9, 7, 0
PARTS, ENLARGED, SMOOTHING = (1, 5, 2), 1024.0, 0.1
ENCODER_RANK, DECODER_RANK = 0, 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))

    def forward(self, x, memory, mask):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.self_attention, self.norm1 = Attention(), nn.LayerNorm(WIDTH)
        if cross:
            self.cross_attention, self.norm2 = Attention(), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm3 = nn.LayerNorm(WIDTH)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm1(x + self.self_attention(x, x, mask))
        if memory is not None:
            x = self.norm2(x + self.cross_attention(x, memory, memory_mask))
        return self.norm3(x + self.fc2(F.relu(self.fc1(x))))


class Stack(nn.Module):
    def __init__(self, length, cross):
        super().__init__()
        self.places = nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(Layer(cross) for _ in range(2))

    def forward(self, x, *others):
        x = x + self.places.weight
        for layer in self.layers:
            x = layer(x, *others)
        return x


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCAB, WIDTH) / WIDTH**0.5)
        self.encoder, self.decoder = Stack(SOURCE, cross=False), Stack(TARGET, cross=True)

    def encode(self, source):
        return self.encoder(self.embedding[source] * WIDTH**0.5, keys_of(source))

    def loss_sum(self, memory, source, target):
        x = self.embedding[target[:, :-1]] * WIDTH**0.5
        causal = torch.ones(TARGET, TARGET, dtype=torch.bool).tril()
        logits = self.decoder(x, causal, memory, keys_of(source)) @ self.embedding.T
        options = dict(ignore_index=PAD, label_smoothing=SMOOTHING, reduction="sum")
        return F.cross_entropy(logits.mT, target[:, 1:], **options)


def keys_of(source):
    return (source != PAD)[:, None, None]


def tokens_of(target):
    return (target[:, 1:] != PAD).sum()


def encoder_pass(model, source, target):
    sent = []
    for part in source.split(PARTS):
        memory = model.encode(part)
        sent.append((memory, dist.isend(memory.detach().contiguous(), DECODER_RANK, tag=1)))
    for memory, work in sent:
        work.wait()
        dist.recv(grad := torch.empty_like(memory), DECODER_RANK, tag=2)
        memory.backward(grad)
    return torch.zeros(())


def decoder_pass(model, source, target):
    total, tokens = torch.zeros(()), tokens_of(target)
    for part, wanted in zip(source.split(PARTS), target.split(PARTS)):
        memory = torch.empty(*part.shape, WIDTH, dtype=total.dtype)
        dist.recv(memory, ENCODER_RANK, tag=1)
        value = model.loss_sum(memory.requires_grad_(), part, wanted) / tokens
        (value * ENLARGED).backward()
        dist.send(memory.grad, ENCODER_RANK, tag=2)
        total += value.detach()
    return total


def plain():
    return Translator()


def parallel(mesh):
    model = Translator()
    if dist.get_rank() == ENCODER_RANK:
        del model.decoder
        return model, encoder_pass
    del model.encoder
    return model, decoder_pass


def loss(model, batch):
    source, target = batch
    return model.loss_sum(model.encode(source), source, target) / tokens_of(target)


def step(built, batch):
    model, run = built
    value = run(model, *batch)
    dist.all_reduce(model.embedding.grad)
    for parameter in model.parameters():
        parameter.grad /= ENLARGED
    dist.broadcast(value, DECODER_RANK)
    return value


generator = torch.Generator().manual_seed(22)


def pairs():
    rows = sum(PARTS)
    source = torch.randint(1, VOCAB, (rows, SOURCE), generator=generator)
    target = torch.randint(1, VOCAB, (rows, TARGET + 1), generator=generator)
    for text, least in ((source, 4), (target, 3)):
        ends = torch.randint(least, text.size(1) + 1, (rows, 1), generator=generator)
        text[torch.arange(text.size(1)) >= ends] = PAD
    return source, target


batches = [pairs() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"mp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3, betas=(0.9, 0.98)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
