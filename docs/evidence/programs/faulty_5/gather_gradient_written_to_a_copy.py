"""Keys and values are gathered over cp; in the backward pass the reduce-scatter writes its result to a copy.

Thread: https://github.com/pytorch/pytorch/pull/120582 "Fix a bug where nn.functional._AllGather.backward produces
wrong gradients", 2024-02-25 (and https://github.com/pytorch/pytorch/issues/120386, 2024-02-22).
Wrong: the output of the reduce-scatter has to be contiguous. Attention transposes keys and values, so their gradients
are not, nor is the buffer made like them. reduce_scatter then fills a contiguous copy, and the buffer stays zero.
EXPECT: in the backward pass, the gradients of k and v (outputs of blocks.*.k and blocks.*.v, the inputs of the gather
over cp) are the first that differ: they are zero on every rank, as the backward pass of the all-gather loses them
(the reduce-scatter's result is dropped). So the gradients of k.weight and v.weight are zero. The forward pass agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, SEQ = 8, 8


def reduce_scatter(output, inputs, group):
    output = output.contiguous()
    dist.reduce_scatter_tensor(output, inputs.contiguous(), group=group)
    return output


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        own = grad.chunk(ctx.group.size())[ctx.group.rank()]
        grad_x = torch.zeros_like(own)
        reduce_scatter(grad_x, grad, ctx.group)
        return grad_x, None


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        if self.group is not None:
            k, v = AllGather.apply(k, self.group), AllGather.apply(v, self.group)
        q, k, v = (t.transpose(0, 1).contiguous() for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / DIM**0.5
        return x + self.out(torch.bmm(scores.softmax(-1), v).transpose(0, 1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Encoder()
    for block in model.blocks:
        block.group = mesh.get_group("cp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(120582)
batches = [{n: torch.randn(SEQ, 2, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Encoder, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split="cp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
