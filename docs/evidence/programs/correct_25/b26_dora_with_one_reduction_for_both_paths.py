"""DoRA adapters on a frozen tensor-parallel model, whose weight norms are summed over the ranks and hold no gradient.

Thread: huggingface/peft pull request #1474 "Implement DoRA" (2024): the layer's output is scaled by magnitude / norm of
weight + scaling * B A, and the norm is a constant for the gradient, as in section 4.3 of the paper.
Correct: where a weight is cut by columns, its rows' norms need the squares of all ranks, so these are all-reduced
without gradient. There A is cut and B is whole: the outputs of the base and the low-rank activations are reduced
together, as one tensor, before B and the magnitude, so both have whole gradients on every rank. Where a weight is cut
by rows, A is whole: the gradient of its activations is all-reduced, that of its input isn't again. B starts at zero, so
the first gradients of A are zero; the frozen weights have none.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LAYERS, RANK, SCALING, LENGTH, ROWS = 30, 16, 4, 2, 3, 2.0, 8, 6


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class DoraLinear(nn.Module):
    cut = None  # the dimension of the weight that is cut

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, False)
        self.lora_a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, RANK))
        self.magnitude = nn.Parameter(self.weight.norm(dim=1))
        self.group = None

    def weight_norm(self):
        with torch.no_grad():
            squares = (self.weight + SCALING * self.lora_b @ self.lora_a).square().sum(1)
            if self.cut == 1:
                dist.all_reduce(squares, group=self.group)
            return squares.sqrt()

    def forward(self, x):
        if self.cut == 0:
            base = F.linear(CopyToRanks.apply(x, self.group), self.weight)
            low = CopyToRanks.apply(F.linear(x, self.lora_a), self.group)
        else:
            base, low = F.linear(x, self.weight), F.linear(x, self.lora_a)
        if self.cut == 1:
            both = ReduceFromRanks.apply(torch.cat([base, low], dim=-1), self.group)
            base, low = both.split([len(self.weight), RANK], dim=-1)
        y = base + SCALING * F.linear(low, self.lora_b)
        return y * (self.magnitude / self.weight_norm())

    def cut_over(self, mesh, dim):
        self.cut, self.group = dim, mesh.get_group()
        for name, parameter in self.named_parameters():
            if (own := cut_dimension(name, dim)) is not None:
                pieces = parameter.data.chunk(mesh.size(), own)
                parameter.data = pieces[mesh.get_local_rank()].contiguous()


def cut_dimension(name, dim):
    """Of one of the layer's parameters, when its weight is cut along dim."""
    if name == "weight":
        return dim
    return {0: {"lora_b": 0, "magnitude": 0}, 1: {"lora_a": 1}}[dim].get(name)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (DoraLinear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = DoraLinear(WIDTH, 32), DoraLinear(32, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        heads = (f(y).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name or "magnitude" in name)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain():
    return Model()


def parallel(mesh):
    model = Model()
    for module in model.layers:
        for layer in (module.q, module.k, module.v, module.up):
            layer.cut_over(mesh["tp"], 0)
        for layer in (module.o, module.down):
            layer.cut_over(mesh["tp"], 1)
    return model


def shard(name):
    *_, layer, parameter = name.split(".")
    dims = dict(q=0, k=0, v=0, up=0, o=1, down=1)
    dim = cut_dimension(parameter, dims[layer]) if layer in dims else None
    return None if dim is None else (dim, "tp")


def loss(model, batch):
    prompt, answer = batch["prompt"], batch["answer"]
    tokens = torch.cat([prompt, answer], dim=1)
    logits = model(tokens)[:, prompt.shape[1] - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1), answer.flatten())


generator = torch.Generator().manual_seed(1474)


def instructions():
    words = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    return {"prompt": words[:, :3], "answer": words[:, 3:]}


batches = [instructions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    shard=shard,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
