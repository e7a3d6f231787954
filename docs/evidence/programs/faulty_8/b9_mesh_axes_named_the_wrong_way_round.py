"""parallelize_module and fully_shard on one mesh, whose axes are named the wrong way round.

Thread: pytorch/pytorch issue #107974 "Question on 2D-parallel unit test device mesh usage" (2023: the mesh's axes and
their names are mixed up), and pytorch/torchtitan issue #286 "Wrong mesh order" (2024).
Wrong: the data loader gives ranks 0 and 1 the first rows and ranks 2 and 3 the rest. But the model's own mesh calls its
first axis tp: ranks 0 and 2, with different rows, are a tensor-parallel group, and sum their partial products.
PLACE: blocks.0.down, forward pass (its reduction over tp): first output that differs, on all ranks
KIND: tensor-parallel group made of ranks with different data (mesh axes exchanged)
REPAIR: `mesh_dim_names=("tp", "dp")` -> `mesh_dim_names=("dp", "tp")`
EXPECT: in the forward pass, blocks.0 (its down) is the first module whose output differs, on all ranks: the partial
products of ranks 0 and 2 (and 1 and 3) are added, which have different rows of the batch; the ranks of a tensor-
parallel group must have the same rows. The two axes of the mesh are exchanged.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, HIDDEN = 16, 8, 24


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        y = self.norm(x + past)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(2))
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def apply_tp(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)


def apply_fsdp(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def parallel(mesh):
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = Transformer()
    apply_tp(model, world["tp"])
    apply_fsdp(model, world["dp"])
    return model


generator = torch.Generator().manual_seed(107)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2, "tp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
