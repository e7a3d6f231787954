"""Tensor parallel cross attention: the keys and values of the encoder's memory are column parallel.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/19 "Why the backward function of _CopyToModelParallelRegion
calls reduce fuction? ...", 2019-11-06.
Wrong: the decoder's hidden states pass through copy_to_model_parallel_region, the encoder's memory does not. The
memory's gradient is that of the rank's own heads only.
EXPECT: in the backward pass the gradient of the output of encoder is the first that differs (that of the memory
that cross_attention receives): it is Partial over tp, an all-reduce in the backward pass is missing. The decoder's
gradients agree, those of encoder differ.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, HEADS, HEAD_DIM = 8, 2, 4


class CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CrossAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        inner = HEADS * HEAD_DIM
        self.query, self.key_value = nn.Linear(DIM, inner), nn.Linear(DIM, 2 * inner)
        self.dense = nn.Linear(inner, DIM, bias=False)

    def forward(self, x, memory):
        if self.group is not None:
            x = CopyToModelParallelRegion.apply(x, self.group)
        q = self.query(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        kv = self.key_value(memory).unflatten(-1, (-1, 2 * HEAD_DIM)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        out = (q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v
        out = self.dense(out.transpose(1, 2).flatten(2))
        return out if self.group is None else ReduceFromModelParallelRegion.apply(out, self.group)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, DIM), nn.GELU(), nn.LayerNorm(DIM))
        self.decoder_input, self.norm = nn.Linear(4, DIM), nn.LayerNorm(DIM)
        self.cross_attention, self.head = CrossAttention(), nn.Linear(DIM, 3)

    def forward(self, source, target):
        memory, x = self.encoder(source), self.decoder_input(target)
        return self.head(x + self.cross_attention(self.norm(x), memory))


def shard(name):
    if "query" in name or "key_value" in name:
        return 0, "tp"
    return (1, "tp") if "dense" in name else None


def parallel(mesh):
    model, group = T5(), mesh.get_group("tp")
    model.cross_attention.group = group
    for name, p in model.named_parameters():
        cut = shard(name)
        if cut:
            p.data = p.data.chunk(group.size(), cut[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return mse_loss(model(batch["source"], batch["target"]), batch["y"])


sizes = {"source": (2, 6, 5), "target": (2, 4, 4), "y": (2, 4, 3)}
generator = torch.Generator().manual_seed(19)
batches = [{n: torch.randn(*s, generator=generator) for n, s in sizes.items()} for _ in range(3)]
arguments = T5, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
