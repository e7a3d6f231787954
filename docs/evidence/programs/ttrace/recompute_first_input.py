"""Recomputation of several layers at once: every layer gets the input of the first.

Thread: https://github.com/NVIDIA/Megatron-LM/pull/290 "fix bug in uniform activation recompute",
2023-02-27.
Wrong: inside a checkpointed group of two layers, the group's hidden states are passed to both, so the
second layer does not see the first one's output, and the first has no gradient.
A right diagnosis says: layers.1 is the first module whose output differs: it gets another input (that
of layers.0). layers.0 and layers.2 have no gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, DIM = 20, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class GPT(nn.Module):
    recompute_num_layers = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB)

    def group_of_layers(self, start):
        def forward(hidden_states):
            for layer in self.layers[start : start + self.recompute_num_layers]:
                x = layer(hidden_states)
            return x

        return forward

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.recompute_num_layers:
            for start in range(0, len(self.layers), self.recompute_num_layers):
                x = checkpoint(self.group_of_layers(start), x, use_reentrant=False)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def parallel(mesh):
    model = GPT()
    model.recompute_num_layers = 2
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(model, batch):
    for p in model.parameters():  # a gradient buffer, as in Megatron
        p.grad = torch.zeros_like(p)
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(16)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(GPT, parallel, **options))
