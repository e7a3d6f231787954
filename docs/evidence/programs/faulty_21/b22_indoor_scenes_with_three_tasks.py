"""Segmentation, depth and surface normals of indoor scenes under DDP; gradient surgery (PCGrad) balances the three losses.

Thread: median-research-group/LibMTL issue #16 "Pytorch Distributed DataParallel support" (2022): gradient surgery needs the
gradient of every task on its own, and DDP doesn't synchronize these as it does with one backward pass.
Fault: Surgery.weights compares the tasks' gradients of the rank's own images; autograd.grad passes DDP's hooks by, so each rank
finds other conflicts, gives the tasks other weights, and DDP then averages gradients of differently weighted losses.
REPAIR: `rows = torch.stack(rows)` -> `rows = self.over_ranks(torch.stack(rows))`
A right first sentence says: the conflicts between the tasks (inner products of their gradients, from torch.autograd.grad) are
computed from each rank's local gradients before any averaging over dp, so the ranks use different task weights.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIZE, WIDTH, CLASSES, ROWS = 8, 8, 5, 6


class Down(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Up(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.mix = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)
        self.predict = nn.Conv2d(WIDTH, outputs, 1)

    def forward(self, fine, coarse):
        x = torch.cat([fine, F.interpolate(coarse, scale_factor=2)], dim=1)
        return F.interpolate(self.predict(F.silu(self.mix(x))), scale_factor=2, mode="bilinear")


class SceneNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([Down(3, WIDTH), Down(WIDTH, WIDTH)])
        heads = {"labels": CLASSES, "depth": 1, "normals": 3}
        self.heads = nn.ModuleDict({name: Up(outputs) for name, outputs in heads.items()})

    def forward(self, images):
        fine = self.encoder[0](images)
        coarse = self.encoder[1](fine)
        return {name: head(fine, coarse) for name, head in self.heads.items()}


def task_losses(predicted, batch):
    """One value per task, of logits, logarithms of depths, and directions."""
    depth = predicted["depth"].squeeze(1) - batch["depth"].log()
    cosine = F.cosine_similarity(predicted["normals"], batch["normals"], dim=1)
    return [
        F.cross_entropy(predicted["labels"], batch["labels"]),
        depth.square().mean(),
        1 - cosine.mean(),
    ]


class Surgery:
    """The sum of the projected gradients, expressed by one weight for each task."""

    def __init__(self, encoder, group=None):
        self.parameters, self.group = list(encoder.parameters()), group

    def over_ranks(self, x):
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
            x = x / dist.get_world_size(self.group)
        return x

    def weights(self, losses):
        rows = []
        for value in losses:
            grads = torch.autograd.grad(value, self.parameters, retain_graph=True)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
        rows = torch.stack(rows)
        products = rows @ rows.mT
        shares = torch.eye(len(losses), dtype=products.dtype)
        for i, share in enumerate(shares):
            for j in range(len(losses)):
                along = share @ products[:, j]
                if i != j and along < 0:
                    share[j] -= along / products[j, j]
        return shares.sum(0)

    def __call__(self, losses):
        return self.weights(losses) @ torch.stack(losses)


def plain():
    return SceneNet()


def parallel(mesh):
    model = SceneNet()
    surgery = Surgery(model.encoder, mesh.get_group("dp"))
    return DistributedDataParallel(model), surgery


def loss(model, batch):
    return Surgery(model.encoder)(task_losses(model(batch["images"]), batch))


def step(built, batch):
    model, surgery = built
    value = surgery(task_losses(model(batch["images"]), batch))
    value.backward()
    return surgery.over_ranks(value.detach().clone())


generator = torch.Generator().manual_seed(16)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def scenes():
    images = randn(ROWS, 3, SIZE, SIZE)
    return {
        "images": images,
        "labels": torch.randint(0, CLASSES, (ROWS, SIZE, SIZE), generator=generator),
        "depth": (0.5 * images.mean(1) + 0.3 * randn(ROWS, SIZE, SIZE)).exp(),
        "normals": F.normalize(randn(ROWS, 3, SIZE, SIZE) - 0.5 * images, dim=1),
    }


batches = [scenes() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
