"""FSDP2 with activation checkpointing that does not preserve the RNG state.

Thread: https://github.com/pytorch/torchtitan/issues/1323 "Why `preserve_rng_state=False` in activation
checkpointing", 2025-06-20.
Right: the model draws no random numbers, so recomputation gives the same values.
Must not be accused: activation checkpointing, random numbers, modules that run twice.
"""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, VOCAB = 16, 2, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.wqkv(x).chunk(3, -1))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(DIM), nn.RMSNorm(DIM), Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, DIM))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def parallelize(mesh):
    model = Llama()
    for name, block in model.layers.items():
        block = checkpoint_wrapper(block, preserve_rng_state=False)
        model.layers[name] = fully_shard(block, mesh=mesh, reshard_after_forward=name != "2")
    return fully_shard(model, mesh=mesh)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(14)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Llama, parallelize, **options))
