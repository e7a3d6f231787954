"""FSDP1 clipped with torch.nn.utils.clip_grad_norm_.

Thread: https://github.com/PrimeIntellect-ai/OpenDiloco/pull/6 "fix grad norm fsdp", 2024-07-18; also
https://github.com/pytorch/pytorch/issues/72548 (2022-02-08).
Wrong: each rank computes the norm of its own shards and clips by it; the model's own clip_grad_norm_
adds the shards of all ranks.
A right diagnosis says: gradients agree, but the gradient norm is that of the rank's shards only, and
differs between the ranks: sum the squares over dp (FSDP's clip_grad_norm_).
"""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

import titanlite


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Llama(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def build():
    wrap = functools.partial(FSDP, use_orig_params=True, device_id=torch.device("cpu"))
    return wrap(Llama(), auto_wrap_policy=ModuleWrapPolicy({Block}))


generator = torch.Generator().manual_seed(5)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", clip=clip)
    print(titanlite.compare(Llama, build, **options))
