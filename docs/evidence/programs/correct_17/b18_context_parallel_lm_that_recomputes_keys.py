"""A context parallel language model that gathers the normalized hidden states and computes all keys and values on every rank.

Might be accused because: the ranks hold 5 and 3 positions; every rank computes the keys and values of the whole sequence, so the
key and value weights do double work and still their gradients are summed like the others; no keys travel between ranks; the
gathered states' gradient is all-reduced and then cut; no gradient is averaged.
Correct because: on a rank the gradient of the key and value weights holds the contribution of the rank's own queries only, over
all positions, so the sum over the ranks is the whole gradient. The backward pass of the gather sums the ranks' gradients of a
position and hands them to the rank that holds it. The losses are sums over own tokens divided by the number of all tokens.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, KV_HEADS, PARTS = 18, 12, 4, 2, (5, 3)
LENGTH = sum(PARTS)
HEAD = WIDTH // HEADS


class GatherStates(torch.autograd.Function):
    """All positions from the uneven parts of the ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [x.new_empty(x.size(0), length, x.size(2)) for length in PARTS]
        for source, part in enumerate(parts):
            if source == dist.get_rank():
                part.copy_(x)
            dist.broadcast(part, source)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.split(PARTS, dim=1)[dist.get_rank()]


class Layer(nn.Module):
    gather = False

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.expand, self.shrink = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, positions):
        own = self.norm1(x)
        every = GatherStates.apply(own) if self.gather else own
        q = self.query(own).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        k, v = (
            f(every).unflatten(-1, (KV_HEADS, HEAD)).transpose(1, 2) for f in (self.key, self.value)
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        visible = positions[:, None] >= torch.arange(LENGTH)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.shrink(F.relu(self.expand(self.norm2(x))).square())


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens, positions):
        x = self.token(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))


def summed_nll(model, tokens, targets, positions):
    logits = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def plain():
    return LanguageModel()


def parallel(mesh):
    model = LanguageModel()
    for layer in model.layers:
        layer.gather = True
    return model


def loss(model, batch):
    tokens, targets, positions = batch
    return summed_nll(model, tokens, targets, positions[0]) / targets.numel()


def step(model, batch):
    tokens, targets, positions = batch
    value = summed_nll(model, tokens, targets, positions[0]) / (len(tokens) * LENGTH)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def split(batch, mesh):
    return tuple(tensor.split(PARTS, dim=1)[mesh.get_local_rank("cp")] for tensor in batch)


generator = torch.Generator().manual_seed(53)


def texts(rows=3):
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:], torch.arange(LENGTH).repeat(rows, 1)


batches = [texts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"cp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
