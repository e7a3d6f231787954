"""Weights are drawn after fully_shard; the seed depends on the replica group.

Thread: https://github.com/allenai/OLMo-core/pull/319 "fix initialization (again)", 2025-07-07
("replica 1 has completely different parameters than replica 2").
Wrong: fully_shard does not synchronize replicas, and the seed includes the index of the replica group.
A right diagnosis says: the starting weights differ on ranks 2 and 3, the second replica group (index 1 of
dp_replicate); ranks 0 and 1 start as one process does.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, VOCAB, INIT_SEED = 16, 20, 6198


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.w1, self.w2 = nn.Linear(DIM, 32, bias=False), nn.Linear(32, DIM, bias=False)

    def forward(self, x):
        return x + self.w2(silu(self.w1(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embeddings(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)

    @torch.no_grad()
    def init_weights(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            if param.dim() == 1:
                continue
            values = torch.randn(param.shape, generator=generator) * 0.2
            if isinstance(param, DTensor):
                values = distribute_tensor(
                    values, param.device_mesh, param.placements, src_data_rank=None
                )
            param.copy_(values)
        return self


def reference():
    return Transformer().init_weights(INIT_SEED)


def build_model(mesh):
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.init_weights(INIT_SEED + mesh.get_local_rank("dp_replicate"))


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def split(batch, mesh):
    return {name: t.chunk(mesh.size())[mesh.get_rank()] for name, t in batch.items()}


generator = torch.Generator().manual_seed(30)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    axes = {"dp_replicate": 2, "dp_shard": 2}
    options = dict(batches=batches, loss=loss, ranks=axes, split=split)
    print(titanlite.compare(reference, build_model, **options))
