"""A gradient bucket that is reduced when it is full; what remains in it after the backward pass is not.

Thread: https://github.com/deepspeedai/DeepSpeed/issues/4879 "[BUG] DeepSpeedZeroOptimizer_Stage3: It cannot
reduce the gradients remained in the bucket timely", 2023-12-28.
Wrong: reduce_ready_grads flushes the bucket only if the next gradient does not fit. Nothing flushes it at
the end of the backward pass, so the first layers' gradients stay those of the rank's own rows.
A right diagnosis says: the gradients of the first layers (0.bias, 0.weight and 2.weight, which are the last
to be ready) are never averaged over dp: each rank has those of its own part of the batch. All later layers'
gradients agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

BUCKET_ELEMENTS = 800


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(8, 24),
            nn.GELU(),
            nn.Linear(24, 24),
            nn.GELU(),
            nn.Linear(24, 24),
            nn.GELU(),
            nn.Linear(24, 5),
        )


class GradientReducer:
    def __init__(self, module):
        self.bucket, self.elements_in_bucket = [], 0
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.reduce_ready_grads)

    def reduce_ready_grads(self, param):
        if self.elements_in_bucket + param.numel() > BUCKET_ELEMENTS:
            self.reduce_bucket()
        self.bucket.append(param)
        self.elements_in_bucket += param.numel()

    def reduce_bucket(self):
        flat = torch.cat([p.grad.flatten() for p in self.bucket])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        offset = 0
        for p in self.bucket:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        self.reset()

    def reset(self):
        self.bucket, self.elements_in_bucket = [], 0


class Engine:
    def __init__(self, module):
        self.module, self.reducer = module, GradientReducer(module)

    def backward(self, loss):
        self.reducer.reset()
        loss.backward()


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def initialize():
    module = Net()
    return module, Engine(module)


def train_batch(built, batch):
    module, engine = built
    value = loss(module, batch)
    engine.backward(value)
    return value


generator = torch.Generator().manual_seed(4879)
batches = [
    {"x": torch.randn(8, 8, generator=generator), "y": torch.randint(5, (8,), generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train_batch)
    print(titanlite.compare(Net, initialize, **options))
