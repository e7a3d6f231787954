"""DeepSpeed-Ulysses with rotary embeddings: every rank rotates its part from position 0.

Thread: https://github.com/deepspeedai/Megatron-DeepSpeed/pull/392 "ds-sequence-parallel(ulysses) for
rope.", 2024-05-30.
Wrong: queries and keys are rotated before the all-to-all, each rank's by the angles of positions
0 .. S/n - 1. Rank i must begin at i * S/n.
A right diagnosis says: the error is inside attention, between the outputs of q_proj and k_proj and the
output of local_attention (the all-to-all mixes it into both ranks); projections agree. The rotation of
rank 1 of sp is that of rank 0's positions.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, VOCAB = 16, 4, 20


def all_to_all(x, scatter, gather, group):
    n = dist.get_world_size(group)
    send = torch.stack(x.chunk(n, scatter)).contiguous()
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    return torch.cat(list(receive), gather)


class SeqAllToAll4D(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.args = scatter, gather, group
        return all_to_all(x, scatter, gather, group)

    @staticmethod
    def backward(ctx, grad):
        scatter, gather, group = ctx.args
        return all_to_all(grad, gather, scatter, group), None, None, None


class RotaryEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer(
            "inv_freq", 1.0 / 100 ** (torch.arange(0, dim, 2) / dim), persistent=False
        )

    def forward(self, length):
        angles = torch.outer(torch.arange(length).to(self.inv_freq), self.inv_freq)
        return torch.cat([angles, angles], -1)[None, :, None, :]  # [1, s, 1, d]


def apply_rotary(t, angles):
    first, second = t.chunk(2, -1)
    return t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class LocalAttention(nn.Module):
    def forward(self, q, k, v):  # [b, s, h, d]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class ParallelAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.local_attention, self.o_proj = LocalAttention(), nn.Linear(DIM, DIM, bias=False)
        self.rotary = RotaryEmbedding(DIM // HEADS)
        self.sp_group = None

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        angles = self.rotary(x.shape[1])
        q, k = apply_rotary(q, angles), apply_rotary(k, angles)
        if self.sp_group is None:
            out = self.local_attention(q, k, v)
        else:
            q, k, v = (SeqAllToAll4D.apply(t, 2, 1, self.sp_group) for t in (q, k, v))
            out = SeqAllToAll4D.apply(self.local_attention(q, k, v), 1, 2, self.sp_group)
        return self.o_proj(out.flatten(2))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attn, self.lm_head = ParallelAttention(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.lm_head(x + self.attn(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Llama()
    model.attn.sp_group = mesh.get_group("sp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(37)
batches = [
    {name: torch.randint(VOCAB, (2, 8), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split={"sp": 1})
    print(titanlite.compare(Llama, parallel, **options))
