"""A two-stage pipeline of a small GPT with tied embeddings, data parallel, with optimizer states sharded over a flat buffer.

Thread: NVIDIA/Megatron-LM issue #844 "[BUG] Wrong embedding gradients with distributed optimizer and shared embedding" (2024):
the gradients were reduce-scattered over data parallel ranks before those of the shared embedding were summed over the stages.
Fault: DistributedOptimizer.step reduce-scatters the flat gradients over dp first and sums the slices of the tied embedding over
pp afterwards; by then each slice is averaged only on the rank that owns it, and the two stages' slices have different owners,
so a reduced gradient is added to another rank's unreduced one, and the two copies of wte drift apart.
REPAIR: `for sync in (self.scatter_gradients, self.tie_gradients):` -> `for sync in (self.tie_gradients, self.scatter_gradients):`
A right first sentence says: in DistributedOptimizer.step the gradient of the tied embedding wte is all-reduced over the pipeline
stages only after the data parallel reduce-scatter, so averaged and still local pieces are summed and wte's gradient is wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, LENGTH, MICRO_BATCHES = 16, 8, 6, 2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc_in, self.fc_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class Stage(nn.Module):
    def __init__(self, gpt, index, count):
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.wte, self.wpe = gpt.wte, gpt.wpe
        share = len(gpt.blocks) // count
        self.blocks = nn.ModuleDict(
            {str(i): gpt.blocks[i] for i in range(index * share, (index + 1) * share)}
        )
        if self.last:
            self.ln_f, self.wte = gpt.ln_f, gpt.wte

    def forward(self, x):
        if self.first:
            x = self.wte(x) + self.wpe.weight
        for block in self.blocks.values():
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight) if self.last else x


class DistributedOptimizer(torch.optim.Optimizer):
    """AdamW over this data parallel rank's part of the stage's flat parameters."""

    def __init__(self, stage, mesh):
        self.parameters = list(stage.parameters())
        super().__init__(self.parameters, {})
        self.dp_group, self.pp_group = mesh.get_group("dp"), mesh.get_group("pp")
        self.dp_size = mesh["dp"].size()
        total = sum(p.numel() for p in self.parameters)
        self.shard_size = -(-total // self.dp_size)
        self.values = torch.zeros(self.shard_size * self.dp_size)
        self.gradients = torch.zeros_like(self.values)
        self.places, offset = [], 0
        for p in self.parameters:
            self.places.append(slice(offset, offset + p.numel()))
            self.values[self.places[-1]] = p.detach().flatten()
            offset += p.numel()
        self.tied = next(
            place for p, place in zip(self.parameters, self.places) if p is stage.wte.weight
        )
        start = mesh.get_local_rank("dp") * self.shard_size
        self.own = slice(start, start + self.shard_size)
        self.master = nn.Parameter(self.values[self.own].clone())
        self.adam = torch.optim.AdamW([self.master], lr=1e-3)

    def scatter_gradients(self):
        part = torch.empty(self.shard_size)
        dist.reduce_scatter_tensor(part, self.gradients, group=self.dp_group)
        self.gradients[self.own] = part / self.dp_size

    def tie_gradients(self):
        dist.all_reduce(self.gradients[self.tied], group=self.pp_group)

    @torch.no_grad()
    def step(self, closure=None):
        for p, place in zip(self.parameters, self.places):
            self.gradients[place] = p.grad.flatten()
        for sync in (self.scatter_gradients, self.tie_gradients):
            sync()
        self.master.grad = self.gradients[self.own].clone()
        self.adam.step()
        dist.all_gather_into_tensor(self.values, self.master.detach(), group=self.dp_group)
        for p, place in zip(self.parameters, self.places):
            p.copy_(self.values[place].view_as(p))


def plain():
    return GPT()


def parallel(mesh):
    stage = Stage(GPT(), mesh.get_local_rank("pp"), mesh["pp"].size())
    return stage, DistributedOptimizer(stage, mesh), mesh


def loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def step(built, tokens):
    stage, _, mesh = built
    group = mesh.get_group("pp")
    peer = dist.get_global_rank(group, 1 - mesh.get_local_rank("pp"))
    inputs, outputs = [], []
    for micro in tokens.chunk(MICRO_BATCHES):
        if stage.first:
            inputs.append(None)
            outputs.append(stage(micro[:, :-1]))
            dist.send(outputs[-1].detach().contiguous(), peer, group=group)
        else:
            x = torch.empty(len(micro), LENGTH, WIDTH)
            dist.recv(x, peer, group=group)
            inputs.append(x.requires_grad_())
            logits = stage(x)
            outputs.append(
                F.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten()) / MICRO_BATCHES
            )
    for x, y in zip(inputs, outputs):
        if stage.first:
            gradient = torch.empty_like(y)
            dist.recv(gradient, peer, group=group)
            y.backward(gradient)
        else:
            y.backward()
            dist.send(x.grad, peer, group=group)
    return torch.stack(outputs).sum().detach() if stage.last else None


generator = torch.Generator().manual_seed(844)
batches = [torch.randint(0, VOCAB, (8, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"pp": 2, "dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
