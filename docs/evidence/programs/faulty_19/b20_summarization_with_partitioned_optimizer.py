"""Fine-tuning of a small encoder-decoder for summaries; each rank keeps the AdamW states of its own share of the parameters.

Thread: pytorch/xla pull request #4796 "Minor fix: ZeRO-1 grad clipping" (2023): "reduce local norm across shards"; likewise
facebookresearch/fairscale pull request #167 (2020): with OSS each rank has only a partial view of all the gradients.
Fault: PartitionedAdamW.clip takes the norm of the gradients of the rank's own parameters for the norm of all of them; each share
is clipped by its own factor, mostly a weaker one, so direction and size of the clipped gradient are wrong.
REPAIR: `norm = squares.sqrt()` -> `norm = self.summed(squares).sqrt()`
A right first sentence says: the optimizer clips by the norm of the rank's own partition of the gradients, which isn't summed over
the ranks, so each share of the parameters is scaled by another factor than the one of the whole gradient's norm.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, SOURCE, TARGET, PAD, IGNORE = 26, 16, 4, 10, 6, 0, -100
MAX_NORM = 0.6


class Attention(nn.Module):
    def __init__(self, positions=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        if positions is not None:
            self.bias = nn.Parameter(torch.randn(HEADS, 2 * positions - 1) / 8)

    def relative(self, length):
        places = torch.arange(length)
        return self.bias[:, places - places[:, None] + self.bias.size(1) // 2]

    def forward(self, x, memory=None, mask=None):
        memory = x if memory is None else memory
        q, k, v = (
            f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        bias = self.relative(x.size(1)) if hasattr(self, "bias") else 0.0
        scores = (q @ k.mT / q.size(-1) ** 0.5 + bias).masked_fill(~mask, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, positions, cross):
        super().__init__()
        self.attention, self.norm = Attention(positions), nn.RMSNorm(WIDTH, eps=1e-6)
        if cross:
            self.cross, self.cross_norm = Attention(), nn.RMSNorm(WIDTH, eps=1e-6)
        self.wi, self.wo = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = x + self.attention(self.norm(x), mask=mask)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, memory_mask)
        return x + self.wo(F.gelu(self.wi(self.mlp_norm(x))))


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Layer(SOURCE, cross=False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(TARGET, cross=True) for _ in range(2))
        self.encoder_norm, self.decoder_norm = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, article, inputs):
        keys = (article != PAD)[:, None, None]
        memory, x = self.shared(article), self.shared(inputs)
        for layer in self.encoder:
            memory = layer(memory, keys)
        memory = self.encoder_norm(memory)
        causal = torch.ones(inputs.size(1), inputs.size(1), dtype=torch.bool).tril()
        for layer in self.decoder:
            x = layer(x, causal, memory, keys)
        return self.lm_head(self.decoder_norm(x))


def all_reduced(x):
    dist.all_reduce(x)
    return x


class PartitionedAdamW(torch.optim.AdamW):
    """Clips and updates the own share of the parameters; a single process owns all."""

    def __init__(self, parameters, max_norm=MAX_NORM, **options):
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world > 1 else 0
        sizes, self.owners, self.max_norm = [0] * self.world, [], max_norm
        for parameter in parameters:
            self.owners.append((parameter, owner := sizes.index(min(sizes))))
            sizes[owner] += parameter.numel()
        super().__init__([p for p, owner in self.owners if owner == self.rank], **options)

    def summed(self, x):
        return x if self.world == 1 else all_reduced(x)

    def zero_grad(self, set_to_none=True):
        for parameter, _ in self.owners:
            parameter.grad = None

    def clip(self):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        squares = torch.stack([grad.square().sum() for grad in grads]).sum()
        norm = squares.sqrt()
        for grad in grads:
            grad.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def step(self, closure=None):
        self.clip()
        super().step()
        for parameter, owner in self.owners if self.world > 1 else ():
            dist.broadcast(parameter.data, owner)


def plain():
    return EncoderDecoder()


def parallel(mesh):
    return EncoderDecoder()


def loss(model, batch):
    return F.cross_entropy(model(*batch[:2]).mT, batch[2], ignore_index=IGNORE)


def step(model, batch):
    article, inputs, labels = batch
    tokens = all_reduced((labels != IGNORE).sum())
    options = dict(ignore_index=IGNORE, reduction="sum")
    value = F.cross_entropy(model(article, inputs).mT, labels, **options) / tokens
    value.backward()
    for parameter in model.parameters():
        all_reduced(parameter.grad)
    return all_reduced(value.detach().clone())


generator = torch.Generator().manual_seed(4796)


def articles(rows=6):
    article = torch.randint(1, VOCAB, (rows, SOURCE), generator=generator)
    lengths = torch.randint(5, SOURCE + 1, (rows, 1), generator=generator)
    article = article.masked_fill(torch.arange(SOURCE) >= lengths, PAD)
    summary = torch.randint(1, VOCAB, (rows, TARGET), generator=generator)
    ends = torch.randint(2, TARGET + 1, (rows, 1), generator=generator)
    inputs = F.pad(summary[:, :-1], (1, 0), value=PAD)
    return article, inputs, summary.masked_fill(torch.arange(TARGET) >= ends, IGNORE)


batches = [articles() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: PartitionedAdamW(parameters, lr=3e-3, eps=1e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
