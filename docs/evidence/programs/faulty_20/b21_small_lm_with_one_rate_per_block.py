"""Pretraining of a small language model under FSDP2; its Adam has one second moment per block of a parameter (Adam-mini).

Thread: zyushun/Adam-mini issue #42 "FSDP1 block statistics are not reduced when each rank sees only one GPU" (2026): the
optimizer takes the number of visible devices for the number of ranks and leaves the reduction of the blocks' statistics out.
Fault: BlockAdam sets world_size to the number of CUDA devices (at most one per process here), so block_mean averages the squared
gradients of norms and biases over the rank's own shard, and each shard gets a step size of its own.
REPAIR: `self.world_size = torch.cuda.device_count()` -> `self.world_size = self.mesh.size() if self.mesh else 1`
A right first sentence says: the optimizer's second moment of a one-dimensional parameter (norm weight or bias), one number for
the whole tensor, is the mean over the rank's local shard, without an all-reduce over the FSDP ranks, so the updates are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, ROWS = 24, 16, 4, 10, 2, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class SmallLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class BlockAdam(torch.optim.Optimizer):
    """A matrix has one second moment per row, a vector has a single one."""

    def __init__(self, parameters, lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(parameters, defaults)
        first = self.param_groups[0]["params"][0]
        self.mesh = first.device_mesh if isinstance(first, DTensor) else None
        self.world_size = torch.cuda.device_count()

    def block_mean(self, squares):
        if squares.ndim == 2:
            return squares.mean(1, keepdim=True)
        total = torch.stack([squares.sum(), squares.new_tensor(squares.numel())])
        if self.mesh is not None and self.world_size > 1:
            dist.all_reduce(total, group=self.mesh.get_group())
        return total[0] / total[1]

    def update(self, weight, grad, state, group):
        (b1, b2), mean = group["betas"], self.block_mean(grad**2)
        if not state:
            state.update(steps=0, m=torch.zeros_like(weight), vmean=torch.zeros_like(mean))
        state["steps"] += 1
        state["m"].lerp_(grad, 1 - b1)
        state["vmean"].lerp_(mean, 1 - b2)
        scale = (state["vmean"] / (1 - b2 ** state["steps"])).sqrt() + group["eps"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] / (1 - b1 ** state["steps"]) * state["m"] / scale)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(local(p), local(p.grad), self.state[p], group)


def plain():
    return SmallLM()


def parallel(mesh):
    model = SmallLM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"])


def loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


generator = torch.Generator().manual_seed(42)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="fsdp", ranks={"fsdp": 2}, optimizer=BlockAdam)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
