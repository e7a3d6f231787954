"""LoRA under FSDP2: each step, the adapters are added to the sharded base weights, sampled from, and subtracted again.

Thread: of the kind huggingface/trl pull request #2818 "GRPO + PEFT + vLLM" (2025) and pull request #2725 "Fix GRPO PEFT" (2025).
Correct: the weights are cut along their rows, so a rank's rows of B times the gathered A are its rows of the product. The
same product is subtracted before the forward pass, up to rounding errors.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear
from torch.nn.utils import clip_grad_norm_

import titanlite

VOCAB, DIM, RANK, SCALE, BETA = 12, 8, 4, 1.5, 0.05


class Adapted(nn.Linear):
    """A frozen linear layer and its adapter."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, inputs) / RANK)
        self.lora_b = nn.Parameter(torch.randn(outputs, RANK) / 10)

    def forward(self, x):
        return super().forward(x) + SCALE * linear(linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def add(self, sign):
        rows = self.lora_b.to_local() @ self.lora_a.full_tensor()
        self.weight.to_local().add_(rows, alpha=sign * SCALE)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), Adapted(DIM, 16), Adapted(16, DIM)

    def forward(self, x):
        past = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(torch.relu(self.up(past + x)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Adapted(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


class RolloutEngine:
    def load(self, module):
        self.weights = {name: p.full_tensor() for name, p in module.named_parameters()}


def loss(model, batch):
    """Policy gradient, and an estimate of the divergence from the reference that is never negative."""
    logps = model(batch["tokens"])
    ratio = (batch["reference"] - logps).exp()
    divergence = ratio - 1 + logps - batch["reference"]
    return (
        BETA * divergence - batch["advantages"][:, None] * (logps - logps.detach()).exp()
    ).mean()


def parallel(mesh):
    model = Policy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), RolloutEngine()


def step(built, batch):
    model, engine = built
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    for layer in adapted:
        layer.add(1)
    engine.load(model)
    for layer in adapted:
        layer.add(-1)
    value = loss(model, batch)
    value.backward()
    return value


def clip(built):
    model = built[0] if isinstance(built, tuple) else built
    return clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.05)


def make_optimizer(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


rng = torch.Generator().manual_seed(326)


def draw():
    return {
        "tokens": torch.randint(VOCAB, (6, 5), generator=rng),
        "reference": -2.5 + 0.3 * torch.randn(6, 4, generator=rng),
        "advantages": torch.randn(6, generator=rng),
    }


batches = [draw() for _ in range(3)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, step=step, clip=clip, ranks={"dp": 2}, split="dp")
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
