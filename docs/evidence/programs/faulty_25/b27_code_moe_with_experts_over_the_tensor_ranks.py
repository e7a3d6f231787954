"""A mixture of experts after Megatron: attention is cut over two tensor ranks, and each has half of the experts.

Thread: NVIDIA/Megatron-LM pull request #5916 "Fix gradient-norm undercounting when using EP and TP" (2026; also #6470):
"if EP > 1 and TP > 1, then the gradient norm calculations omit some experts, so gradient clipping applies less than
expected", as the filter for duplicates asks for the dense tensor parallel rank of expert parameters, too.
Fault: is_not_duplicate takes experts (allreduce=False, no tensor_model_parallel) for replicas on the tensor ranks and
counts them on tensor rank 0 alone; the experts of rank 1 are left out of the norm, and clipping scales too little.
REPAIR: `return param.tensor_model_parallel or` -> `return param.tensor_model_parallel or not param.allreduce or`
A right first sentence says: the gradient norm for clipping (clip, is_not_duplicate) leaves out the gradients of the
experts on tensor rank 1 as though they were copies, so the norm is too small and gradients are clipped too little.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, EXPERTS, HIDDEN, LENGTH, ROWS, MAX_NORM = 26, 16, 4, 4, 24, 8, 4, 0.4


class Mapping(torch.autograd.Function):
    """One function in the forward pass and its adjoint in the backward pass."""

    @staticmethod
    def forward(ctx, x, forward, adjoint):
        ctx.adjoint = adjoint
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.adjoint(grad.contiguous()), None, None


class ParallelModule(nn.Module):
    group = None

    def map(self, x, forward, adjoint):
        return x if self.group is None else Mapping.apply(x, forward, adjoint)

    def reduce(self, x):
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x


class Attention(ParallelModule):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # (head, q or k or v, dimension)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.map(x, torch.clone, self.reduce))
        q, k, v = qkv.unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.map(self.o(y), self.reduce, torch.clone)


class MoE(ParallelModule):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gate, chosen = self.router(tokens).softmax(-1).max(-1)
        tokens, y = self.map(tokens, torch.clone, self.reduce), torch.zeros_like(tokens)
        first = 0 if self.group is None else dist.get_rank(self.group) * len(self.w1)
        for e, (w1, w2) in enumerate(zip(self.w1, self.w2), first):
            y[chosen == e] = F.gelu(tokens[chosen == e] @ w1) @ w2
        return (self.map(y, self.reduce, torch.clone) * gate.unsqueeze(-1)).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList([Attention(), MoE(), Attention(), MoE()])
        self.norms, self.group = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(5)), None

    def forward(self, x):
        x = self.embedding(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x))
        return self.head(self.norms[-1](x))


def shard(name):
    if name.endswith((".w1", ".w2", ".qkv.weight")):
        return 0, "tp"
    return (1, "tp") if name.endswith(".o.weight") else None


def parallel(mesh):
    model = Model()
    for module in (model, *model.layers):
        module.group = mesh.get_group("tp")
    for name, p in model.named_parameters():
        cut, p.allreduce = shard(name), not name.endswith((".w1", ".w2"))
        p.tensor_model_parallel = cut is not None and p.allreduce
        p.data = p.data.chunk(2, cut[0])[mesh.get_local_rank("tp")].clone() if cut else p.data
    return model


def is_not_duplicate(param, group):
    return param.tensor_model_parallel or dist.get_rank(group) == 0


def clip(model):
    params = list(model.parameters())
    if model.group is None:
        return nn.utils.clip_grad_norm_(params, MAX_NORM)
    norm = sum(p.grad.square().sum() for p in params if is_not_duplicate(p, model.group))
    dist.all_reduce(norm, group=model.group)
    for p in params:
        p.grad *= (MAX_NORM / (norm.sqrt() + 1e-6)).clamp(max=1.0)
    return norm.sqrt()


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


generator = torch.Generator().manual_seed(5916)
batches = [torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = Model, parallel
options = dict(batches=batches, loss=loss, clip=clip, shard=shard, ranks={"tp": 2})
options["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
