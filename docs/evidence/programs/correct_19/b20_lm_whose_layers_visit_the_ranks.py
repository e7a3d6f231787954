"""A language model whose layers belong to one rank each and visit all ranks when they are used, each rank with its own rows.

Might be accused because: a rank's model holds every second layer only, yet it runs all of them and there is no pipeline; the
others start as zeros; nothing reduces the layers' gradients after the backward pass; a layer is called by functional_call on a
template.
Correct because: FromOwner broadcasts the owner's weights, the zeros are only a buffer, and its backward pass sums the gradients
of all ranks on the owner and divides by their number, which is the mean over equal parts of the batch. The embeddings, the norm
and the head are on all ranks and their gradients are averaged in one flat tensor. So each weight gets the gradient of the whole
batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS = 24, 12, 3, 9, 5


class Layer(nn.Module):
    """Attention and a gated MLP side by side."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        qkv = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(attended) + self.down(self.gate(y).sigmoid() * self.up(y))


class FromOwner(torch.autograd.Function):
    """The owner's weights on every rank; the owner gets the mean of the ranks' gradients."""

    @staticmethod
    def forward(ctx, flat, owner):
        ctx.owner = owner
        flat = flat.clone()
        dist.broadcast(flat, owner)
        return flat

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.reduce(grad, ctx.owner)
        return grad / dist.get_world_size(), None


class Visitor:
    """Stands for a layer that lives on some rank. The template lends its code and shapes only."""

    def __init__(self, layer, owner, template):
        self.layer, self.owner, self.template = layer, owner, template
        self.shapes = {name: p.shape for name, p in template.named_parameters()}

    def flat(self):
        if self.owner == dist.get_rank():
            return torch.cat([p.flatten() for p in self.layer.parameters()])
        size = sum(shape.numel() for shape in self.shapes.values())
        return torch.zeros(size, dtype=torch.get_default_dtype(), requires_grad=True)

    def __call__(self, x):
        parts = FromOwner.apply(self.flat(), self.owner)
        parts = parts.split([shape.numel() for shape in self.shapes.values()])
        weights = {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)
        }
        return functional_call(self.template, weights, (x,))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.calls = list(self.layers.values())

    def send_layers_home(self):
        """Keeps the own layers; the calls go to visitors from now on."""
        rank, world = dist.get_rank(), dist.get_world_size()
        template = Layer().requires_grad_(False)
        self.calls = [Visitor(layer, int(i) % world, template) for i, layer in self.layers.items()]
        for i in range(LAYERS):
            if i % world != rank:
                del self.layers[str(i)]
                self.calls[i].layer = None
        return self

    def everywhere(self):
        """The parameters that all ranks hold."""
        own = {id(p) for p in self.layers.parameters()}
        return [p for p in self.parameters() if id(p) not in own]

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for call in self.calls:
            x = call(x)
        return self.head(self.norm(x))


def plain():
    return LanguageModel()


def parallel(mesh):
    return LanguageModel().send_layers_home()


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    value = value.detach()
    grads = [parameter.grad for parameter in model.everywhere()]
    flat = torch.cat([value.view(1), *(grad.flatten() for grad in grads)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat[1:].split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
    return flat[0].clone()


generator = torch.Generator().manual_seed(20)
batches = [torch.randint(0, VOCAB, (6, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
