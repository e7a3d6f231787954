"""Causal linear attention with the sequence cut over the ranks: the state of all other blocks is added, later ones too.

Thread: of the kind fla-org/flash-linear-attention issue #217 "[RFC] Support context parallelism" (2025): a rank needs the
states of the ranks before it.
Fault: in SplitLinearAttention.forward, a block's incoming state is the sum of the other ranks' states, where only those
of the ranks before it may count.
REPAIR: `[i != rank for i` -> `[i < rank for i`
Expected: in the forward pass, blocks.0.attention is the first module whose output differs, on all ranks but the last:
their tokens see the key-value states of later parts of the sequence, because the states of all other ranks are added
instead of those of the earlier ranks only. The causal order is broken; the last rank is right in the first block.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, elu, pad
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS = 12, 8, 2


class AllStates(torch.autograd.Function):
    """The states of all ranks; in backward, the sum of the ranks' gradients of the own state."""

    @staticmethod
    def forward(ctx, state, group):
        ctx.group = group
        states = [torch.empty_like(state) for _ in range(dist.get_world_size(group))]
        dist.all_gather(states, state.contiguous(), group=group)
        return torch.stack(states)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def features(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return elu(q) + 1, elu(k) + 1, pad(v, (0, 1), value=1.0)  # the last column sums the weights

    def read(self, q, states):
        y = (q[..., None, :] @ states)[..., 0, :]
        y = y[..., :-1] / y[..., -1:]
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        q, k, v = self.features(x)
        return self.read(q, (k[..., None] * v[..., None, :]).cumsum(2))


class SplitLinearAttention(LinearAttention):
    """The same for one block of the sequence: the state begins with what the other ranks hand on."""

    def __init__(self, whole, group):
        super().__init__()
        self.qkv, self.out, self.group = whole.qkv, whole.out, group

    def forward(self, x):
        q, k, v = self.features(x)
        states = (k[..., None] * v[..., None, :]).cumsum(2)
        rank, ends = dist.get_rank(self.group), AllStates.apply(states[:, :, -1], self.group)
        counts = torch.tensor([i != rank for i in range(len(ends))])
        incoming = (ends * counts[:, None, None, None, None]).sum(0)
        return self.read(q, states + incoming[:, :, None])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), LinearAttention()
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("cp")
    for block in model.blocks:
        block.attention = SplitLinearAttention(block.attention, group)
    return DistributedDataParallel(model, process_group=group)


generator = torch.Generator().manual_seed(208)


def draw():
    return torch.randint(VOCAB, (3, 9), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 3}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
