"""A cross-batch memory whose gather puts the rank's own embeddings first.

Thread: https://github.com/KevinMusgrave/pytorch-metric-learning/issues/639 "Bug for distributed
wrapper regarding cross batch memory loss", 2023-06-12.
Wrong: each rank concatenates its own embeddings with those of the others, so the ranks' memories
hold the same embeddings in different orders (labels move along, so the loss is not affected).
A right diagnosis says: the buffers memory and memory_labels differ on rank 1 only (rows in another
order, so replicas differ); loss, gradients and weights agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import normalize, softplus
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

SIZE, DIM = 24, 8


def gather_others(x):
    if not dist.is_initialized():
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    parts.pop(dist.get_rank())
    return torch.cat([x, *parts])


class CrossBatchMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, DIM))
        self.register_buffer("memory", normalize(torch.randn(SIZE, DIM), dim=1))
        self.register_buffer("memory_labels", torch.arange(SIZE) % 5)
        self.pointer = 0

    def forward(self, x, labels):
        embeddings = normalize(self.trunk(x), dim=1)
        similarity = embeddings @ self.memory.clone().t()
        same = labels[:, None] == self.memory_labels.clone()[None]
        loss = softplus(torch.where(same, -similarity, similarity) * 4).mean()
        with torch.no_grad():
            new, new_labels = gather_others(embeddings.detach()), gather_others(labels)
            rows = slice(self.pointer, self.pointer + len(new))
            self.memory[rows], self.memory_labels[rows] = new, new_labels
            self.pointer = (self.pointer + len(new)) % SIZE
        return loss


def loss(model, batch):
    return model(batch["x"], batch["label"])


def build():
    return DDP(CrossBatchMemory(), broadcast_buffers=False)


generator = torch.Generator().manual_seed(6)
batches = [
    {
        "x": torch.randn(8, 12, generator=generator),
        "label": torch.randint(5, (8,), generator=generator),
    }
    for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(CrossBatchMemory, build, **options))
