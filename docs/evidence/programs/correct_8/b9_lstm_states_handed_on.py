"""LSTM layers over sequence shards: each rank waits for the hidden and cell states of the rank before it.

Thread: of the kind state-spaces/mamba issue #597 "Context parallel implementation for Mamba 2" (2024: "transferring final
states ... point-to-point between GPUs sequentially", and "vice-a-versa for the backward pass").
Correct: h and c travel together to the next rank, and their gradients come back in the order in which the backward pass
needs them. What is sent is tied into the own output with a zero, so that a rank's backward pass waits for the next one's.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LAYERS = 12, 8, 2


class Send(torch.autograd.Function):
    """Sends a state on and gives a zero; in backward, the state's gradient comes from there."""

    @staticmethod
    def forward(ctx, state, to):
        ctx.to, ctx.like = to, torch.empty_like(state)
        dist.send(state.detach().contiguous(), to)
        return state.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        dist.recv(ctx.like, ctx.to)
        return ctx.like.clone(), None


class Receive(torch.autograd.Function):
    """The state that another rank sends; in backward, its gradient goes back. x only puts it into the graph."""

    @staticmethod
    def forward(ctx, x, shape, source):
        ctx.source = source
        ctx.save_for_backward(x)
        state = x.new_empty(shape)
        dist.recv(state, source)
        return state

    @staticmethod
    def backward(ctx, gradient):
        dist.send(gradient.contiguous(), ctx.source)
        return torch.zeros_like(ctx.saved_tensors[0]), None, None


class Layer(nn.Module):
    """A residual LSTM layer; with a chain, it continues from the rank before and is continued by the next."""

    def __init__(self):
        super().__init__()
        self.chain, self.norm = False, nn.LayerNorm(DIM)
        self.lstm, self.out = nn.LSTM(DIM, DIM, batch_first=True), nn.Linear(DIM, DIM)

    def forward(self, x):
        y = self.norm(x)
        if not self.chain:
            return x + self.out(self.lstm(y)[0])
        rank, state = dist.get_rank(), None
        if rank > 0:
            states = Receive.apply(y, (2, 1, len(x), DIM), rank - 1)
            state = states[0].contiguous(), states[1].contiguous()
        y, (h, c) = self.lstm(y, state)
        if rank + 1 < dist.get_world_size():
            y = y + Send.apply(torch.stack([h, c]), rank + 1)
        return x + self.out(y)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Tagger()
    for layer in model.layers:
        layer.chain = True
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(133)


def draw():
    return torch.randint(VOCAB, (3, 12), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Tagger, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"cp": 3}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
