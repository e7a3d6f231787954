"""A small OLMoE whose experts are dealt to three ranks; all ranks see all tokens and the outputs of experts are summed.

Thread: huggingface/transformers pull request #48689 "Keep the expert-parallel sentinel slots out of the router
gradient" (2026, issue #48687): with batched_mm "the sentinel slots keep a non-zero expert output, and the zero routing
weight hides that in the forward but not in the backward", so the router collects gradient for them.
Fault: in BatchedExperts.forward the slots of other ranks' experts are clamped to the last local expert; their weight is
zero, but the gradient of that weight is not, and LocalScores.backward sums over the ranks as if it were.
REPAIR: `weights = scores.flatten()` -> `weights = scores.flatten().masked_fill(slots == local, 0.0)`
A right first sentence says: the gradient of the routing scores (of the router, gate) is wrong, because slots routed to
experts of other ranks go through a clamped local expert (BatchedExperts), which adds to the gradient of their scores.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HIDDEN, EXPERTS, TOP_K, LENGTH, ROWS = 24, 16, 12, 6, 2, 8, 4


def summed(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.group, ctx.in_forward = group, in_forward
        return summed(x, group) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.in_forward else summed(grad, ctx.group), None, None


class LocalScores(torch.autograd.Function):
    """The scores of local experts; every slot has one owner, so that the sum is exact."""

    @staticmethod
    def forward(ctx, scores, foreign, group):
        ctx.group = group
        return scores.masked_fill(foreign, 0.0)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None, None


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, x):
        return F.linear(x, self.weight).softmax(-1).topk(TOP_K, dim=-1)


class BatchedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)

    def forward(self, x, scores, indices):
        slots, local = indices.flatten(), self.gate_up_proj.shape[0]
        x = x.repeat_interleave(TOP_K, 0).unsqueeze(-1)
        weights = scores.flatten()
        experts = slots.clamp(max=local - 1)
        gate, up = (self.gate_up_proj[experts] @ x).chunk(2, 1)
        out = (self.down_proj[experts] @ (F.silu(gate) * up)).squeeze(-1)
        return (out * weights.unsqueeze(-1)).unflatten(0, (-1, TOP_K)).sum(1)


class SparseMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.group = Router(), BatchedExperts(), None

    def forward(self, x):
        tokens = x.flatten(0, 1)
        if self.group is None:
            return self.experts(tokens, *self.gate(tokens)).view_as(x)
        out = self.experts(Sum.apply(tokens, self.group, False), *self.gate(tokens))
        return Sum.apply(out, self.group, True).view_as(x)

    def split(self, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.group, local = group, EXPERTS // size
        for name, whole in list(self.experts.named_parameters()):
            setattr(self.experts, name, nn.Parameter(whole.detach().chunk(size)[rank].clone()))

        def localize(router, args, output):
            foreign = output.indices // local != rank
            indices = (output.indices % local).masked_fill(foreign, local)
            return LocalScores.apply(output.values, foreign, group), indices

        self.gate.register_forward_hook(localize)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = SparseMoe()

    def forward(self, x):
        q, k, v = self.qkv(self.input_norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_norm(x))


class Olmoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        return self.lm_head(self.norm(self.layers(self.embed(x))))


def parallel(mesh):
    model = Olmoe()
    for layer in model.layers:
        layer.mlp.split(mesh.get_group("ep"))
    return model


def shard(name):
    return (0, "ep") if ".experts." in name else None


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


generator = torch.Generator().manual_seed(48689)
batches = [torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = Olmoe, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 3}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
