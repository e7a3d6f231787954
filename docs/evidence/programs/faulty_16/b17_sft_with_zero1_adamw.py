"""Supervised finetuning of a small chat model, data parallel, with a ZeRO-1 AdamW that clips the gradients.

Thread: pytorch/xla pull request #4796 "Minor fix: ZeRO-1 grad clipping" (2023): the gradient norm of the sharded optimizer was that
of the rank's shard; the local norms have to be reduced over the shards.
Fault: ZeroAdamW.clip_shard takes the norm of the rank's own shard of the gradients as the total norm, so each rank scales its
shard by a factor of its own, and by less than the norm of all the gradients asks for.
REPAIR: `squares = gradient.square().sum()` -> `squares = all_reduce(gradient.square().sum())`
A right first sentence says: the sharded optimizer clips by the gradient norm of its own shard, not all-reduced over the data
parallel ranks, so each shard gets another and too weak clipping factor and the updated weights are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, IGNORED = 31, 12, 2, 10, -100


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 20, bias=False) for _ in range(2))
        self.down = nn.Linear(20, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ChatModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the norm of the gradients before each update."""

    def __init__(self, parameters, lr=2e-3, weight_decay=0.1, max_norm=0.5):
        super().__init__(list(parameters), lr=lr, weight_decay=weight_decay)
        self.max_norm = max_norm

    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], self.max_norm)
        return super().step(closure)


def all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor


class ZeroAdamW(torch.optim.Optimizer):
    """Each rank keeps the AdamW state of one shard of the flattened parameters and updates it."""

    def __init__(self, parameters, lr=2e-3, weight_decay=0.1, max_norm=0.5):
        super().__init__(list(parameters), dict(lr=lr, weight_decay=weight_decay))
        self.params = self.param_groups[0]["params"]
        self.max_norm = max_norm
        self.shard, self.inner = None, None

    def flatten(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()))

    def own(self, flat):
        return flat.chunk(dist.get_world_size())[dist.get_rank()]

    def clip_shard(self, gradient):
        squares = gradient.square().sum()
        gradient.mul_((self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def step(self, closure=None):
        flat = self.flatten(self.params)
        if self.inner is None:
            group = self.param_groups[0]
            self.shard = nn.Parameter(self.own(flat).clone())
            self.inner = torch.optim.AdamW(
                [self.shard], lr=group["lr"], weight_decay=group["weight_decay"]
            )
        gradients = all_reduce(self.flatten([p.grad for p in self.params]))
        self.shard.copy_(self.own(flat))
        self.shard.grad = self.own(gradients / dist.get_world_size()).clone()
        self.clip_shard(self.shard.grad)
        self.inner.step()

        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard.detach())
        flat = torch.cat(shards)
        for p in self.params:
            p.copy_(flat[: p.numel()].view_as(p))
            flat = flat[p.numel() :]


def token_loss(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def plain():
    return ChatModel()


def parallel(mesh):
    model = ChatModel()
    return model, ZeroAdamW(model.parameters())


def loss(model, batch):
    return token_loss(model, batch) / (batch["labels"] != IGNORED).sum()


def step(built, batch):
    model, _ = built
    tokens = all_reduce((batch["labels"] != IGNORED).sum())
    value = token_loss(model, batch) * dist.get_world_size() / tokens
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(4796)


def conversations(number=8):
    text = torch.randint(0, VOCAB, (number, LENGTH + 1), generator=generator)
    prompts = torch.randint(2, 7, (number, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompts, IGNORED)
    return {"input_ids": text[:, :-1], "labels": labels}


batches = [conversations() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 4}, optimizer=ClippedAdamW
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
