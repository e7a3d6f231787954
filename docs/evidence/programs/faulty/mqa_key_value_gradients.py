"""Multi-query attention under tensor parallelism: the shared key and value projection is replicated.

Thread: https://github.com/bigcode-project/Megatron-LM/pull/37 "Reduce the tensor-parallel KV output
grads", 2023-03-21.
Wrong: every rank of tp uses the one key/value head with its own query heads. Nothing sums the
gradients that the ranks' query heads give to it.
A right diagnosis says: the gradient of attention.kv.weight (and bias) is correct only after a sum
over tp. The input's gradient is Partial as far as it comes through kv.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, HEAD_DIM, VOCAB = 16, 4, 4, 20


class ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class MultiQueryAttention(nn.Module):
    def __init__(self, n=1, group=None):
        super().__init__()
        self.group = group
        self.query = nn.Linear(DIM, HEADS * HEAD_DIM // n)
        self.kv = nn.Linear(DIM, 2 * HEAD_DIM)
        self.dense = nn.Linear(HEADS * HEAD_DIM // n, DIM, bias=False)

    def forward(self, x):
        query_input = ReduceInBackward.apply(x, self.group) if self.group else x
        q = self.query(query_input).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        k, v = k.expand_as(q), v.expand_as(q)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.dense(out.transpose(1, 2).flatten(2))
        return ReduceInForward.apply(out, self.group) if self.group else out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.attention = MultiQueryAttention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    n, i = mesh["tp"].size(), mesh.get_local_rank("tp")
    whole, model.attention = model.attention, MultiQueryAttention(n, group)
    model.attention.kv = whole.kv
    for name, dim in (("query.weight", 0), ("query.bias", 0), ("dense.weight", 1)):
        part = whole.get_parameter(name).data.chunk(n, dim)[i].clone()
        model.attention.get_parameter(name).data = part
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(4)
batches = [
    {name: torch.randint(VOCAB, (3, 7), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))
