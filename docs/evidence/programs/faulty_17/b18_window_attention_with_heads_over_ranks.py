"""A Swin V2 image classifier with its attention heads cut over two ranks, on two data parallel replicas.

Thread: NVIDIA/TransformerEngine issue #1975 "k_pos_emb in MLA is not reduced across TP ranks" (2025) and bigcode-project/Megatron-LM
issue #11 (2022): a tensor computed alike on all ranks is used by each rank's own heads, so the ranks' gradients differ and need a sum.
Fault: the small network of the continuous position bias is kept whole on every rank; WindowAttention.bias picks the rank's own heads
of its output, and nothing sums the gradients over the "tp" ranks, so each trains a copy with the gradient of half the heads.
REPAIR: `table = self.cpb(coordinates)` -> `table = CopyToHeads.apply(self.cpb(coordinates), self.tp_group)`
A right first sentence says: the position bias network is replicated over the tensor parallel ranks but gets the gradient of each
rank's own heads only, without an all-reduce over tp, so its gradients are partial and the copies drift apart.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

SIZE, PATCH, WINDOW, WIDTH, HEADS, HIDDEN, CLASSES = 16, 2, 4, 16, 4, 32, 5


def all_reduced(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class CopyToHeads(torch.autograd.Function):
    """The input as it is; sums the gradients of the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (grad if ctx.group is None else all_reduced(grad, ctx.group)), None


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return x if group is None else all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class WindowAttention(nn.Module):
    tp_group = None
    heads = slice(None)

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=name != "k") for name in "qkv")
        self.logit_scale = nn.Parameter(torch.full((HEADS, 1, 1), 2.0))
        self.cpb = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, HEADS, bias=False))
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.proj_bias = nn.Parameter(torch.zeros(WIDTH))

    def bias(self):
        line = torch.arange(WINDOW, dtype=self.q.weight.dtype)
        points = torch.cartesian_prod(line, line)
        offsets = (points[:, None] - points) * 8 / (WINDOW - 1)
        coordinates = offsets.sign() * torch.log2(1 + offsets.abs()) / 3
        table = self.cpb(coordinates)
        return 16 * table.permute(2, 0, 1)[self.heads].sigmoid()

    def forward(self, x):
        x = CopyToHeads.apply(x, self.tp_group)
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        weights = (cosine * self.logit_scale.clamp(max=4.6).exp() + self.bias()).softmax(-1)
        y = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return SumOfRanks.apply(y, self.tp_group) + self.proj_bias


class Block(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.attention = WindowAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def windows(self, x):
        b, side, n = x.size(0), x.size(1), x.size(1) // WINDOW
        y = x.roll((-self.shift, -self.shift), (1, 2)).view(b, n, WINDOW, n, WINDOW, WIDTH)
        y = self.attention(y.transpose(2, 3).reshape(b * n * n, WINDOW**2, WIDTH))
        y = y.view(b, n, n, WINDOW, WINDOW, WIDTH).transpose(2, 3).reshape(b, side, side, WIDTH)
        return y.roll((self.shift, self.shift), (1, 2))

    def forward(self, x):
        x = x + self.norm1(self.windows(x))
        return x + self.norm2(self.mlp(x))


class SwinV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(Block(shift) for shift in (0, WINDOW // 2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean((1, 2)))


def cut(parameter, dim, rank, world):
    return nn.Parameter(parameter.detach().chunk(world, dim)[rank].clone())


def cut_model(model, group):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for block in model.blocks:
        attention = block.attention
        attention.tp_group = group
        attention.heads = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
        attention.logit_scale = cut(attention.logit_scale, 0, rank, world)
        for layer in (attention.q, attention.k, attention.v):
            layer.weight = cut(layer.weight, 0, rank, world)
            if layer.bias is not None:
                layer.bias = cut(layer.bias, 0, rank, world)
        attention.proj.weight = cut(attention.proj.weight, 1, rank, world)
    return model


def plain():
    return SwinV2()


def parallel(mesh):
    model = cut_model(SwinV2(), mesh.get_group("tp"))
    model.dp_group = mesh.get_group("dp")
    return model


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def step(model, batch):
    value, replicas = loss(model, batch), dist.get_world_size(model.dp_group)
    value.backward()
    for parameter in model.parameters():
        parameter.grad = all_reduced(parameter.grad, model.dp_group) / replicas
    return all_reduced(value.detach(), model.dp_group) / replicas


generator = torch.Generator().manual_seed(1975)
batches = [
    (
        torch.randn(4, 3, SIZE, SIZE, generator=generator, dtype=torch.float64),
        torch.randint(0, CLASSES, (4,), generator=generator),
    )
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2, "tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
