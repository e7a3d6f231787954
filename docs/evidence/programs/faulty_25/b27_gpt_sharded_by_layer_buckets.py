"""A character-level GPT whose weights live in shards; buckets of one layer gather weights and scatter gradients.

Thread: NVIDIA/Megatron-LM pull request #4609 "Fix gradient corruption with layerwise param all-gather overlap" (2026):
the parameter sync takes bucket.grad_data as the receive buffer of its all-gather; it wasn't zeroed after the copy into
the model's parameters, and as main_grad is a view of it, the backward pass adds its gradients to the gathered weights.
Fault: Bucket.finish_param_sync copies grad_data to param_data and leaves the gathered weights in grad_data, to which
the hooks of the backward pass then add; so every parameter's gradient is its true gradient plus the weight itself.
REPAIR: `self.param_data.copy_(self.grad_data)` -> `self.param_data.copy_(self.grad_data), self.grad_data.zero_()`
A right first sentence says: the gradient of every parameter contains the parameter itself (as if by a weight decay of
1), since the all-gathered weights remain in the gradient buffer (Bucket.grad_data) when the gradients are added to it.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import titanlite

TEXT = "the weights of a layer come together when they are needed and part again after that. "
LETTERS = sorted(set(TEXT))
VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, PASSES = len(LETTERS) // 2 * 2 + 2, 16, 2, 10, 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, letters):
        x = self.wte(letters) + self.wpe.weight[: letters.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Bucket:
    """The parameters of some modules, flat; row r of a buffer has what rank r owns of each."""

    def __init__(self, named_parameters, group):
        self.named, self.group = dict(named_parameters), group
        self.size = dist.get_world_size(group)
        numel = sum(p.numel() for p in self.named.values())
        self.param_data = torch.zeros(self.size, numel)
        self.grad_data = torch.zeros(self.size, numel)
        self.full = {}

    def start_param_sync(self):
        shard = torch.cat([p.detach().flatten() for p in self.named.values()])
        self.handle = dist.all_gather_into_tensor(
            self.grad_data.view(-1), shard, group=self.group, async_op=True
        )

    def finish_param_sync(self):
        self.handle.wait()
        self.param_data.copy_(self.grad_data)
        offset = 0
        for name, p in self.named.items():
            columns = slice(offset, offset + p.numel())
            shape = self.size * p.shape[0], *p.shape[1:]
            full = self.param_data[:, columns].reshape(shape).requires_grad_()
            full.main_grad = self.grad_data[:, columns]
            full.register_post_accumulate_grad_hook(self.accumulate)
            self.full[name], offset = full, offset + p.numel()

    def accumulate(self, full):
        full.main_grad.add_(full.grad.reshape(self.size, -1))
        full.grad = None

    def scatter_gradients(self):
        own = torch.empty_like(self.grad_data[0])
        dist.reduce_scatter_tensor(own, self.grad_data.view(-1), group=self.group)
        pieces = own.div_(self.size).split([p.numel() for p in self.named.values()])
        for p, piece in zip(self.named.values(), pieces):
            p.grad = piece.view_as(p).clone()


class ShardedModel:
    def __init__(self, model, group):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(p.detach().chunk(size)[rank].clone()))
        named = list(model.named_parameters())
        layers = [[f"h.{i}."] for i in range(len(model.h))] + [["wte", "wpe", "ln_f", "lm_head"]]
        self.model, self.buckets = (
            model,
            [
                Bucket([n for n in named if n[0].startswith(tuple(layer))], group)
                for layer in layers
            ],
        )

    def __call__(self, letters):
        full = {name: p for bucket in self.buckets for name, p in bucket.full.items()}
        return functional_call(self.model, full, (letters,))


def parallel(mesh):
    return ShardedModel(GPT(), mesh.get_group("dp"))


def shard(name):
    return 0, "dp"


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(sharded, batch):
    for bucket in sharded.buckets:
        bucket.grad_data.zero_()
        bucket.start_param_sync()
    for bucket in sharded.buckets:
        bucket.finish_param_sync()
    total = 0.0
    for part in batch.chunk(PASSES):
        value = loss(sharded, part) / PASSES
        value.backward()
        total = total + value.detach()
    for bucket in sharded.buckets:
        bucket.scatter_gradients()
    return total


generator = torch.Generator().manual_seed(4609)
letters = torch.tensor([LETTERS.index(c) for c in TEXT])
starts = torch.randint(0, len(TEXT) - LENGTH, (3, ROWS), generator=generator)
batches = [torch.stack([letters[i : i + LENGTH + 1] for i in row]) for row in starts.tolist()]

arguments = GPT, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
