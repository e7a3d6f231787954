"""A small vision transformer that labels the patches of road scenes, under FSDP2, with a clipping function of its own.

Thread: sgl-project/SpecForge pull request #663 "fix(optimizer): clip by global grad norm across FSDP ranks in
BF16Optimizer" (2026): the clipping sees a rank-local norm of the reduce-scattered shards and each rank picks a
different coefficient; likewise pytorch/pytorch issue #170862 (2025) about FSDP2.
Fault: clip takes the norms of the local tensors of FSDP2's sharded gradients; each rank gets the norm of its own shards
and scales its shards of the gradients by a factor of its own.
REPAIR: `norms = [local(grad).norm() for grad in grads]` -> `norms = [whole(grad.norm()) for grad in grads]`
A right first sentence says: clipping uses the norm of each rank's own gradient shards, not reduced over dp; the ranks
scale by different and too large factors, so the weights are off after the step, while the gradients before it are
right.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite

CLASSES, PATCH, SIZE, WIDTH, HEADS, LAYERS, ROWS = 4, 4, 16, 16, 2, 3, 6
GRID, MAX_NORM = SIZE // PATCH, 0.1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale1 = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.scale2 = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        x = x + self.scale1 * self.attention(self.norm1(x))
        return x + self.scale2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class SegmentationViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(GRID * GRID, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ConvTranspose2d(WIDTH, CLASSES, PATCH, stride=PATCH)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.decoder(self.norm(x).mT.unflatten(2, (GRID, GRID)))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [local(grad).norm() for grad in grads]
    norm = torch.stack(norms).norm()
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local(grad).mul_(scale)
    return norm


def plain():
    return SegmentationViT()


def parallel(mesh):
    model = SegmentationViT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)


def state_for_checkpoint(model):
    return {name: whole(p.detach()).cpu() for name, p in model.named_parameters()}


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


generator = torch.Generator().manual_seed(144054)


def scenes():
    """A road that narrows towards the horizon, sky above it, and a few obstacles."""
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    horizon = torch.randint(4, 9, (ROWS, 1, 1), generator=generator)
    middle = torch.randint(5, 11, (ROWS, 1, 1), generator=generator)
    labels = ((columns - middle).abs() <= (rows - horizon)).long()
    labels = labels.masked_fill(rows < horizon, 2)
    obstacles = torch.rand(ROWS, SIZE, SIZE, generator=generator) < 0.05
    labels = labels.masked_fill(obstacles & (rows >= horizon), 3)
    colours = torch.tensor([[0.2, 0.6, 0.2], [0.4, 0.4, 0.4], [0.3, 0.5, 0.9], [0.9, 0.1, 0.1]])
    noise = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return colours.double()[labels].permute(0, 3, 1, 2) + 0.1 * noise, labels


batches = [scenes() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    clip=clip,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
