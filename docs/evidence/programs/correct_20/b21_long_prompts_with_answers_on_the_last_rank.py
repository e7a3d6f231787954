"""Fine-tuning on long prompts with short answers: Ulysses sequence parallelism, with all answer tokens in the last rank's part.

Might be accused because: the first two ranks have no target at all, report a loss of zero and add nothing to the head's
gradient; the ranks' losses are unlike each other, and the loss is multiplied by the number of ranks.
Correct because: each rank sums its own targets' losses and divides by the number of targets of all ranks; times the number of
ranks, DDP's average is the sum. The ranks without targets still carry the prompt's keys and values, whose gradients come back
through the all-to-all.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, ANSWER, LAYERS, IGNORE = 20, 12, 3, 15, 4, 2, -100


def exchange(x, group, scatter, gather):
    """Deals one dimension out to the ranks and collects another one."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), scatter)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), gather)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, scatter, gather):
        ctx.back = group, gather, scatter
        return exchange(x, group, scatter, gather)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.back), None, None, None


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def attention(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        if self.group is not None:
            qkv = Exchange.apply(qkv, self.group, 3, 1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = Exchange.apply(y, self.group, 1, 2)
        return self.out(y.flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Assistant(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, positions):
        x = self.words(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def answer_loss(model, batch, targets):
    logits = model(batch["tokens"], batch["positions"])
    labels = batch["labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum")
    return total / targets


def plain():
    return Assistant()


def parallel(mesh):
    model, group = Assistant(), mesh.get_group("sp")
    for block in model.blocks:
        block.group = group
    return DistributedDataParallel(model, process_group=group)


def loss(model, batch):
    return answer_loss(model, batch, (batch["labels"] != IGNORE).sum())


def step(model, batch):
    targets = (batch["labels"] != IGNORE).sum()
    dist.all_reduce(targets)
    value = answer_loss(model, batch, targets)
    (value * dist.get_world_size()).backward()
    value = value.detach()
    dist.all_reduce(value)
    return value


generator = torch.Generator().manual_seed(2110)


def questions(rows=3):
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    lengths = torch.randint(1, ANSWER + 1, (rows, 1), generator=generator)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].masked_fill(torch.arange(LENGTH) < LENGTH - lengths, IGNORE),
        "positions": torch.arange(LENGTH).expand(rows, -1).contiguous(),
    }


batches = [questions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"sp": 1},
    ranks={"sp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
