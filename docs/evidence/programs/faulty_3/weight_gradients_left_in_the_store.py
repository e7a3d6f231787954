"""Zero bubble: weight gradients are computed later than input gradients, the last ones never.

Thread: https://github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/52 "[QUESTION] what's the different
bwtween two defined for not_split_bw" (when WeightGradStore.split_bw is set), 2024-11-15.
Wrong: stage 1 splits its backward pass. In the loop, each backward pass is followed by the weight gradients of
the microbatch before. After the loop nothing computes those of the last microbatch.
A right diagnosis says: on stage 1 the gradients of the weights of its linear layers (fc1, fc2, head) lack
microbatch 3, the last one; biases, norms and all of stage 0 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss

import titanlite

FEATURES, DIM, MICROBATCHES = 6, 16, 4


class WeightGradStore:
    def __init__(self):
        self.split_bw, self.cache, self.queue = False, [], []

    def put(self, weight, x, grad):
        self.cache.append((weight, x, grad))

    def flush(self):
        self.queue.append(self.cache)
        self.cache = []

    def pop(self):
        for weight, x, grad in self.queue.pop(0):
            weight_grad = grad.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = weight_grad if weight.grad is None else weight.grad + weight_grad


class SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, store):
        ctx.save_for_backward(x)
        ctx.weight, ctx.store = weight, store
        return linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.store.put(ctx.weight, ctx.saved_tensors[0], grad)
        return grad @ ctx.weight.detach(), None, None


class Linear(nn.Linear):
    store = None

    def forward(self, x):
        if self.store is None or not self.store.split_bw:
            return linear(x, self.weight) + self.bias
        return SplitLinear.apply(x, self.weight, self.store) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(DIM), Linear(DIM, 24), Linear(24, DIM)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


def chain(**modules):
    sequence = nn.Sequential()
    for name, module in modules.items():
        sequence.add_module(name, module)
    return sequence


def whole_model():
    return chain(
        embed=Linear(FEATURES, DIM), block0=Block(), block1=Block(), head=Linear(DIM, FEATURES)
    )


def build(mesh):
    model, store = whole_model(), WeightGradStore()
    if mesh.get_local_rank("pp") == 0:
        return chain(embed=model.embed, block0=model.block0), store
    stage = chain(block1=model.block1, head=model.head)
    store.split_bw = True
    for module in stage.modules():
        if isinstance(module, Linear):
            module.store = store
    return stage, store


def first_stage(stage, batch):
    outputs = []
    for x in batch["x"].chunk(MICROBATCHES):
        outputs.append(stage(x))
        dist.send(outputs[-1].detach(), 1)
    for output in outputs:
        grad = torch.empty_like(output)
        dist.recv(grad, 1)
        output.backward(grad)


def last_stage(stage, store, batch):
    total, works = 0, []
    for i, target in enumerate(batch["y"].chunk(MICROBATCHES)):
        hidden = torch.empty(len(target), DIM)
        dist.recv(hidden, 0)
        value = mse_loss(stage(hidden.requires_grad_()), target) / MICROBATCHES
        value.backward()
        works.append(dist.isend(hidden.grad, 0))
        store.flush()
        if i > 0:
            store.pop()
        total += value.detach()
    store.queue.clear()
    for work in works:
        work.wait()
    return total


def step(built, batch):
    stage, store = built
    return last_stage(stage, store, batch) if store.split_bw else first_stage(stage, batch)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(52)
batches = [
    {name: torch.randn(8, FEATURES, generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)
    print(titanlite.compare(whole_model, build, **options))
