"""A sparse decoder for padded summaries: data parallel ranks, loss per token, balancing loss over the global batch.

Thread: NVIDIA/Megatron-LM pull request #7481 "Fix masked-routing local token count before the distributed reduction"
(2026), finding 10 of issue #7452 "Silent numerical-correctness bugs in Megatron Core parallelism composition".
Fault: all_reduce works in place, so in Router.balance the rank's own counts are the group's after the reduction; the
number of local tokens taken from them afterwards, by which the balancing loss is weighted because the gradients will
be divided by all tokens, is the number of all ranks' tokens.
REPAIR: `total = self.reduce(counts)` -> `total = self.reduce(counts.clone())`
A right first sentence says: the router's balancing loss is scaled by the global instead of the local number of valid
tokens, since the in-place all-reduce overwrites the local counts, so its gradient is about as many times too large as
there are ranks, while the reported loss is right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, PAD, WIDTH, HEADS, HIDDEN, LENGTH, ROWS = 30, 0, 16, 4, 12, 12, 8
LAYERS, EXPERTS, TOP_K, BALANCE = 2, 4, 2, 0.05


class AuxLossAutoScaler(torch.autograd.Function):
    """Hands the routing weights on and sends a gradient of one into the auxiliary loss."""

    @staticmethod
    def forward(ctx, weights, aux_loss):
        return weights.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(())


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.group, self.per_token_loss = None, False

    def reduce(self, counts):
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        return counts

    def balance(self, probabilities, chosen, valid):
        """The balancing loss with the whole batch's load, times the rank's tokens if the loss is per token."""
        counts = F.one_hot(chosen[valid], EXPERTS).sum((0, 1))
        total = self.reduce(counts)
        local_tokens = counts.sum() // TOP_K
        load = total / total.sum()
        aux_loss = BALANCE * EXPERTS * (load * probabilities[valid].mean(0)).sum()
        return aux_loss * local_tokens if self.per_token_loss else aux_loss

    def forward(self, x, valid):
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(TOP_K, dim=-1)
        aux_loss = self.balance(probabilities, chosen, valid)
        return AuxLossAutoScaler.apply(weights / weights.sum(-1, keepdim=True), aux_loss), chosen


class SparseFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x, valid):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens, valid.flatten())
        mixed = torch.zeros(len(tokens), EXPERTS).scatter(1, chosen, weights)
        outputs = F.silu(tokens @ self.up) @ self.down
        return torch.einsum("te,etd->td", mixed, outputs).view_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = SparseFeedForward()

    def forward(self, x, valid):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x), valid)


class SparseDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, valid):
        x = self.words(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x, valid)
        return self.head(self.norm(x))


def token_losses(model, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    valid = targets != PAD
    losses = F.cross_entropy(
        model(inputs, valid).flatten(0, 1), targets.flatten(), reduction="none"
    )
    return losses * valid.flatten(), valid.sum()


def finalize_model_grads(model, num_tokens, group):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= num_tokens


def plain():
    return SparseDecoder()


def parallel(mesh):
    model, group = SparseDecoder(), mesh.get_group("dp")
    for layer in model.layers:
        layer.mlp.router.group, layer.mlp.router.per_token_loss = group, True
    return model, group


def loss(model, batch):
    losses, count = token_losses(model, batch)
    return losses.sum() / count


def step(built, batch):
    model, group = built
    losses, count = token_losses(model, batch)
    losses.sum().backward()
    report = torch.stack([losses.detach().sum(), count.to(losses.dtype)])
    dist.all_reduce(report, group=group)
    finalize_model_grads(model, report[1], group)
    return report[0] / report[1]


generator = torch.Generator().manual_seed(7481)


def summaries():
    tokens = torch.randint(1, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    lengths = torch.randint(5, LENGTH + 2, (ROWS, 1), generator=generator)
    return tokens * (torch.arange(LENGTH + 1) < lengths)


batches = [summaries() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
