"""Hooks that sum the accumulated gradient over the ranks in every backward pass.

Thread: https://github.com/horovod/horovod/issues/543 "AssertionError: Local gradient accumulation",
comment of 2018-10-06 (the hooks all-reduce in each backward; they have to be removed for all but the
last).
Wrong: the hook all-reduces p.grad, which in the second backward pass holds the sum over all ranks of
the first already. This part is summed over the ranks again.
A right diagnosis says: gradients are sums over microbatches with wrong coefficients: the first
microbatch counts twice as much as the second (its sum over dp is all-reduced again). The loss agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

ITER_SIZE = 2


class Net(nn.Module):
    def __init__(self, candidates=5):
        super().__init__()
        self.img = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 12))
        self.phrase = nn.Embedding(15, 12)
        self.scores = nn.Linear(12, candidates)

    def forward(self, img, phrase):
        return self.scores(self.img(img) * self.phrase(phrase).mean(1))


class DistributedTrainer:
    def __init__(self, net):
        self.net = net
        for p in net.parameters():
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self.allreduce_grad)

    def allreduce_grad(self, p):
        dist.all_reduce(p.grad)

    def step(self, batch):
        partial_loss = 0.0
        for part in range(ITER_SIZE):
            chunk = {name: value.chunk(ITER_SIZE)[part] for name, value in batch.items()}
            loss = criterion(self.net, chunk) / ITER_SIZE
            loss.backward()
            partial_loss += loss.detach()
        for p in self.net.parameters():
            p.grad /= dist.get_world_size()
        return partial_loss


def criterion(net, batch):
    return cross_entropy(net(batch["img"], batch["phrase"]), batch["labels"])


def build():
    net = Net()
    return net, DistributedTrainer(net)


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(543)
batches = [
    {
        "img": torch.randn(8, 1, 6, 6, generator=generator),
        "phrase": torch.randint(15, (8, 3), generator=generator),
        "labels": torch.randint(5, (8,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=criterion, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Net, build, **options))
