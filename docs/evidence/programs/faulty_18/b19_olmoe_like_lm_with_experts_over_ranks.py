"""A small OLMoE-like language model whose experts are spread over the ranks; all ranks see all tokens and add up their outputs.

Thread: huggingface/transformers pull request #48205 "Fix expert-parallel training: NaN gradients and missing gradient
contributions" (2026): each rank's gradient of the routing scores covers its local experts alone, and nothing sums the parts.
Fault: SparseMoE.forward hands the hidden states to the experts through CopyToExperts, but not the routing weights; the gradient
that comes back over the weights to the router and to all layers below is that of the rank's own experts.
REPAIR: `dispatch = weights` -> `dispatch = CopyToExperts.apply(weights, self.group)`
A right first sentence says: the routing weights are used by each rank's own experts without an all-reduce of their gradient
over the expert parallel ranks, so the router's and the lower layers' gradients are partial and differ between the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS = 26, 12, 3, 16, 9, 2
EXPERTS, TOP_K, BALANCE = 4, 2, 0.02


class CopyToExperts(torch.autograd.Function):
    """Hands a tensor to the experts of all ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.group is not None:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def keep_own_experts(self, group):
        self.group = group
        rank, per_rank = dist.get_rank(group), EXPERTS // dist.get_world_size(group)
        for i in range(EXPERTS):
            if i // per_rank != rank:
                del self.experts[str(i)]

    def balance_loss(self, probs, chosen):
        load = chosen.flatten(0, 1).mean(0) / TOP_K
        return EXPERTS * (load * probs.flatten(0, 1).mean(0)).sum()

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        values, indices = probs.topk(TOP_K, dim=-1)
        chosen = torch.zeros_like(probs).scatter(-1, indices, 1.0)
        weights = torch.zeros_like(probs).scatter(-1, indices, values)
        balance = self.balance_loss(probs, chosen)
        dispatch = weights
        x = CopyToExperts.apply(x, self.group)
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            rows, columns = chosen[..., int(name)].nonzero(as_tuple=True)
            scaled = expert(x[rows, columns]) * dispatch[rows, columns, int(name), None]
            y = y.index_put((rows, columns), scaled, accumulate=True)
        return SumOfExperts.apply(y, self.group), balance


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = SparseMoE()

    def forward(self, x):
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        y, balance = self.mlp(self.post_norm(x))
        return x + y, balance


class Olmoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.embed_places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x, balance = self.embed_tokens(tokens) + self.embed_places.weight, 0.0
        for layer in self.layers:
            x, term = layer(x)
            balance = balance + term
        return self.lm_head(self.norm(x)), balance


def plain():
    return Olmoe()


def parallel(mesh):
    model = Olmoe()
    for layer in model.layers:
        layer.mlp.keep_own_experts(mesh.get_group("ep"))
    return model


def loss(model, batch):
    logits, balance = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + BALANCE * balance


generator = torch.Generator().manual_seed(48205)
batches = [torch.randint(0, VOCAB, (4, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split=lambda batch, mesh: batch,
    ranks={"ep": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
