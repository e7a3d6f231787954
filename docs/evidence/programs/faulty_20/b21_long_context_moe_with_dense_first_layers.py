"""A decoder with dense first layers and sparse later ones on long rows, whose tokens are shared out among context parallel ranks.

Thread: NVIDIA-NeMo/Automodel issue #3507 "MiniMax-M3: dense layers 0-2 silently lose context parallelism when ep_size > 1"
(2026): the set-up for sparse models goes through the sparse layers only; the dense ones attend within the rank's own part.
Fault: apply_cp gives the group to the layers with experts alone, so the attention of the first layers doesn't gather keys and
values, and the tokens of all ranks but the first don't see what comes before their rank's part.
REPAIR: `layers = [layer for layer in model.layers if isinstance(layer.mlp, Experts)]` -> `layers = list(model.layers)`
A right first sentence says: the attention of the dense first layers (layers.0, layers.1) isn't context parallel: it attends only
to the rank's own tokens, without the keys and values of the earlier ranks, since only the sparse layers get the cp group.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, DENSE, SPARSE = 23, 12, 3, 12, 2, 2
EXPERTS, BALANCE = 3, 0.05


class GatherTokens(torch.autograd.Function):
    """All ranks' tokens, in order; each rank's gradients of them are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.group = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        first = 0
        if self.group is not None:
            first = dist.get_rank(self.group) * x.size(1)
            k, v = GatherTokens.apply(k, self.group), GatherTokens.apply(v, self.group)
        seen = torch.arange(k.size(2)) <= first + torch.arange(q.size(2))[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x))), 0.0


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.group = nn.Linear(WIDTH, EXPERTS, bias=False), None
        self.experts = nn.ModuleList(Dense() for _ in range(EXPERTS))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), EXPERTS).to(scores)
        load = chosen.mean((0, 1))
        if self.group is not None:
            dist.all_reduce(load, group=self.group)
            load = load / dist.get_world_size(self.group)
        gates = (scores * chosen).unbind(-1)
        y = sum(
            gate.unsqueeze(-1) * expert(x)[0]
            for gate, expert in zip(gates, self.experts, strict=True)
        )
        return y, EXPERTS * (load * scores.mean((0, 1))).sum()


class Layer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), mlp

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        y, balance = self.mlp(self.norm_2(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        mlps = [Dense() for _ in range(DENSE)] + [Experts() for _ in range(SPARSE)]
        self.layers = nn.ModuleList(Layer(mlp) for mlp in mlps)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, positions):
        x, balance = self.embed(tokens) + self.places(positions), 0.0
        for layer in self.layers:
            x, term = layer(x)
            balance = balance + term
        return self.head(self.norm(x)), balance


def apply_cp(model, group):
    layers = [layer for layer in model.layers if isinstance(layer.mlp, Experts)]
    for layer in layers:
        layer.attention.group = layer.mlp.group = group
    return DistributedDataParallel(model, process_group=group)


def plain():
    return Model()


def parallel(mesh):
    return apply_cp(Model(), mesh.get_group("cp"))


def loss(model, batch):
    tokens, labels, positions = batch
    logits, balance = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + BALANCE * balance


generator = torch.Generator().manual_seed(3507)


def documents(rows=3):
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(rows, -1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), positions.contiguous()


batches = [documents() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split={"cp": 1},
    ranks={"cp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
