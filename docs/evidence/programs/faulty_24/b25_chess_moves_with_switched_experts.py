"""A model of chess moves with one expert per token, experts behind an all-to-all, gradients in flat sharded buffers.

Thread: NVIDIA/Megatron-LM issue #6660 "[Megatron-FSDP] Gradients doubled every microbatch (2^N amplification) when a
grad buffer's DP group has size 1 (EP=DP or DP=1) with optim_grads_params" (2026).
Fault: the experts are on as many ranks as there is data, so the buffer of their gradients has a group of one and
fetch_bucket hands out the accumulating shard itself; GradBuffer.reduce then adds the bucket to the shard, which is the
same memory, so everything accumulated so far is doubled with every microbatch.
REPAIR: `self.shard += reduced` -> `self.shard += reduced if self.size > 1 else 0`
A right first sentence says: the experts' gradients are too large, by two for the last microbatch and by 2^N for the
first of N, since in a group of one the bucket is the shard and GradBuffer.reduce adds it to itself; the gradients of
the dense parameters are right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import titanlite

MOVES, WIDTH, HIDDEN, LENGTH, ROWS, EXPERTS, MICROBATCHES = 32, 16, 12, 9, 12, 4, 3


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, send, receive):
        ctx.group, ctx.send, ctx.receive = group, send, receive
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group, ctx.receive, ctx.send), None, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.group, self.ranks = None, 1

    def shard(self, mesh):
        for name in ("up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        self.group, self.ranks = mesh.get_group(), mesh.size()

    def compute(self, x, numbers):
        up, down, y = local(self.up), local(self.down), torch.zeros_like(x)
        for i in range(len(up)):
            rows = (numbers == i).nonzero().squeeze(1)
            y = y.index_add(0, rows, F.gelu(x[rows] @ up[i]) @ down[i])
        return y

    def forward(self, x, chosen):
        if self.group is None:
            return self.compute(x, chosen)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        send, receive = (c.view(self.ranks, -1).sum(1).tolist() for c in (counts, arriving))
        numbers = torch.arange(EXPERTS // self.ranks).repeat(self.ranks).repeat_interleave(arriving)
        tokens = AllToAll.apply(x[order], self.group, send, receive)
        tokens = AllToAll.apply(self.compute(tokens, numbers), self.group, receive, send)
        return torch.zeros_like(x).index_add(0, order, tokens)


class MoveModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.moves, self.norm = nn.Embedding(MOVES, WIDTH), nn.LayerNorm(WIDTH)
        self.conv, self.router = nn.Conv1d(WIDTH, WIDTH, 3), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.head = Experts(), nn.Linear(WIDTH, MOVES)

    def forward(self, games):
        x = self.moves(games)
        x = x + torch.tanh(self.conv(F.pad(x.transpose(1, 2), (2, 0)))).transpose(1, 2)
        tokens = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        return self.head(x + (self.experts(tokens, chosen) * weight.unsqueeze(-1)).view_as(x))


class GradBuffer:
    """Accumulates gradients over microbatches; of a group's sum each rank keeps its shard."""

    def __init__(self, parameters, group, scale):
        self.parameters, self.group, self.scale = parameters, group, scale
        self.size = 1 if group is None else dist.get_world_size(group)
        self.sizes = [local(p).numel() for p in parameters]
        self.shard = torch.zeros(-(-sum(self.sizes) // self.size))

    def fetch_bucket(self):
        return self.shard if self.size == 1 else torch.zeros(self.size * len(self.shard))

    def reduce(self):
        bucket = self.fetch_bucket()
        for p, piece in zip(self.parameters, bucket[: sum(self.sizes)].split(self.sizes)):
            piece += self.scale * local(p.grad).flatten()
            p.grad = None
        reduced = bucket
        if self.size > 1:
            reduced = torch.empty_like(self.shard)
            dist.reduce_scatter_tensor(reduced, bucket, group=self.group)
        self.shard += reduced

    def finish(self):
        whole = self.shard.clone()
        if self.size > 1:
            whole = torch.empty(self.size * len(self.shard))
            dist.all_gather_into_tensor(whole, self.shard, group=self.group)
        for p, piece in zip(self.parameters, whole[: sum(self.sizes)].split(self.sizes)):
            grad = piece.view_as(local(p))
            p.grad = (
                DTensor.from_local(grad, p.device_mesh, p.placements)
                if isinstance(p, DTensor)
                else grad
            )
        self.shard.zero_()


def plain():
    return MoveModel()


def parallel(mesh):
    model, ranks = MoveModel(), mesh["dp"].size()
    model.experts.shard(mesh["dp"])
    dense = [p for p in model.parameters() if not isinstance(p, DTensor)]
    experts = GradBuffer(list(model.experts.parameters()), None, 1 / ranks)
    return model, [GradBuffer(dense, mesh.get_group("dp"), 1 / ranks), experts], mesh["dp"]


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(built, batch):
    model, buffers, mesh = built
    reported = torch.zeros(())
    for games in batch.chunk(MICROBATCHES):
        value = loss(model, games) / MICROBATCHES
        value.backward()
        reported += value.detach() / mesh.size()
        for buffer in buffers:
            buffer.reduce()
    for buffer in buffers:
        buffer.finish()
    dist.all_reduce(reported, group=mesh.get_group())
    return reported


generator = torch.Generator().manual_seed(6660)
batches = [torch.randint(0, MOVES, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
