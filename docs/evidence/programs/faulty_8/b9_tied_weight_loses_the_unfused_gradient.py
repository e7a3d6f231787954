"""Data parallelism with main_grad buffers, as in Megatron-LM: a tied weight gets only one of its two gradients.

Thread: NVIDIA/TransformerEngine pull request #545 "wgrad should be zero'ed out if a weight parameter is shared among
multiple layers" (2023): with tied embeddings, one layer adds into main_grad itself and the other does not.
Wrong: FusedLinear adds its weight gradient into main_grad in its backward and sets grad_added_to_main_grad. The hook
skips .grad of such a weight. But the tied weight's embedding look-up still puts its gradient into .grad: it is dropped.
PLACE: embed.weight (tied with the head), backward pass: the hook that adds .grad into main_grad
KIND: gradient of the embedding look-up of a tied weight dropped, since the head's was already added to main_grad
REPAIR: `if not getattr(p, "grad_added_to_main_grad", False):` -> `if p.grad is not None:`
EXPECT: the forward pass agrees; the gradient of embed.weight alone is wrong, on all ranks: it is the head's part
without that of the embedding look-up (embed.weight is tied and used twice). All other gradients agree. Add .grad into
main_grad for a weight that is used by an unfused layer too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 16, 8


class LinearWithFusedGradient(torch.autograd.Function):
    """x @ weight.T, whose weight gradient goes straight into weight.main_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad.add_(gradient.flatten(0, -2).t() @ x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return gradient @ weight, None


def fused_linear(x, weight):
    return (
        LinearWithFusedGradient.apply(x, weight) if hasattr(weight, "main_grad") else x @ weight.t()
    )


class FusedLinear(nn.Linear):
    def forward(self, x):
        y = fused_linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc1, self.fc2 = FusedLinear(DIM, 4 * DIM), FusedLinear(4 * DIM, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.fc2(torch.relu(self.fc1(self.norm(x + past))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return fused_linear(self.norm(x), self.embed.weight)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def add_to_main_grad(p):
    if not getattr(p, "grad_added_to_main_grad", False):
        p.main_grad.add_(p.grad)
    p.grad = None


def parallel(mesh):
    model = GPT()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
        p.register_post_accumulate_grad_hook(add_to_main_grad)
    return model


def step(model, batch):
    for p in model.parameters():
        p.main_grad.zero_()
        p.grad_added_to_main_grad = False
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.main_grad)
        p.grad = p.main_grad / dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(105)


def draw():
    return torch.randint(VOCAB, (8, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
