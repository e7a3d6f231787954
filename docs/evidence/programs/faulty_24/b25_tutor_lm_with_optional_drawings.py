"""A tutoring language model with a drawing encoder that not every batch needs; Adam on copies owned by the ranks in turn.

Thread: NVIDIA/Megatron-LM pull request #6871 "fix: clear stale gradients in HybridDeviceOptimizer" (2026): the
optimizer keeps copies of the parameters with gradients of their own; where a parameter has no gradient in a step, the
copy's requires_grad is set to false, but torch's optimizers ask for `grad is None`.
Fault: in OffloadedAdamW.step the copy of a parameter without a gradient keeps the gradient of an earlier step, so a
batch without drawings updates the drawing encoder once more with it (and decays it, and counts a step).
REPAIR: `copy.requires_grad = False` -> `copy.requires_grad, copy.grad = False, None`
A right first sentence says: gradients are right, but in a step without drawings the drawing encoder's weights change
anyway, because the optimizer's copies keep the last gradient instead of None and Adam steps on it again.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, ROWS, LAYERS = 28, 16, 4, 10, 6, 2
PATCHES, PIXELS = 4, 12


def settings():
    return dict(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DrawingEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.place = nn.Linear(PIXELS, WIDTH), nn.Embedding(PATCHES, WIDTH)
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, drawings):
        return self.project(F.gelu(self.norm(self.patch(drawings) + self.place.weight)))


class TutorLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drawing = DrawingEncoder()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, drawings=None):
        x = self.words(tokens) + self.positions.weight
        if drawings is not None:
            x = torch.cat([self.drawing(drawings), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, -LENGTH:]))


class OffloadedAdamW(torch.optim.Optimizer):
    """Each parameter belongs to one rank, which updates a copy of it in host memory and broadcasts the result."""

    def __init__(self, parameters, group):
        super().__init__(parameters, settings())
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.copies, self.inner = None, None

    def build(self):
        own = self.param_groups[0]["params"][self.rank :: self.size]
        self.copies = [
            (parameter, nn.Parameter(parameter.detach().cpu().clone())) for parameter in own
        ]
        self.inner = torch.optim.AdamW([copy for _, copy in self.copies], **settings())

    def copy_gradients(self):
        for parameter, copy in self.copies:
            if parameter.grad is None:
                copy.requires_grad = False
                continue
            copy.requires_grad = True
            if copy.grad is None:
                copy.grad = torch.empty_like(copy)
            copy.grad.copy_(parameter.grad)

    @torch.no_grad()
    def step(self, closure=None):
        if self.copies is None:
            self.build()
        self.copy_gradients()
        self.inner.step()
        for parameter, copy in self.copies:
            parameter.copy_(copy)
        for i, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.data, group=self.group, group_src=i % self.size)


def tutor_loss(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1], batch.get("drawings"))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def average(tensors, group):
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size(group)


def plain():
    return TutorLM()


def parallel(mesh):
    model, group = TutorLM(), mesh.get_group("dp")
    return model, OffloadedAdamW(model.parameters(), group), group


def loss(model, batch):
    return tutor_loss(model, batch)


def step(built, batch):
    model, _, group = built
    value = tutor_loss(model, batch)
    value.backward()
    average([p.grad for p in model.parameters() if p.grad is not None], group)
    reported = value.detach().clone()
    average([reported], group)
    return reported


generator = torch.Generator().manual_seed(6871)


def exercise(drawn):
    batch = {"tokens": torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)}
    if drawn:
        batch["drawings"] = torch.randn(
            ROWS, PATCHES, PIXELS, generator=generator, dtype=torch.float64
        )
    return batch


batches = [exercise(drawn) for drawn in (True, False, True, False)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, **settings()),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
