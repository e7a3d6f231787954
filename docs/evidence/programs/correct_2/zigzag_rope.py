"""Context parallelism in zigzag order: rank i has chunks i and 2n - 1 - i of the sequence.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/560 "[QUESTION] Issue regarding correctness of RoPE in
context parallel", 2023-10-25.
Right: get_pos_emb_on_this_cp_rank selects the angles of the same two chunks; keys and values are gathered
in the ranks' order and masked by their true positions.
Must not be accused: the order of tokens, positions that do not begin at 0, gathered keys in another
order than on one process.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, VOCAB, SEQ = 16, 2, 20, 8


class AllGatherKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, group):
        ctx.group = group
        parts = [torch.empty_like(kv) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, kv.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def on_this_cp_rank(t, group, rank=None):
    """the two chunks of dimension 0 that belong to the rank"""
    n, rank = dist.get_world_size(group), dist.get_rank(group) if rank is None else rank
    t = t.view(2 * n, t.shape[0] // (2 * n), *t.shape[1:])
    return t[[rank, 2 * n - rank - 1]].flatten(0, 1)


def rotate(t, angles):  # [s, b, h, d]
    x, y = t.chunk(2, -1)
    return t * angles.cos() + torch.cat([-y, x], -1) * angles.sin()


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.cp_group = None

    def forward(self, x):  # [s, b, e]
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.linear_qkv(x).chunk(3, -1))
        frequencies = 1.0 / 100 ** (torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS))
        positions = key_positions = torch.arange(SEQ)
        if self.cp_group is not None:
            ranks = range(dist.get_world_size(self.cp_group))
            parts = [on_this_cp_rank(positions, self.cp_group, rank) for rank in ranks]
            positions, key_positions = on_this_cp_rank(positions, self.cp_group), torch.cat(parts)
        angles = torch.outer(positions.to(x.dtype), frequencies.to(x.dtype))
        angles = torch.cat([angles, angles], -1)[:, None, None]
        q, k = rotate(q, angles), rotate(k, angles)
        if self.cp_group is not None:
            k, v = AllGatherKV.apply(k, self.cp_group), AllGatherKV.apply(v, self.cp_group)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        mask = positions[:, None] >= key_positions[None, :]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.linear_proj(out.permute(2, 0, 1, 3).flatten(2))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attentions = nn.ModuleList(SelfAttention() for _ in range(2))
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, attention in zip(self.norms, self.attentions):
            x = x + attention(norm(x))
        return self.output(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def get_batch_on_this_cp_rank(batch, mesh):
    return {name: on_this_cp_rank(t, mesh.get_group("cp")) for name, t in batch.items()}


def parallel(mesh):
    model = GPT()
    for attention in model.attentions:
        attention.cp_group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(42)
batches = [
    {name: torch.randint(VOCAB, (SEQ, 3), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split=get_batch_on_this_cp_rank)
    print(titanlite.compare(GPT, parallel, **options))
