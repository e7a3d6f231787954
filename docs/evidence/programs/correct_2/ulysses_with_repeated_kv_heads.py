"""Ulysses over 4 ranks with 2 key/value heads: they are repeated before the all-to-all.

Thread: https://github.com/verl-project/verl/issues/1226 "Current Ulysses sequence parallel implementation
sets an upper bound on its size", 2025-04-23 ("kv head can be repeated to sp_size").
Right: each key/value head is repeated twice in place (repeat_interleave), so that after the all-to-all a
rank's query heads meet their own one. Autograd adds the copies' gradients.
Must not be accused: key/value heads that two ranks share, gradients of k_proj and v_proj, rows and heads
that are parts of the reference's along one axis of 4.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8, 2, 4, 20
DIM = HEADS * HEAD_DIM


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter_dim, gather_dim, group):
        ctx.args = gather_dim, scatter_dim, group
        inputs = torch.stack(x.chunk(dist.get_world_size(group), scatter_dim)).contiguous()
        outputs = torch.empty_like(inputs)
        dist.all_to_all_single(outputs, inputs, group=group)
        return torch.cat(outputs.unbind(), gather_dim)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.args), None, None, None


def gather_seq_scatter_heads(x, group):
    return AllToAll.apply(x, 2, 1, group)


def gather_heads_scatter_seq(x, group):
    return AllToAll.apply(x, 1, 2, group)


class Qwen2Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM)
        self.k_proj, self.v_proj = (nn.Linear(DIM, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.sp_group = None

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, HEAD_DIM)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.sp_group is not None:
            repeats = max(dist.get_world_size(self.sp_group) // KV_HEADS, 1)
            k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
            q, k, v = (gather_seq_scatter_heads(t, self.sp_group) for t in (q, k, v))
        groups = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.sp_group is not None:
            out = gather_heads_scatter_seq(out, self.sp_group)
        return self.o_proj(out.flatten(2))


class Qwen2(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.self_attn, self.lm_head = Qwen2Attention(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        return self.lm_head(x + self.self_attn(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Qwen2()
    model.self_attn.sp_group = mesh.get_group("sp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(47)
batches = [
    {name: torch.randint(VOCAB, (2, 8), generator=generator) for name in ("input_ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"sp": 4}, split={"sp": 1})
    print(titanlite.compare(Qwen2, parallel, **options))
