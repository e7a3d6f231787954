"""A Megatron-like encoder in Domino's way: two halves of the batch, all-reduces are waited for when needed.

Thread: deepspeedai/DeepSpeed issue #7654 "Question about Deepspeed-Domino" (2025): "you make extensive use of
dist.all_reduce. However, to my knowledge, it does not have a corresponding backward implementation. Could you explain
why the results are still correct?"
What could be accused: autograd knows nothing of the two forward all-reduces, their works are started in one place and
waited for in another, and both backward functions hand on a gradient that is still being summed; but the backward pass
of a sum whose gradient every rank has is the identity, nothing reads a result before its handle is waited for, and
WaitGradient lies before the layer norm, whose gradients therefore see the sum.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WIDTH, HIDDEN, HEADS, LAYERS, LENGTH, ROWS, FEATURES, CLASSES = 16, 24, 4, 2, 7, 6, 5, 4


class StartGradientSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, handles, key, group):
        ctx.handles, ctx.key, ctx.group = handles, key, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        ctx.handles[ctx.key] = dist.all_reduce(gradient, group=ctx.group, async_op=True)
        return gradient, None, None, None


class WaitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, handles, key):
        ctx.handles, ctx.key = handles, key
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.handles.pop(ctx.key).wait()
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, heads=HEADS, hidden=HIDDEN):
        super().__init__()
        self.heads, size = heads, heads * (WIDTH // HEADS)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))
        self.dense = nn.Linear(size, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.dense_bias, self.down_bias = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))

    def attend(self, x):
        shape = (self.heads, WIDTH // HEADS)
        q, k, v = (f(x).unflatten(-1, shape) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.dense(y.transpose(1, 2).flatten(2))

    def feed(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, parts):
        parts = [x + self.attend(self.norm1(x)) + self.dense_bias for x in parts]
        return [x + self.feed(self.norm2(x)) + self.down_bias for x in parts]


class DominoLayer(Layer):
    def __init__(self, whole, group):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        super().__init__(HEADS // size, HIDDEN // size)
        self.group, self.forward_handles, self.backward_handles = group, {}, {}
        with torch.no_grad():
            for name, own in self.named_parameters():
                cut, source = shard("layers.0." + name), whole.get_parameter(name)
                own.copy_(source.chunk(size, cut[0])[rank] if cut else source)

    def start(self, name, parts, norm, work):
        handles, back, normed, sums = self.forward_handles, self.backward_handles, [], []
        for i, part in enumerate(parts):
            normed.append(WaitGradient.apply(norm(part), back, (name, i)))
        for i, x in enumerate(normed):
            partial = work(StartGradientSum.apply(x, back, (name, i), self.group))
            handles[name, i] = dist.all_reduce(partial.detach(), group=self.group, async_op=True)
            sums.append(partial)
        return sums

    def forward(self, parts):
        for name, norm, work, bias in (
            ("attention", self.norm1, self.attend, self.dense_bias),
            ("mlp", self.norm2, self.feed, self.down_bias),
        ):
            sums, parts = self.start(name, parts, norm, work), list(parts)
            for i, total in enumerate(sums):
                self.forward_handles.pop((name, i)).wait()
                parts[i] = parts[i] + total + bias
        return parts


class Encoder(nn.Module):
    def __init__(self, parts=1):
        super().__init__()
        self.parts = parts
        self.enter, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        parts = self.enter(x).chunk(self.parts)
        for layer in self.layers:
            parts = layer(parts)
        return self.head(torch.cat(parts).mean(1))


def plain():
    return Encoder()


def parallel(mesh):
    model = Encoder(parts=2)
    model.layers = nn.ModuleList(DominoLayer(layer, mesh.get_group("tp")) for layer in model.layers)
    return model


def shard(name):
    if any(f".{layer}." in name for layer in ("query", "key", "value", "up")):
        return 0, "tp"
    return (1, "tp") if name.endswith(("dense.weight", "down.weight")) else None


def loss(model, batch):
    return F.cross_entropy(model(batch["series"]), batch["kind"])


generator = torch.Generator().manual_seed(7654)


def draw():
    series = torch.randn(ROWS, LENGTH, FEATURES, generator=generator)
    return {"series": series, "kind": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


batches = [draw() for _ in range(3)]
arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
