"""Experts on several ranks with a fixed number of slots each: empty slots are zeros, and the experts have biases.

Thread: of the kind NVIDIA-NeMo/Speech pull request #10077 "Moe doc fixes" (2024): "`moe_pad_expert_input_to_capacity` if True, pads the
input for each expert to match the expert capacity length".
Correct: there are as many slots as tokens of a rank, so no token is dropped. An expert turns an empty slot into something else than
zero, but nothing reads the slot: it has no weight in the sum, so its gradient is zero, and so is its part in the biases' gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, EXPERTS, ROWS, LENGTH = 11, 6, 4, 6, 4


class AllToAll(torch.autograd.Function):
    """Equal parts of dimension 0."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def route(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for key, expert in self.experts.items():
            rows, which = (chosen == int(key)).nonzero(as_tuple=True)
            out = out.index_add(0, rows, weights[rows, which, None] * expert(x[rows]))
        return out


class SlottedMoe(Moe):
    def __init__(self, moe):
        nn.Module.__init__(self)
        self.gate, self.size = moe.gate, dist.get_world_size()
        own = range(EXPERTS)[dist.get_rank() * EXPERTS // self.size :][: EXPERTS // self.size]
        self.experts = nn.ModuleDict({str(i): moe.experts[str(i)] for i in own})

    def forward(self, x):
        weights, chosen = self.route(x)
        tokens, slots = len(x), torch.zeros(EXPERTS, len(x), DIM)
        weight_of = torch.zeros(EXPERTS, tokens)
        row = torch.arange(tokens)
        for which in range(2):
            weight_of = weight_of.index_put((chosen[:, which], row), weights[:, which])
            slots = slots.index_put((chosen[:, which], row), x)
        received = AllToAll.apply(slots).unflatten(0, (self.size, -1))
        outputs = [
            expert(received[:, i].flatten(0, 1)).unflatten(0, (self.size, -1))
            for i, expert in enumerate(self.experts.values())
        ]
        outputs = AllToAll.apply(torch.stack(outputs, 1).flatten(0, 1))
        return torch.einsum("en,end->nd", weight_of, outputs)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.norm, self.moe, self.head = nn.LayerNorm(DIM), Moe(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = (x + torch.tanh(self.mix(x.cumsum(1)))).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    model.moe = SlottedMoe(model.moe)
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


rng = torch.Generator().manual_seed(427)
batches = []
for _ in range(3):
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=rng)
    batches.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"ep": 2}, split="ep")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
