"""A Qwen-like decoder with norms of queries and keys, tensor parallel by hand in the way of Megatron-LM.

Thread: NVIDIA-NeMo/RL issue #3716 "Split-API train step misses the TP grad all-reduce for replicated params (qk-layernorm / SP
layernorms)" (2026): each rank's gradient of q_layernorm covers its own heads alone, nothing sums it, and the copies drift apart.
Fault: q_norm and k_norm have one weight for all heads, held by every rank; a rank applies it to its own heads, so its gradient
is a part of the sum over the heads. The weight doesn't pass through CopyToRanks, whose backward pass would all-reduce it.
REPAIR: `return F.rms_norm(x, (HEAD,), norm.weight, EPS)` -> `return F.rms_norm(x, (HEAD,), CopyToRanks.apply(norm.weight), EPS)`
A right first sentence says: the gradients of q_norm.weight and k_norm.weight are partial sums over each rank's own heads and
aren't all-reduced over tp, so the replicated weights get different gradients and drift apart.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, HEAD, HIDDEN, LENGTH, EPS = 19, 12, 4, 4, 20, 7, 1e-6


class CopyToRanks(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient passes through."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, eps=EPS), nn.RMSNorm(HEAD, eps=EPS)
        self.o = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def head_norm(self, norm, x):
        return norm(x)

    def attend(self, x):
        q, k, v = (
            project(x).unflatten(-1, (self.heads, HEAD)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = self.head_norm(self.q_norm, q), self.head_norm(self.k_norm, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=EPS), nn.RMSNorm(WIDTH, eps=EPS)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH, eps=EPS)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ParallelAttention(Attention):
    def head_norm(self, norm, x):
        return F.rms_norm(x, (HEAD,), norm.weight, EPS)

    def forward(self, x):
        return SumOverRanks.apply(self.attend(CopyToRanks.apply(x)))


class ParallelMlp(Mlp):
    def forward(self, x):
        return SumOverRanks.apply(super().forward(CopyToRanks.apply(x)))


COLUMN, ROW = ("q", "k", "v", "gate", "up"), ("o", "down")


def shard(name):
    layer = name.split(".")[-2] if "." in name else ""
    if layer in COLUMN:
        return 0, "tp"
    return (1, "tp") if layer in ROW else None


def parallel(mesh):
    model = Decoder()
    rank, world = mesh.get_local_rank("tp"), mesh.size()
    for layer in model.layers:
        layer.attention.__class__, layer.mlp.__class__ = ParallelAttention, ParallelMlp
        layer.attention.heads = HEADS // world
    for name, parameter in model.named_parameters():
        cut = shard(name)
        if cut:
            parameter.data = parameter.data.chunk(world, cut[0])[rank].contiguous()
    return model


def plain():
    return Decoder()


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


generator = torch.Generator().manual_seed(3716)
batches = [
    tuple(torch.randint(0, VOCAB, (3, LENGTH), generator=generator) for _ in range(2))
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    shard=shard,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
