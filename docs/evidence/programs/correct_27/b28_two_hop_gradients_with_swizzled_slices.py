"""Predicts the delay of parcels with a residual network whose gradients cross the nodes in two hops, while the
backward pass is still running.

Thread: deepspeedai/DeepSpeed pull request #5056 "[Zero++ qgZ] Fall back to reduce_scatter if tensor.numel() % (2 *
global_world_size) != 0" (2024): the gradient is exchanged by an all-to-all within the node, then by one between
nodes.
Correct: the slices seem to be in the wrong order, since the first hop sends to local rank l what the whole group
calls slices l and LOCAL + l. That is the swizzle: it makes the second hop, over the ranks with the same l, end with
slice node * LOCAL + l on its own rank, so that the gather over all ranks is in order. A bucket is padded to a
multiple of all ranks instead of falling back. Nothing is divided by the number of ranks, as each loss is a sum over
the rank's rows (of unequal number) that is divided by the number of all rows; the rounds of a bucket start when its
last gradient is there, which happens in the same order on all ranks, and the averaging of the embedding (used by two
inputs) waits for both uses.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

DEPOTS, NUMBERS, WIDTH, BLOCKS, ROWS = 7, 3, 13, 2, 17
NODES, LOCAL = 2, 2
SHARES = [3, 6, 4, 4]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Delays(nn.Module):
    def __init__(self):
        super().__init__()
        self.depot, self.numbers = nn.Embedding(DEPOTS, WIDTH), nn.Linear(NUMBERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, batch):
        x = self.depot(batch["origin"]) - self.depot(batch["destination"]).roll(1, -1)
        x = x + self.numbers(batch["numbers"])
        for block in self.blocks:
            x = block(x)
        return self.head(x).unbind(-1)


class Bucket:
    def __init__(self, module):
        self.parameters = [p for p in module.parameters()]  # noqa: C416
        self.size = sum(p.numel() for p in self.parameters)
        self.missing = len(self.parameters)


class TwoHopReducer:
    """Reduces a bucket as soon as the last of its gradients has been accumulated."""

    def __init__(self, modules, mesh):
        self.local, self.nodes = mesh.get_group("local"), mesh.get_group("node")
        self.world, self.pending = mesh._flatten("world").get_group(), []
        self.buckets = [Bucket(module) for module in modules]
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self.hook(bucket))

    def hook(self, bucket):
        def arrived(parameter):
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.missing = len(bucket.parameters)
                self.reduce(bucket)

        return arrived

    def reduce(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket.parameters])
        flat = F.pad(flat, (0, -bucket.size % (NODES * LOCAL)))
        shard = self.hop(self.hop(self.swizzle(flat), self.local, LOCAL), self.nodes, NODES)
        whole = torch.empty_like(flat)
        handle = dist.all_gather_into_tensor(whole, shard, group=self.world, async_op=True)
        self.pending.append((bucket, whole, handle))

    def swizzle(self, flat):
        return flat.view(NODES, LOCAL, -1).transpose(0, 1).flatten()

    def hop(self, slices, group, size):
        received = torch.empty_like(slices)
        dist.all_to_all_single(received, slices.contiguous(), group=group)
        return received.view(size, -1).sum(0)

    def finish(self):
        for bucket, whole, handle in self.pending:
            handle.wait()
            sizes = [p.numel() for p in bucket.parameters]
            for parameter, part in zip(bucket.parameters, whole[: bucket.size].split(sizes)):
                parameter.grad.copy_(part.view_as(parameter))
        self.pending.clear()


def nll(model, batch):
    mean, log_scale = model(batch)
    return (log_scale + (batch["delay"] - mean).abs() * torch.exp(-log_scale)).sum() / ROWS


def plain():
    return Delays()


def parallel(mesh):
    model = Delays()
    return model, TwoHopReducer([model.depot, model.numbers, *model.blocks, model.head], mesh)


def step(built, batch):
    model, reducer = built
    value = nll(model, batch)
    value.backward()
    reducer.finish()
    return value.detach()


def share(batch, mesh):
    rank = mesh.get_local_rank("node") * LOCAL + mesh.get_local_rank("local")
    return {name: tensor.split(SHARES)[rank] for name, tensor in batch.items()}


generator = torch.Generator().manual_seed(5056)


def parcels():
    origin, destination = torch.randint(DEPOTS, (2, ROWS), generator=generator)
    numbers = torch.randn(ROWS, NUMBERS, generator=generator)
    delay = 0.3 * (origin - destination).abs() + numbers[:, 0] * numbers[:, 1]
    return {"origin": origin, "destination": destination, "numbers": numbers, "delay": delay}


batches = [parcels() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=nll, step=step, split=share, ranks={"node": NODES, "local": LOCAL}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
