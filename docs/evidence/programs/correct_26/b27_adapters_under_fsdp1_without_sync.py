"""Adapters in a frozen chat model under FSDP1, which reduces only in the last of four backward passes.

Thread: AnswerDotAI/fsdp_qlora pull request #6 "Add `no_sync` support, fix gradient accumulation" (2024), and
pytorch/pytorch issue #91167 "[FSDP] `use_orig_params=True`: allow non-uniform `requires_grad` during init".
What could be accused: in three of four passes every rank keeps the whole gradients of its own rows alone, the adapters
are units of their own while the frozen weights around them are sharded in others, and clip sums squares over the ranks
for FSDP alone; but the fourth pass reduces the sum of all four, frozen weights get none, every pass has the same number
of answer tokens on both ranks, so that FSDP's mean is the mean over all, and what is left of a gradient is a shard.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import titanlite

WORDS, WIDTH, HEADS, LAYERS, LENGTH, ROWS, PASSES = 18, 16, 2, 2, 8, 16, 4
PROMPT, RANK, ALPHA = 3, 3, 6.0


class Adapter(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.02 * torch.randn(outputs, RANK))

    def forward(self, x):
        return (x @ self.a.t() @ self.b.t()) * (ALPHA / RANK)


class AdaptedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base, self.adapter = nn.Linear(inputs, outputs), Adapter(inputs, outputs)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = AdaptedLinear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = AdaptedLinear(WIDTH, 40), AdaptedLinear(40, WIDTH)
        for module in (self.norm1, self.norm2, self.out):
            module.requires_grad_(False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        heads = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ChatModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        for module in (self.words, self.places, self.norm, self.head):
            module.requires_grad_(False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain():
    return ChatModel()


def parallel(mesh):
    policy = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, (Adapter, Layer))
    )
    return FullyShardedDataParallel(
        ChatModel(),
        process_group=mesh.get_group("dp"),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=policy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def loss(model, batch):
    logits = model(batch["tokens"])[:, PROMPT - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, PROMPT:].flatten())


def step(model, batch):
    value = torch.zeros(())
    for number, tokens in enumerate(batch["tokens"].chunk(PASSES)):
        last = number == PASSES - 1
        with contextlib.nullcontext() if last else model.no_sync():
            part = loss(model, {"tokens": tokens}) / PASSES
            part.backward()
        value += part.detach()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def clip(model, limit=0.3):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    squares = sum((grad.square().sum() for grad in grads), torch.zeros(()))
    if isinstance(model, FullyShardedDataParallel):
        dist.all_reduce(squares)
    norm = squares.sqrt()
    for grad in grads:
        grad.mul_((limit / norm).clamp(max=1.0))
    return norm


generator = torch.Generator().manual_seed(91167)


def chats():
    start = torch.randint(0, WORDS, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 4, (ROWS, 1), generator=generator)
    return {"tokens": (start + stride * torch.arange(LENGTH)) % WORDS}


batches = [chats() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    clip=clip,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
