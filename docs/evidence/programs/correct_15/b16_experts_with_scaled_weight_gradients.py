"""A mixture of experts with DDP for the dense part and expert parallelism over the same ranks, as in MegaBlocks.

Thread: databricks/megablocks issue #86 "Gradient scale size for expert gradient" (2024), on why the gradients of the expert
weights are scaled by 1 / expert_parallel_world_size, which "seems a bit strange compared to the traditional gradient scale for
DDP".
Correct: DDP is told to ignore the expert weights, and nothing ever all-reduces their gradients. An expert sits on one rank, which
gets the tokens of all ranks and, in the backward pass, the gradients of all ranks' mean losses; scale_gradient divides that sum
by the number of ranks in the weights' backward pass alone, not in that of the tokens. Ranks send each other different numbers of
tokens.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

WIDTH, HIDDEN, EXPERTS, TOP, LENGTH = 10, 12, 4, 2, 5


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        output = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), receive, send)
        return output

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.receive, ctx.send), None, None


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, scale):
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


scale_gradient = ScaleGradient.apply


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, rows, expert):
        return self.compute(rows, expert, self.w1, self.w2)

    def compute(self, rows, expert, w1, w2):
        output = torch.zeros_like(rows)
        for i in range(len(w1)):
            mine = (expert == i).nonzero().flatten()
            output = output.index_add(0, mine, F.gelu(rows[mine] @ w1[i]) @ w2[i])
        return output


class ParallelExperts(Experts):
    def __init__(self, whole):
        super().__init__()
        rank, self.size = dist.get_rank(), dist.get_world_size()
        self.each = EXPERTS // self.size
        self.w1 = nn.Parameter(whole.w1.detach().chunk(self.size)[rank].clone())
        self.w2 = nn.Parameter(whole.w2.detach().chunk(self.size)[rank].clone())

    def forward(self, rows, expert):
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert // self.each, minlength=self.size)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        send, receive = counts.tolist(), arriving.tolist()
        local = AllToAll.apply(expert[order], send, receive) % self.each
        w1, w2 = (scale_gradient(w, 1 / self.size) for w in (self.w1, self.w2))
        output = self.compute(AllToAll.apply(rows[order], send, receive), local, w1, w2)
        returned = AllToAll.apply(output, receive, send)
        return torch.zeros_like(returned).index_copy(0, order, returned)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.router = nn.Linear(LENGTH, LENGTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        rows = self.norm2(x).flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).topk(TOP)
        y = self.experts(rows.repeat_interleave(TOP, 0), chosen.flatten())
        return x + (y.unflatten(0, (-1, TOP)) * weight[..., None]).sum(1).view_as(x)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def plain():
    return MoE()


def parallel(mesh):
    model = MoE()
    for block in model.blocks:
        block.experts = ParallelExperts(block.experts)
    own = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return DistributedDataParallel(model)


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(86)
batches = [
    {
        "x": torch.randn(4, LENGTH, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(4, LENGTH, 3, generator=generator, dtype=torch.float64),
    }
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    shard=lambda name: (0, "dp") if ".experts." in name else None,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
