"""Joint attention over text and image tokens with context parallelism: the text is on every rank.

Thread: https://github.com/huggingface/diffusers/pull/11941 "Context Parallel w/ Ring & Ulysses & Unified
Attention" (Flux), 2025-07-16.
Wrong: only the image tokens are split over cp. Each rank concatenates all text tokens with its image tokens
before keys and values are gathered, so the gathered sequence has every text token twice.
A right diagnosis says: the error is inside attn, between the outputs of to_q, to_k, to_v (which agree) and
the input of to_out, on both ranks: the gathered keys and values hold the text tokens once per rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import titanlite

DIM, HEADS, CHANNELS, TEXT_DIM = 16, 2, 4, 6


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=2)[ctx.group.rank()], None


class JointAttention(nn.Module):
    cp_group = None

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for w in (self.to_q, self.to_k, self.to_v)
        )
        if self.cp_group is not None:
            k, v = GatherSequence.apply(k, self.cp_group), GatherSequence.apply(v, self.cp_group)
        out = scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class SingleStreamBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), JointAttention()
        self.ff = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))

    def forward(self, text, image):
        x = torch.cat([text, image], dim=1)
        x = x + self.attn(self.norm(x))
        return (x + self.ff(x))[:, text.shape[1] :]


class FluxTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.x_embedder, self.context_embedder = nn.Linear(CHANNELS, DIM), nn.Linear(TEXT_DIM, DIM)
        self.block = SingleStreamBlock()
        self.proj_out = nn.Linear(DIM, CHANNELS)

    def forward(self, hidden_states, encoder_hidden_states):
        text = self.context_embedder(encoder_hidden_states)
        return self.proj_out(self.block(text, self.x_embedder(hidden_states)))


def loss(model, batch):
    prediction = model(batch["hidden_states"], batch["encoder_hidden_states"])
    return mse_loss(prediction, batch["target"])


def parallel(mesh):
    model, group = FluxTransformer(), mesh.get_group("cp")
    model.block.attn.cp_group = group
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def cp_split(batch, mesh):
    n, i = mesh["cp"].size(), mesh.get_local_rank("cp")
    own = {name: batch[name].chunk(n, dim=1)[i] for name in ("hidden_states", "target")}
    return own | {"encoder_hidden_states": batch["encoder_hidden_states"]}


def draw(generator):
    sizes = {"hidden_states": (8, CHANNELS), "target": (8, CHANNELS)}
    sizes["encoder_hidden_states"] = (3, TEXT_DIM)
    return {name: torch.randn(2, *size, generator=generator) for name, size in sizes.items()}


generator = torch.Generator().manual_seed(11941)
batches = [draw(generator) for _ in range(3)]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split=cp_split)
    print(titanlite.compare(FluxTransformer, parallel, **options))
