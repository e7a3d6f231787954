"""A tied output layer that becomes a parameter of its own when the model is materialized.

Thread: https://github.com/meta-pytorch/torchtune/issues/616 "Could it support Gemma?", comment of
2024-04-01; also https://github.com/NVIDIA-NeMo/RL/issues/227 (2025-04-18).
Wrong: the model is built on the meta device; to_empty and the loading of weights give the embedding
and the head separate storage. Both start equal, but each gets only the gradient of its own use.
A right diagnosis says: head.weight is not tied to embed.weight any more (the parallel model has one
parameter more, or the gradient of embed.weight lacks the head's contribution).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import cross_entropy

import titanlite


class Gemma(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.mlp(x)))


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def parallel(mesh):
    checkpoint = Gemma().state_dict()
    with torch.device("meta"):
        model = Gemma()
    model.head.weight = nn.Parameter(torch.empty_like(model.embed.weight))
    for module in (model.embed, model.mlp, model.head):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    sharded = {
        name: nn.Parameter(distribute_tensor(checkpoint[name], p.device_mesh, p.placements))
        for name, p in model.state_dict().items()
    }
    model.load_state_dict(sharded, assign=True)
    return model


generator = torch.Generator().manual_seed(2)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Gemma, parallel, **options))
