"""SimCLR pretraining of a small image encoder under DDP, with the NT-Xent loss over the views gathered from all ranks.

Thread: lightly-ai/lightly issue #1528 "Bug in `GatherLayer.backward`" (2024): training with NTXentLoss on two GPUs didn't match
one GPU, as the backward pass of the gather layer doesn't sum the gradients over the GPUs.
Fault: GatherLayer.backward returns the rank's own slice of its own gradient; what the other ranks' losses send back to this
rank's embeddings, which they use as negatives, is dropped.
REPAIR: `grad_input[:] = grads[dist.get_rank()]` -> `dist.reduce_scatter(grad_input, [grad.contiguous() for grad in grads])`
A right first sentence says: the backward pass of the all-gather of the embeddings (GatherLayer) lacks a sum over the ranks, so an
embedding gets no gradient from the losses of the other ranks and the gradients of the whole network are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

TEMPERATURE = 0.2


class Encoder(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(2, 2 * width)

    def forward(self, images):
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x)))
        return x.flatten(2).mean(-1)


class ProjectionHead(nn.Sequential):
    def __init__(self, width=16, hidden=16, out=8):
        super().__init__(
            nn.Linear(width, hidden, bias=False),
            nn.LayerNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, out),
        )


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.projection = Encoder(), ProjectionHead()

    def forward(self, first, second):
        views = torch.cat([first, second])
        return F.normalize(self.projection(self.backbone(views)), dim=-1).chunk(2)


class GatherLayer(torch.autograd.Function):
    """Gathers tensors from all ranks and keeps the graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        grad_input = torch.zeros_like(x)
        grad_input[:] = grads[dist.get_rank()]
        return grad_input


class NTXentLoss(nn.Module):
    def __init__(self, temperature=TEMPERATURE, gather_distributed=False):
        super().__init__()
        self.temperature, self.gather_distributed = temperature, gather_distributed

    def gather(self, out):
        if not self.gather_distributed:
            return out
        return torch.cat(GatherLayer.apply(out.contiguous()))

    def forward(self, out0, out1):
        batch = len(out0)
        all0, all1 = self.gather(out0), self.gather(out1)
        start = batch * dist.get_rank() if self.gather_distributed else 0
        own = torch.arange(start, start + batch, device=out0.device)
        itself = F.one_hot(own, len(all0)).bool()

        logits00 = (out0 @ all0.T / self.temperature).masked_fill(itself, float("-inf"))
        logits01 = out0 @ all1.T / self.temperature
        logits10 = out1 @ all0.T / self.temperature
        logits11 = (out1 @ all1.T / self.temperature).masked_fill(itself, float("-inf"))
        rows0 = torch.cat([logits01, logits00], dim=1)
        rows1 = torch.cat([logits10, logits11], dim=1)
        return F.cross_entropy(torch.cat([rows0, rows1]), own.repeat(2))


def plain():
    return SimCLR()


def parallel(mesh):
    return DistributedDataParallel(SimCLR())


def loss(model, batch):
    return NTXentLoss()(*model(*batch))


def step(model, batch):
    value = NTXentLoss(gather_distributed=True)(*model(*batch))
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(1528)


def two_views(number=12):
    images = torch.randn(number, 3, 6, 6, generator=generator, dtype=torch.float64)
    jitter = torch.randn(2, number, 3, 6, 6, generator=generator, dtype=torch.float64)
    return images + 0.3 * jitter[0], images.flip(-1) + 0.3 * jitter[1]


batches = [two_views() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
