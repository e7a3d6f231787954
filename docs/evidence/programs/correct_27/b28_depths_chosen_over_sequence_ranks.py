"""A small mixture-of-depths language model: a router lets the best tokens of a sequence through every other block.

Thread: sramshetty/mixture-of-depths pull request #4 "Inference & Auxiliary Router Changes" (2024): the top-k over the
sequence isn't causal, so an auxiliary loss teaches the router's sigmoid whether a token is among the top-k.
Correct: the scores are gathered without a gradient, which seems to cut off the router; but the choice is a threshold,
and the router learns through the weight of the chosen token's update and the auxiliary loss, both on the token's own
rank. The capacity is one of the whole sequence, so a rank may have all of the chosen tokens or none. It packs its own
to the front and pads to the capacity; padding is no key for anybody. A padded query sees only itself, so that no
softmax is empty, and is dropped afterwards. Keys are gathered with a gradient that is summed, as all ranks' queries
use them.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, LENGTH, ROWS, CAPACITY, AUXILIARY = 21, 12, 3, 12, 3, 5, 0.1


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (1, 2))
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.gather = nn.Linear(2 * WIDTH, WIDTH), lambda x: x

    def forward(self, x, at, real):
        """The update, not added to x, of tokens at the positions `at`."""
        h, keys_at = self.norm1(x), self.gather(at)
        k, v = self.gather(self.kv(h)).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, -1)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        seen = (at[:, :, None] >= keys_at[:, None]) & self.gather(real)[:, None]
        seen = torch.where(real[:, :, None], seen, at[:, :, None] == keys_at[:, None])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        y = self.out(y.transpose(1, 2).flatten(2))
        return y + self.down(F.silu(self.up(self.norm2(x + y))))


class RoutedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.block = nn.Linear(WIDTH, 1), Block()

    def choose(self, scores):
        index = scores.topk(CAPACITY, 1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)

    def forward(self, x, at):
        scores = self.router(x).squeeze(-1)
        chosen = self.choose(scores.detach())
        order = (~chosen).to(torch.int8).argsort(dim=1, stable=True)[:, :CAPACITY]
        real, wide = chosen.gather(1, order), order.unsqueeze(-1).expand(-1, -1, WIDTH)
        update = self.block(x.gather(1, wide), at.gather(1, order), real)
        weight = torch.sigmoid(scores).gather(1, order) * real
        auxiliary = F.binary_cross_entropy_with_logits(scores, chosen.double(), reduction="sum")
        return x.scatter_add(1, wide, weight.unsqueeze(-1) * update), auxiliary


class RankedRoutedBlock(RoutedBlock):
    def choose(self, scores):
        chosen = super().choose(GatherSequence.apply(scores, self.group))
        return chosen.chunk(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)]


class MixtureOfDepths(nn.Module):
    def __init__(self, routed=RoutedBlock):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.routed = nn.ModuleList(routed() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words, at):
        x, total = self.words(words) + self.places(at), 0.0
        for block, routed in zip(self.blocks, self.routed):
            x = x + block(x, at, torch.ones_like(at, dtype=torch.bool))
            x, auxiliary = routed(x, at)
            total = total + auxiliary
        return self.head(self.norm(x)), total


def loss(model, batch):
    logits, auxiliary = model(batch["words"], batch["at"])
    value = F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten(), reduction="sum")
    return (value + AUXILIARY * auxiliary) / (ROWS * LENGTH)


def parallel(mesh):
    group = mesh.get_group("sp")
    model = MixtureOfDepths(RankedRoutedBlock)
    for module in model.modules():
        if isinstance(module, Block):
            module.gather = lambda x: GatherSequence.apply(x, group)
        module.group = group
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=model.group)
    return value.detach()


texts = torch.randint(WORDS, (3, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(4))
at = torch.arange(LENGTH).expand(ROWS, -1)
batches = [{"words": text[:, :-1], "next": text[:, 1:], "at": at} for text in texts]

arguments = MixtureOfDepths, parallel
options = dict(batches=batches, loss=loss, step=step, split={"sp": 1}, ranks={"sp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
