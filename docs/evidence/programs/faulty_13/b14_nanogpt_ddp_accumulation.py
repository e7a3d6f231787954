"""A small GPT trained by DDP with gradient accumulation in a hand-written loop.

Thread: karpathy/build-nanogpt pull request #30 "fix sync issue that results in incorrect gradient accumulation and
incorrect loss" (2024): with more accumulation steps on several GPUs the loss curve became clearly worse.
Fault: in `train_step`, the flag require_backward_grad_sync is set between forward and backward, but DDP decides in the
forward pass whether the following backward reduces. Each forward sees the flag of the micro step before, so the first
micro batch is reduced and the last one is not: the ranks step with different gradients.
REPAIR: `logits = ddp(x)` -> `ddp.require_backward_grad_sync = micro_step == ACCUMULATION - 1; logits = ddp(x)`
A right first sentence says: in the accumulation loop of train_step, DDP's require_backward_grad_sync is set only after the
forward pass, so the last micro batch's gradients are never all-reduced and differ between the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

VOCAB, BLOCK, WIDTH, HEADS, LAYERS = 31, 8, 16, 2, 2
ACCUMULATION = 3


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, HEADS, c // HEADS).transpose(1, 2)
            for part in self.c_attn(x).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    tokens, targets = batch
    return cross_entropy(model(tokens), targets)


def parallel():
    return DDP(GPT())


def train_step(ddp, part):
    tokens, targets = part
    loss_accum = torch.zeros(())
    for micro_step, (x, y) in enumerate(
        zip(tokens.chunk(ACCUMULATION), targets.chunk(ACCUMULATION))
    ):
        logits = ddp(x)
        micro_loss = cross_entropy(logits, y) / ACCUMULATION
        loss_accum += micro_loss.detach()
        ddp.require_backward_grad_sync = micro_step == ACCUMULATION - 1
        micro_loss.backward()
    dist.all_reduce(loss_accum)
    return loss_accum / dist.get_world_size()


def make_batches(steps=3, rows=12):
    generator = torch.Generator().manual_seed(1337)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (rows, BLOCK + 1), generator=generator)
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return batches


batches = make_batches()
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, step=train_step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
