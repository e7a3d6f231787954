"""Pipeline stages built on the meta device: the rotary frequencies stay zero, as no state dict has them.

Thread: https://github.com/meta-pytorch/torchtune/pull/218 "Fix training regression by removing meta device support",
2024-01-19 (and https://github.com/pytorch/torchtitan/issues/316, 2024-05-08, about pipeline stages that are
initialized from a seed checkpoint).
Wrong: materialize() gives every tensor storage of zeros, then the stage's weights are loaded. inv_freq is a
non-persistent buffer, so nothing fills it again, and all positions are rotated by an angle of zero.
EXPECT: on every stage, the buffer inv_freq (of blocks.*.rope) differs from the start: it is zero, not initialized
after meta. In the forward pass the output of blocks.0.rope (or the attention of blocks.0) is the first that differs.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS, SEQ = 12, 8, 2, 6


class RotaryEmbedding(nn.Module):
    def __init__(self, size, base=100.0):
        super().__init__()
        inv_freq = base ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x):
        angles = torch.arange(x.shape[-2])[:, None] * self.inv_freq
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rope = nn.LayerNorm(DIM), RotaryEmbedding(DIM // HEADS)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        return x + self.out(h.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    def __init__(self, stages=(0, 1)):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if 0 in stages else None
        self.blocks = nn.ModuleDict({str(i): Block() for i in stages})
        self.head = nn.Linear(DIM, VOCAB) if 1 in stages else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_func(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return loss_func(model(batch["tokens"]), batch["labels"])


def materialize(module, checkpoint):
    module._apply(lambda t: torch.zeros_like(t, device="cpu"))
    own = module.state_dict()
    module.load_state_dict({n: t for n, t in checkpoint.items() if n in own})
    return module


def parallel(mesh):
    checkpoint, index = Llama().state_dict(), mesh.get_local_rank("pp")
    with torch.device("meta"):
        part = Llama([index])
    part = materialize(part, checkpoint)
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return part, ScheduleGPipe(stage, 2, loss_fn=loss_func), index


def step(built, batch):
    _, schedule, index = built
    losses, inputs = [], [batch["tokens"]] if index == 0 else []
    schedule.step(*inputs, target=batch["labels"], losses=losses)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(316)
batches = [
    {n: torch.randint(VOCAB, (4, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Llama, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
