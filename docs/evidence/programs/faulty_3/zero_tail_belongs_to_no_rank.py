"""A ZeRO-1 optimizer whose partitions have len(flat) // world_size elements.

Thread: https://github.com/deepspeedai/DeepSpeed/pull/1328 "Added 4-byte alignment on NCCL/RCCL", review of
2021-09-01 (partition_size is the length divided by the number of ranks, or the next larger number, if the
flat buffer is not padded).
Wrong: the model has 175 elements and there are 4 ranks. The last three belong to no partition, so no rank
updates them.
A right diagnosis says: all gradients agree, but the last elements (4 to 6) of the last bias, 2.bias, are
not updated by the optimizer on any rank; all other weights agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

LR = 0.01


class PartitionedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(list(params), dict(lr=lr))
        self.params = self.param_groups[0]["params"]
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        flat = torch.cat([p.detach().flatten() for p in self.params])
        self.partition_size = len(flat) // self.world_size
        self.start = self.rank * self.partition_size
        self.master = flat.narrow(0, self.start, self.partition_size).clone()
        self.adam = torch.optim.Adam([self.master], lr=lr)

    @torch.no_grad()
    def step(self):
        grads = torch.cat([p.grad.flatten() for p in self.params])
        self.master.grad = grads.narrow(0, self.start, self.partition_size)
        self.adam.step()
        parts = [torch.empty_like(self.master) for _ in range(self.world_size)]
        dist.all_gather(parts, self.master)
        updated, offset = torch.cat(parts), 0
        for p in self.params:
            values = updated[offset : offset + p.numel()]
            p.view(-1)[: len(values)] = values
            offset += p.numel()


def make_model():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7))


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def adam(params):
    return torch.optim.Adam(params, lr=LR)


def parallel():
    model = DDP(make_model())
    return model, PartitionedAdam(model.parameters(), LR)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


rng = torch.Generator().manual_seed(1328)
batches = [
    {"x": torch.randn(8, 6, generator=rng), "y": torch.randn(8, 7, generator=rng)} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 4}, split="dp", step=step)
    print(titanlite.compare(make_model, parallel, optimizer=adam, **options))
