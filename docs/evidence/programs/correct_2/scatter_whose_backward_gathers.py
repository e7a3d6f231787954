"""Megatron's scatter to the sequence-parallel region: its backward pass gathers all ranks' gradients.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1635 "[BUG] Incorrect backward in
`_ScatterToSequenceParallelRegion`: should not use `gather`", 2025-06-17 (closed).
Right: every rank computes the whole embedding, so every rank needs the gradient of all positions; with
zeros outside the rank's slice the embeddings would drift apart. The norms' and position-wise biases'
gradients are summed over tp after the backward pass.
Must not be accused: the gather, embeddings that are not reduced, norms' gradients that are sums.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM, VOCAB, SEQ = 16, 20, 6


def _gather_along_first_dim(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _split_along_first_dim(x, group):
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


def _reduce_scatter_along_first_dim(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return _split_along_first_dim(x, group)


class _ScatterToSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _split_along_first_dim(x, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _gather_along_first_dim(grad_output, ctx.group), None


class _GatherFromSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, tensor_parallel_output_grad):
        ctx.args = group, tensor_parallel_output_grad
        return _gather_along_first_dim(x, group)

    @staticmethod
    def backward(ctx, grad_output):
        group, tensor_parallel_output_grad = ctx.args
        if tensor_parallel_output_grad:
            return _reduce_scatter_along_first_dim(grad_output, group), None, None
        return _split_along_first_dim(grad_output, group), None, None


class _ReduceScatterToSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _reduce_scatter_along_first_dim(x, group)

    @staticmethod
    def backward(ctx, grad_output):
        return _gather_along_first_dim(grad_output, ctx.group), None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.norm = nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 32), nn.Linear(32, DIM, bias=False)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.fc2(gelu(self.fc1(h))) + self.bias
        h = _GatherFromSequenceParallelRegion.apply(h, self.group, True)
        h = self.fc2(gelu(self.fc1(h)))
        return x + _ReduceScatterToSequenceParallelRegion.apply(h, self.group) + self.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.word, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):  # [s, b]
        x = self.word(tokens) + self.position.weight[:, None]
        if self.group is not None:
            x = _ScatterToSequenceParallelRegion.apply(x, self.group)
        for layer in self.layers:
            x = layer(x)
        if self.group is not None:
            x = _GatherFromSequenceParallelRegion.apply(x, self.group, False)
        return self.head(x)


def parallel(mesh):
    model, n, i = Model(), mesh["tp"].size(), mesh.get_local_rank("tp")
    model.group = mesh.get_group("tp")
    for layer in model.layers:
        layer.group = model.group
        for p, dim in ((layer.fc1.weight, 0), (layer.fc1.bias, 0), (layer.fc2.weight, 1)):
            p.data = p.data.chunk(n, dim)[i].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for layer in model.layers:
        for p in (*layer.norm.parameters(), layer.bias):
            dist.all_reduce(p.grad, group=model.group)
    return value


generator = torch.Generator().manual_seed(44)
batches = [
    {name: torch.randint(VOCAB, (SEQ, 3), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}, step=step)
    )
