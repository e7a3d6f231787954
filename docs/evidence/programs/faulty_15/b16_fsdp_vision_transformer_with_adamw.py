"""A small vision transformer under FullyShardedDataParallel with original parameters and AdamW of two parameter groups.

Thread: mlfoundations/open_clip pull request #358 "[WIP] Support FSDP" (2023): the rule that excludes parameters from weight decay
asks for `p.ndim < 2`, which is true of every parameter under FSDP, as it flattens them.
Fault: configure_adamw sorts the parameters by `p.ndim < 2` after wrapping; with use_orig_params the sharded parameters are flat
views of one dimension, so all of them, matrices too, land in the group without weight decay.
REPAIR: `return p.ndim < 2 or "norm" in name or "bias" in name` -> `return "norm" in name or "bias" in name`
A right first sentence says: the weights of the matrices aren't decayed in the parallel run, since FSDP's sharded parameters are
one-dimensional and the rule by `ndim` puts all of them into the group with weight_decay 0; the gradients are right.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import titanlite

WIDTH, HEADS, PATCH, SIDE, CLASSES = 12, 3, 4, 8, 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (SIDE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def exclude(name, p):
    return p.ndim < 2 or "norm" in name or "bias" in name


def configure_adamw(named_parameters, lr=5e-3, weight_decay=0.2):
    decay, rest = [], []
    for name, p in named_parameters:
        (rest if exclude(name, p) else decay).append(p)
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.98), eps=1e-6
    )


NAMES = [name for name, _ in VisionTransformer().named_parameters()]


def plain():
    return VisionTransformer()


def parallel(mesh):
    model = FullyShardedDataParallel(
        VisionTransformer(),
        process_group=mesh.get_group("dp"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return model, configure_adamw(model.named_parameters())


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(358)
batches = [
    (
        torch.randn(6, 3, SIDE, SIDE, generator=generator, dtype=torch.float64),
        torch.randint(0, CLASSES, (6,), generator=generator),
    )
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: configure_adamw(zip(NAMES, parameters, strict=True)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
