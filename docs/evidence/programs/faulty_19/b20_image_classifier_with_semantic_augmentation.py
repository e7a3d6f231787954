"""An image classifier under DDP with implicit semantic data augmentation: features vary by the covariance of their class.

Thread: blackfeather-wang/ISDA-for-Deep-Networks issue #15 "Are means and coVariances shared by all gpus when using DDP?"
(2021): update_CV estimates them on each GPU and no code brings them together.
Fault: Trainer.training_step updates the running class means and covariances with the features of the rank's own images; the
ranks augment with different covariances, and neither is that of one process, which sees all images of the batch.
REPAIR: `self.estimator.update(features.detach(), labels)` -> `self.estimator.update(*gathered(features.detach(), labels))`
A right first sentence says: each rank estimates the class means and covariances of the augmentation from its own images only
and they are never combined over the ranks, so the augmented loss differs from rank to rank and from the one-process run.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, FEATURES, STRENGTH = 4, 12, 0.5


class CovarianceEstimator(nn.Module):
    """Number of samples, mean and covariance of the features of each class so far."""

    def __init__(self):
        super().__init__()
        self.register_buffer("amount", torch.zeros(CLASSES))
        self.register_buffer("mean", torch.zeros(CLASSES, FEATURES))
        self.register_buffer("covariance", torch.zeros(CLASSES, FEATURES, FEATURES))

    @torch.no_grad()
    def update(self, features, labels):
        for c in labels.unique():
            x = features[labels == c]
            mean = x.mean(0)
            covariance = (x - mean).T @ (x - mean) / len(x)
            weight = len(x) / (len(x) + self.amount[c])
            gap = mean - self.mean[c]
            between = weight * (1 - weight) * torch.outer(gap, gap)
            self.covariance[c] = self.covariance[c].lerp(covariance, weight) + between
            self.mean[c] = self.mean[c].lerp(mean, weight)
            self.amount[c] += len(x)


class ResidualUnit(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, width), nn.GroupNorm(2, width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layer1 = ResidualUnit(8)
        self.down = nn.Conv2d(8, FEATURES, 3, stride=2, padding=1)
        self.layer2 = ResidualUnit(FEATURES)
        self.fc = nn.Linear(FEATURES, CLASSES)
        self.estimator = CovarianceEstimator()

    def forward(self, images):
        x = self.layer2(self.down(self.layer1(F.relu(self.stem(images)))))
        features = x.mean((2, 3))
        return features, self.fc(features)


def augmented(logits, labels, weight, covariance):
    """Adds the upper bound of the loss under Gaussian changes of the features."""
    differences = weight - weight[labels].unsqueeze(1)
    sigma = torch.einsum("bcf,bfg,bcg->bc", differences, covariance[labels], differences)
    return logits + STRENGTH / 2 * sigma


def gathered(*tensors):
    """Each tensor with the rows of all ranks."""
    results = []
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        results.append(torch.cat(parts))
    return results


class Trainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model, broadcast_buffers=False)
        self.fc, self.estimator = model.fc, model.estimator
        self.right = self.seen = 0

    def training_step(self, images, labels):
        features, logits = self.ddp(images)
        self.estimator.update(features.detach(), labels)
        logits = augmented(logits, labels, self.fc.weight, self.estimator.covariance)
        value = F.cross_entropy(logits, labels)
        value.backward()
        return self.log(value.detach(), logits.detach(), labels)

    def log(self, value, logits, labels):
        logits, labels, values = gathered(logits, labels, value.reshape(1))
        self.right += (logits.argmax(-1) == labels).sum().item()
        self.seen += len(labels)
        return values.mean()


def plain():
    return Classifier()


def parallel(mesh):
    trainer = Trainer(Classifier())
    return trainer.ddp, trainer


def loss(model, batch):
    images, labels = batch
    features, logits = model(images)
    model.estimator.update(features.detach(), labels)
    logits = augmented(logits, labels, model.fc.weight, model.estimator.covariance)
    return F.cross_entropy(logits, labels)


def step(built, batch):
    return built[1].training_step(*batch)


generator = torch.Generator().manual_seed(15)
prototypes = torch.randn(CLASSES, 3, 12, 12, generator=generator, dtype=torch.float64)


def images(number=16):
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    noise = torch.randn(number, 3, 12, 12, generator=generator, dtype=torch.float64)
    return prototypes[labels] + noise, labels


batches = [images() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
