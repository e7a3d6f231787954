"""Tensor parallel residual MLPs with torch.distributed.nn's all_reduce, whose backward pass all-reduces too.

Thread: NVIDIA/Megatron-LM issue #559 "All-Reduce placement in backwards for Tensor Parallel MLP blocks" (2023): why Megatron's
all-reduce is an identity in the backward pass while torch.distributed.nn's is an all-reduce.
Correct: the objective is the sum of the ranks' losses, each divided by the number of ranks. So the backward all-reduce is right,
there's no operator in front of the column-parallel layer, and each rank's gradient of a replicated parameter (norms, biases
after the all-reduce, embedding, head) is a part that is summed over the ranks after the backward pass, without a division.
Gradients of the sharded weights are whole as they are. Gradients of replicated activations differ over the ranks meanwhile.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F

import titanlite

SYMBOLS, WIDTH, HIDDEN, LENGTH, CLASSES = 13, 10, 18, 6, 4


class GatedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def partial(self, x):
        return self.down(torch.tanh(self.gate(x)) * self.up(x))

    def forward(self, x):
        return self.partial(x) + self.bias


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), GatedMlp()
        self.mix = nn.Linear(LENGTH, LENGTH, bias=False)

    def forward(self, x):
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, symbols):
        x = self.embed(symbols)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class SplitGatedMlp(GatedMlp):
    def forward(self, x):
        return dist_nn.all_reduce(self.partial(x)) + self.bias


CUTS = {"gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}


def cut(name):
    return CUTS.get(name.split("mlp.")[-1]) if "mlp." in name else None


def shard(name):
    return None if cut(name) is None else (cut(name), "tp")


def plain():
    return Tagger()


def parallel(mesh):
    model = Tagger()
    for layer in model.layers:
        layer.mlp.__class__ = SplitGatedMlp
    for name, p in model.named_parameters():
        if cut(name) is not None:
            p.data = p.data.chunk(mesh.size(), cut(name))[mesh.get_local_rank("tp")].clone()
    return model


def loss(model, batch):
    symbols, tags = batch
    return F.cross_entropy(model(symbols).flatten(0, 1), tags.flatten())


def step(model, batch):
    value = loss(model, batch)
    (value / dist.get_world_size()).backward()
    replicated = [p for name, p in model.named_parameters() if cut(name) is None]
    flat = torch.cat([p.grad.flatten() for p in replicated])
    dist.all_reduce(flat)
    for p, grad in zip(replicated, flat.split([p.numel() for p in replicated]), strict=True):
        p.grad.copy_(grad.view_as(p))
    return value.detach()


generator = torch.Generator().manual_seed(559)
batches = [
    (
        torch.randint(0, SYMBOLS, (4, LENGTH), generator=generator),
        torch.randint(0, CLASSES, (4, LENGTH), generator=generator),
    )
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    shard=shard,
    ranks={"tp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
