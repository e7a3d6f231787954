"""Fine-tuning of a small causal model on arithmetic, on four replicas that needn't be sharded, by FSDP1.

Thread: pytorch/pytorch issue #154888 "Potential Bug with HYBRID_SHARD and (n, 1) Device Mesh Falling Back to NO_SHARD"
(2025, not to be fixed) and verl-project/verl issue #7493 "[BUG][FSDP1] fsdp_size=1 on multiple GPUs silently disables
gradient synchronization" (2026).
Fault: the hybrid mesh is 4 x 1. FSDP1 finds a shard group of one rank, falls back from HYBRID_SHARD to NO_SHARD (with a
warning about the world size) and then reduces gradients over the shard group alone, never over the replicas.
REPAIR: `device_mesh=mesh,` -> `device_mesh=mesh["ddp"],`; and
`sharding_strategy=get_sharding_strategy(mesh)` -> `sharding_strategy=get_sharding_strategy(mesh["ddp"])`
A right first sentence says: the gradients of all parameters stay those of each rank's own rows, they are never averaged
over ddp: FSDP1 with HYBRID_SHARD and a shard group of size one falls back to NO_SHARD within that group.
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import titanlite

BASE, WIDTH, HEADS, LENGTH, PROMPT, ROWS = 12, 16, 2, 8, 5, 16
PLUS, EQUALS = 10, 11


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 28, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(28, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(BASE, WIDTH)
        self.embed_positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm, self.lm_head = RMSNorm(), nn.Linear(WIDTH, BASE, bias=False)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.size(1))
        x = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def get_sharding_strategy(device_mesh):
    if device_mesh.ndim == 1:
        return ShardingStrategy.FULL_SHARD
    if device_mesh.ndim == 2:
        return ShardingStrategy.HYBRID_SHARD
    raise NotImplementedError(f"device mesh of {device_mesh.ndim} dimensions")


def get_fsdp_wrap_policy():
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer})


def plain():
    return CausalLM()


def parallel(mesh):
    """The mesh is (world_size // fsdp_size, fsdp_size), as the configuration says."""
    return FSDP(
        CausalLM(),
        auto_wrap_policy=get_fsdp_wrap_policy(),
        sharding_strategy=get_sharding_strategy(mesh),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        forward_prefetch=False,
    )


def loss(model, batch):
    """The loss of the answer's tokens; every row has the same number of them."""
    logits = model(batch["input_ids"][:, :-1])[:, PROMPT - 1 :]
    labels = batch["input_ids"][:, PROMPT:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step(model, batch):
    total = 0.0
    for input_ids in batch["input_ids"].chunk(2):
        value = loss(model, {"input_ids": input_ids}) / 2
        value.backward()
        total = total + value.detach()
    return total


generator = torch.Generator().manual_seed(154888)


def sums():
    """For instance 4 7 + 6 = 0 5 3, with one digit that pads."""
    a = torch.randint(10, 100, (ROWS,), generator=generator)
    b = torch.randint(0, 10, (ROWS,), generator=generator)
    plus, equals, c = torch.full_like(a, PLUS), torch.full_like(a, EQUALS), a + b
    columns = [a // 10, a % 10, plus, b, equals, c // 100, c // 10 % 10, c % 10]
    return {"input_ids": torch.stack(columns, 1)}


batches = [sums() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="ddp",
    ranks={"ddp": 4, "fsdp": 1},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
