"""A bidirectional pipeline, two stages per rank: mirrored ranks add their gradients, each in the order of its modules.

Thread: https://github.com/deepseek-ai/DualPipe/issues/22 "How to handle optimizers? Do two models share optimizers?"
(the gradients of rank 0 and rank 7 have to be reduced), comment of 2025-05-08.
Wrong: rank r has the stages r and 3 - r, its mirror has them the other way round. Both send a flat vector of all
gradients, first stage first, so that the gradient of stage 0 is added to that of stage 3, and 1 to 2.
EXPECT: the forward pass and the loss of step 1 agree, the gradients of all blocks differ on every rank: after the
backward pass, the exchange with the mirrored rank adds the gradient of block 3 to block 0 and that of block 2 to block
1 (and vice versa), as the ranks flatten their stages in different orders.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, RANKS, MICROBATCHES = 6, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(RANKS)})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


def parallel(mesh):
    net, rank = Net(), mesh.get_local_rank("pp")
    net.blocks = nn.ModuleDict({str(i): net.blocks[str(i)] for i in (rank, RANKS - 1 - rank)})
    return net


class Direction:
    """one of the two pipelines; its stages run over ranks"""

    def __init__(self, module, ranks):
        self.module, self.index = module, ranks.index(dist.get_rank())
        self.before = ranks[self.index - 1] if self.index > 0 else None
        self.after = ranks[self.index + 1] if self.index < RANKS - 1 else None
        self.kept, self.total = [], torch.zeros(())

    def forward(self, x, target):
        if self.before is not None:
            x = torch.empty_like(x)
            dist.recv(x, self.before)
            x.requires_grad_()
        out = self.module(x)
        if self.after is None:
            out = mse_loss(out, target) / MICROBATCHES
            self.total += out.detach()
        else:
            dist.send(out.detach(), self.after)
        self.kept.append((x, out))

    def backward(self):
        x, out = self.kept.pop(0)
        if self.after is None:
            out.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, self.after)
            out.backward(grad)
        if self.before is not None:
            dist.send(x.grad, self.before)


def reduce_with_mirror(modules):
    rank = dist.get_rank()
    mirror = RANKS - 1 - rank
    grads = [p.grad for module in modules for p in module.parameters()]
    own = torch.cat([grad.flatten() for grad in grads])
    other = torch.empty_like(own)
    request = dist.isend(own, mirror)
    dist.recv(other, mirror)
    request.wait()
    for grad, part in zip(grads, (own + other).split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def step(net, batch):
    ranks, modules = list(range(RANKS)), list(net.blocks.values())
    directions = Direction(modules[0], ranks), Direction(modules[1], ranks[::-1])
    microbatches = list(zip(batch["x"].chunk(MICROBATCHES), batch["y"].chunk(MICROBATCHES)))
    halves = microbatches[: MICROBATCHES // 2], microbatches[MICROBATCHES // 2 :]
    for direction, half in zip(directions, halves):
        for x, y in half:
            direction.forward(x, y)
    for direction in directions:
        for _ in range(MICROBATCHES // 2):
            direction.backward()
    reduce_with_mirror(modules)
    value = directions[0].total + directions[1].total
    dist.all_reduce(value)
    return value


def loss(net, batch):
    return mse_loss(net(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(22)
batches = [{n: torch.randn(8, DIM, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Net, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": RANKS}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
