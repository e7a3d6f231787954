"""A state-space model whose sequence is cut over cp: the final states of the earlier ranks are added up.

Thread: https://github.com/state-spaces/mamba/issues/482 "Sequence parallelism in the mixer (Context Parallelism)"
(there is a weighted cumulative sum over all states), 2024-07-21, comment of 2024-09-24.
Wrong: each rank scans from a zero state and then adds the state that the ranks before it leave. The state of rank 0
reaches rank 2 as it was, and not multiplied with the decay of rank 1's tokens.
EXPECT: in the forward pass, the output of layers.0.mixer is the first that differs, on rank 2 only (ranks 0 and 1
agree): the initial state of rank 2 is the plain sum of the final states of ranks 0 and 1; that of rank 0 has to be
multiplied with the decay over rank 1's chunk.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid, silu

import titanlite

VOCAB, DIM, HEADS, STATE = 13, 12, 3, 4


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


class Mixer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(DIM, 2 * DIM + 2 * HEADS * STATE)
        self.dt_proj = nn.Linear(DIM, HEADS)
        self.out_proj = nn.Linear(DIM, DIM)

    def initial_state(self, final):
        finals = AllGather.apply(final, self.group)
        earlier = torch.arange(len(finals)) < self.group.rank()
        return (finals * earlier.view(-1, 1, 1, 1, 1)).sum(0)

    def forward(self, u):
        sizes = [DIM, DIM, HEADS * STATE, HEADS * STATE]
        x, z, b, c = self.in_proj(u).split(sizes, -1)
        x, b, c = (t.unflatten(-1, (HEADS, -1)) for t in (x, b, c))
        log_decay = logsigmoid(self.dt_proj(u))
        new = b.unsqueeze(-1) * x.unsqueeze(-2)
        state, states = torch.zeros_like(new[:, 0]), []
        for t in range(u.shape[1]):
            state = log_decay[:, t].exp()[..., None, None] * state + new[:, t]
            states.append(state)
        states = torch.stack(states, 1)
        if self.group is not None:
            since_start = log_decay.cumsum(1).exp()[..., None, None]
            states = states + since_start * self.initial_state(state).unsqueeze(1)
        y = (c.unsqueeze(-1) * states).sum(-2).flatten(2)
        return self.out_proj(y * silu(z))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(DIM), Mixer()

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class StateSpaceLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = StateSpaceLM()
    for layer in model.layers:
        layer.mixer.group = mesh.get_group("cp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(482)
batches = [
    {n: torch.randint(VOCAB, (2, 12), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = StateSpaceLM, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 3}, split={"cp": 1}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
