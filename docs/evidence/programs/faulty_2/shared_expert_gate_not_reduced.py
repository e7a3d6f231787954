"""Qwen2-MoE's shared expert under tensor and sequence parallelism; its gate is forgotten.

Thread: https://github.com/alibaba/Pai-Megatron-Patch/issues/397 "tensor model parallel isn't handled
properly for shared_expert_gate in Qwen2-MoE and kv_a_proj_with_mqa in DeepSeekV2", 2024-12-15.
Wrong: shared_expert_gate reads the rank's part of the sequence, as the norm does, but is not marked
sequence_parallel, so its gradient is not summed over tp.
A right diagnosis says: the gradient of shared_expert.shared_expert_gate.weight is each rank's own part:
it is never summed over tp. All other gradients agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, HIDDEN, VOCAB = 16, 32, 20


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def chunk(x, group):
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


def reduce_scatter(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return chunk(x, group)


def pair(forward_fn, backward_fn):
    class Mapping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward_fn(x, group)

        @staticmethod
        def backward(ctx, grad):
            return backward_fn(grad, ctx.group), None

    return lambda x, group: x if group is None else Mapping.apply(x, group)


scatter_to_sequence_region = pair(chunk, gather)
gather_from_sequence_region = pair(gather, chunk)  # what follows is the same on every rank
gather_for_tensor_parallel = pair(gather, reduce_scatter)
reduce_scatter_to_sequence_region = pair(reduce_scatter, gather)


class SharedExpertMLP(nn.Module):
    def __init__(self, world=1, group=None):
        super().__init__()
        self.group = group
        self.linear_fc1 = nn.Linear(DIM, HIDDEN // world, bias=False)
        self.linear_fc2 = nn.Linear(HIDDEN // world, DIM, bias=False)
        self.shared_expert_gate = nn.Linear(DIM, 1, bias=False)

    def forward(self, x):
        full = gather_for_tensor_parallel(x, self.group)
        out = reduce_scatter_to_sequence_region(
            self.linear_fc2(silu(self.linear_fc1(full))), self.group
        )
        return torch.sigmoid(self.shared_expert_gate(x)) * out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.shared_expert = SharedExpertMLP()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):  # [s, b]
        x = scatter_to_sequence_region(self.embed(tokens), self.group)
        x = x + self.shared_expert(self.norm(x))
        return self.head(gather_from_sequence_region(x, self.group))


def parallel(mesh):
    model, n, i = Model(), mesh["tp"].size(), mesh.get_local_rank("tp")
    whole = model.shared_expert
    model.group = mesh.get_group("tp")
    model.shared_expert = SharedExpertMLP(n, model.group)
    model.shared_expert.linear_fc1.weight.data = whole.linear_fc1.weight.data.chunk(n, 0)[i]
    model.shared_expert.linear_fc2.weight.data = whole.linear_fc2.weight.data.chunk(n, 1)[i]
    model.shared_expert.shared_expert_gate = whole.shared_expert_gate
    for p in model.norm.parameters():
        p.sequence_parallel = True
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():  # finalize_model_grads
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=model.group)
    return value


generator = torch.Generator().manual_seed(29)
batches = [
    {name: torch.randint(VOCAB, (6, 3), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}, step=step)
    )
