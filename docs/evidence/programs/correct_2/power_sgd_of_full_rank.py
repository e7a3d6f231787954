"""A PowerSGD communication hook whose rank is that of the matrices.

Thread: https://github.com/pytorch/pytorch/pull/48060 "[Gradient Compression] PowerSGD comm hook",
2020-11-16.
Right: P and Q are averaged over the ranks, and with the full rank P Q^T is the average itself. Vectors
are averaged as they are.
Must not be accused: gradients that are never all-reduced themselves, or random projections.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite


class PowerSGDState:
    def __init__(self, process_group, matrix_approximation_rank):
        self.process_group, self.rank = process_group, matrix_approximation_rank
        self.rng = torch.Generator().manual_seed(0)  # the same on all ranks

    def average(self, tensor):
        dist.all_reduce(tensor, group=self.process_group)
        return tensor.div_(dist.get_world_size(self.process_group))


def power_sgd_hook(state, bucket):
    for grad in bucket.gradients():
        if grad.ndim < 2:
            state.average(grad)
            continue
        matrix = grad.view(len(grad), -1)
        rank = min(*matrix.shape, state.rank)
        q = torch.randn(matrix.shape[1], rank, generator=state.rng)
        p = state.average(matrix @ q)
        p = torch.linalg.qr(p).Q
        q = state.average(matrix.t() @ p)
        torch.mm(p, q.t(), out=matrix)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(32, 20), nn.Tanh(), nn.Linear(20, 7))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build():
    model = DistributedDataParallel(ConvNet())
    model.register_comm_hook(PowerSGDState(dist.group.WORLD, 64), power_sgd_hook)
    return model


generator = torch.Generator().manual_seed(480)
batches = [
    {
        "x": torch.randn(8, 2, 6, 6, generator=generator),
        "y": torch.randint(7, (8,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", optimizer=sgd)
    print(titanlite.compare(ConvNet, build, **options))
