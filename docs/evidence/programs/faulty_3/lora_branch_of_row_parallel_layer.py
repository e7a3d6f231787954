"""LoRA on a row-parallel layer: the base layer's output is reduced, the adapter's is not.

Thread: https://github.com/PaddlePaddle/PaddleNLP/pull/6528 "add RowParallelLoRALinear", 2023-07-27.
Wrong: lora_A is cut along its input like the weight, so x @ A is a partial sum on each rank. It goes
through lora_B and is added after the base layer's all-reduce. lora_B starts at zero, so that the outputs
of the first step agree.
A right diagnosis says: in fc2's adapter x @ lora_A is partial over tp and its sum over tp is missing: in
step 1 the gradient of fc2.lora_B is the rank's part only (correct after a sum over tp); the output of fc2
differs from step 2 on.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

DIM, FFN, RANK, VOCAB = 16, 32, 4, 20


class MpAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class MpIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class RowParallelLoRALinear(nn.Module):
    def __init__(self, fan_in, fan_out, group=None):
        super().__init__()
        self.group, n = group, 1 if group is None else group.size()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in // n) * 0.2, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(fan_out))
        self.lora_A = nn.Parameter(torch.randn(RANK, fan_in // n) * 0.3)
        self.lora_B = nn.Parameter(torch.zeros(fan_out, RANK))

    def forward(self, x):
        result = linear(x, self.weight)
        if self.group is not None:
            result = MpAllReduce.apply(result, self.group)
        return result + self.bias + linear(linear(x, self.lora_A), self.lora_B) * 2.0


class FeedForward(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, n = group, 1 if group is None else group.size()
        self.fc1 = nn.Linear(DIM, FFN // n)
        self.fc2 = RowParallelLoRALinear(FFN, DIM, group)

    def forward(self, x):
        x = x if self.group is None else MpIdentity.apply(x, self.group)
        return self.fc2(gelu(self.fc1(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm, self.ffn = nn.LayerNorm(DIM), FeedForward()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.ffn(self.norm(x)))


CUTS = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.lora_A": 1}


def shard(name):
    return next(((dim, "tp") for end, dim in CUTS.items() if name.endswith(end)), None)


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    whole, model.ffn = model.ffn, FeedForward(group)
    for name, p in model.ffn.named_parameters():
        value = whole.get_parameter(name).data
        p.data = value.chunk(2, CUTS[name])[group.rank()].clone() if name in CUTS else value
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(6528)
batches = [
    {name: torch.randint(VOCAB, (3, 5), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)
    )
