"""Data parallel without a collective: the flat gradient runs in uneven pieces through two rings of opposite directions.

Thread: pytorch/pytorch issue #31572 "[Tutorial]: Wrong example of Our Own Ring-Allreduce" (2019) and horovod/horovod issue #1510
"Where is the partitioning of the gradients done for Ring AllReduce?" (2019).
Correct: after ranks - 1 hops each piece is complete on one rank, and after as many more on all. The pieces differ in length, cut
parameters anywhere, and are summed in another order each, which changes only the rounding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mish

import titanlite

SIZE, WIDTH, TAGS = 7, 11, 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Linear(SIZE, TAGS, bias=False), nn.Linear(SIZE, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.tags = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TAGS)

    def forward(self, x):
        deep = self.deep(x)
        for layer in self.inner:
            deep = deep + mish(layer(deep))
        return self.wide(x) + self.tags(self.norm(deep))


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch["x"]), batch["tags"])


def ring(whole, direction):
    """Sum a vector over the ranks, in place: first each piece is collected on its way, then the sums go round."""
    size, rank = dist.get_world_size(), dist.get_rank()
    following, previous = (rank + direction) % size, (rank - direction) % size
    pieces = whole.tensor_split(size)
    for hop in range(2 * size - 2):
        outgoing = pieces[(rank - direction * hop) % size]
        target = pieces[(rank - direction * (hop + 1)) % size]
        incoming = torch.empty_like(target)
        sent = dist.isend(outgoing, following)
        dist.recv(incoming, previous)
        sent.wait()
        target.copy_(target + incoming if hop < size - 1 else incoming)


def parallel(mesh):
    return Tagger()


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads]) / dist.get_world_size()
    middle = 2 * len(flat) // 5
    ring(flat[:middle], 1)
    ring(flat[middle:], -1)
    for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(mean.view_as(g))
    return value.detach()


rng = torch.Generator().manual_seed(506)
batches = [
    {
        "x": torch.randn(8, SIZE, generator=rng),
        "tags": torch.randint(2, (8, TAGS), generator=rng).double(),
    }
    for _ in range(3)
]
arguments = Tagger, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 4}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
