"""Supervised contrastive learning of image embeddings; the images are dealt to the ranks like cards and compared with all others.

Might be accused because: a rank has every third image, so the gathered embeddings are in another order than in the batch; an
own image is masked by its place in the gathered order; and gradients are summed over the ranks, not averaged.
Correct because: embeddings, labels and the mask of the own images all use the gathered order, the loss doesn't depend on the
order of the candidates, each rank's part is divided by the size of the whole batch, and the gather passes all gradients back.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

SIZE, WIDTH, OUT, CLASSES, IMAGES = 8, 8, 6, 4, 12
TEMPERATURE = 0.2


class GatherRows(torch.autograd.Function):
    """All ranks' rows, rank by rank; backward adds what every rank wants of the own rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, WIDTH) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, OUT))

    def forward(self, images):
        x = self.stem(images)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.silu(norm(x)))
        return F.normalize(self.head(x.mean((2, 3))), dim=-1)


def contrast(anchors, candidates, labels, candidate_labels, places):
    """One value per anchor; `places` says where the anchors stand among the candidates."""
    itself = places.unsqueeze(1) == torch.arange(len(candidates))
    scores = (anchors @ candidates.mT / TEMPERATURE).masked_fill(itself, -torch.inf)
    logp = scores.log_softmax(-1)
    positive = (labels.unsqueeze(1) == candidate_labels) & ~itself
    return -logp.masked_fill(~positive, 0).sum(-1) / positive.sum(-1).clamp(min=1)


class Contrast:
    def __init__(self, group):
        self.group, self.rank = group, dist.get_rank(group)

    def __call__(self, embeddings, labels):
        everything = GatherRows.apply(embeddings, self.group)
        all_labels = GatherRows.apply(labels, self.group)
        places = self.rank * len(labels) + torch.arange(len(labels))
        values = contrast(embeddings, everything, labels, all_labels, places)
        return values.sum() / len(all_labels)

    def sum_up(self, *tensors):
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.group)


def plain():
    return Encoder()


def parallel(mesh):
    return Encoder(), Contrast(mesh.get_group("dp"))


def loss(model, batch):
    images, labels = batch
    x = model(images)
    return contrast(x, x, labels, labels, torch.arange(len(labels))).mean()


def deal(batch, mesh):
    rank, ranks = mesh.get_local_rank("dp"), mesh["dp"].size()
    return tuple(part[rank::ranks].contiguous() for part in batch)


def step(built, batch):
    model, criterion = built
    images, labels = batch
    value = criterion(model(images), labels)
    value.backward()
    value = value.detach().clone()
    criterion.sum_up(value, *(parameter.grad for parameter in model.parameters()))
    return value


generator = torch.Generator().manual_seed(911)
prototypes = torch.randn(CLASSES, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)


def labelled():
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    noise = torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return prototypes[labels] + noise, labels


batches = [labelled() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=deal,
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
