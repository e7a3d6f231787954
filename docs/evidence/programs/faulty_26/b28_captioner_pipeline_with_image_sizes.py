"""An image captioner in a two-stage pipeline that accumulates over groups of pictures of different sizes.

Thread: NVIDIA-NeMo/Automodel pull request #3530 "fix(pp): keep accumulated grads across stage re-initialization"
(2026): the stages are initialized again whenever the sequence length changes, which ends with param.grad = None. "Only
the last micro-batch was actually training the model", while the loss, summed separately, looked right.
Fault: Pipeline.run calls reset_shapes at every new length, which cleans up with clear_grads=True; in step the lengths
differ between the two groups of a batch, so the gradients of the first group are thrown away.
REPAIR: `self._post_metadata_cleanup(clear_grads=True)` -> `self._post_metadata_cleanup(clear_grads=False)`
A right first sentence says: on both stages the gradients of every parameter are only those of the last of the groups of
pictures; those of the first group are cleared as the stages are initialized again for another sequence length.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, PIXELS, WIDTH, HEADS, WORDS, MAX_LENGTH, LAYERS = 19, 6, 16, 2, 5, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.words = nn.Linear(PIXELS, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x, words):
        if self.words is not None:
            x = torch.cat([self.patches(x), self.words(words)], 1)
            x = x + self.positions.weight[: x.size(1)]
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))[:, -words.size(1) :]


def build_stage(whole, index, count):
    mine = range(index * LAYERS // count, (index + 1) * LAYERS // count)
    whole.blocks = nn.ModuleDict({str(i): whole.blocks[str(i)] for i in mine})
    others = ["patches", "words", "positions"] * (index > 0)
    for name in others + ["norm", "head"] * (index < count - 1):
        setattr(whole, name, None)
    return whole


class Pipeline:
    """GPipe between neighbours; shapes are exchanged once and again when a length is new."""

    def __init__(self, module, group, microbatches=2):
        self.module, self.group, self.microbatches = module, group, microbatches
        self.index, self.length = group.rank(), None
        self.first, self.last = self.index == 0, self.index == group.size() - 1
        self.inputs, self.outputs, self.buffer = [], [], None

    def peer(self, step):
        return dist.get_global_rank(self.group, self.index + step)

    def reset_shapes(self, pictures, words):
        length = pictures.size(1) + words.size(1)
        if length == self.length:
            return
        self.length, self.buffer = length, torch.zeros(len(words), length, WIDTH)
        with torch.no_grad():
            self.module(pictures if self.first else self.buffer, words)
        self._post_metadata_cleanup(clear_grads=True)

    def _post_metadata_cleanup(self, clear_grads):
        self.inputs, self.outputs = [], []
        if clear_grads:
            self.module.zero_grad(set_to_none=True)

    def run(self, pictures, words, targets, scale):
        parts = [t.chunk(self.microbatches) for t in (pictures, words, targets)]
        self.reset_shapes(parts[0][0], parts[1][0])
        total = 0.0
        for x, part_words, part_targets in zip(*parts):
            if not self.first:
                dist.recv(self.buffer, self.peer(-1), group=self.group)
                x = self.buffer.clone().requires_grad_()
            y = self.module(x, part_words)
            if self.last:
                y = F.cross_entropy(y.flatten(0, 1), part_targets.flatten(), reduction="sum")
                y, total = y * scale, total + y.detach() * scale
            else:
                dist.send(y.detach().contiguous(), self.peer(1), group=self.group)
            self.inputs.append(x)
            self.outputs.append(y)
        for x, y in zip(self.inputs, self.outputs):
            gradient = None if self.last else torch.empty_like(y)
            if not self.last:
                dist.recv(gradient, self.peer(1), group=self.group)
            y.backward(gradient)
            if not self.first:
                dist.send(x.grad, self.peer(-1), group=self.group)
        self.inputs, self.outputs = [], []
        return total


plain = Captioner


def parallel(mesh):
    group = mesh.get_group("pp")
    module = build_stage(plain(), group.rank(), group.size())
    return module, Pipeline(module, group)


def loss(model, batch):
    outputs = [(model(pictures, words).flatten(0, 1), t.flatten()) for pictures, words, t in batch]
    return sum(F.cross_entropy(*pair) for pair in outputs) / len(batch)


def step(built, batch):
    values = [built[1].run(*group, 1 / group[2].numel() / len(batch)) for group in batch]
    return sum(values) if built[1].last else None


generator = torch.Generator().manual_seed(3530)


def group_of_pictures(patches):
    pictures = torch.randn(4, patches, PIXELS, generator=generator, dtype=torch.float64)
    text = torch.randint(VOCAB, (4, WORDS + 1), generator=generator)
    return pictures, text[:, :-1], text[:, 1:]


batches = [[group_of_pictures(4), group_of_pictures(9)] for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
