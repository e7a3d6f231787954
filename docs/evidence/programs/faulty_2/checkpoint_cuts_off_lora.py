"""Reentrant checkpointing of LoRA layers behind a frozen embedding.

Thread: https://github.com/microsoft/LoRA/issues/120 "Using gradient checkpoint with LoRA", 2023-08-30.
Wrong: the checkpointed layers' input comes from the frozen embedding and requires no gradient, so
reentrant checkpointing returns outputs without a graph.
A right diagnosis says: the LoRA parameters of all layers have no gradient on the ranks: the backward
pass is cut off at the layers, whose outputs require no gradient. The head's gradients agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import titanlite


class LoRALinear(nn.Linear):
    def __init__(self, n, m, r=2):
        super().__init__(n, m)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, n) / n)
        self.lora_B = nn.Parameter(torch.randn(m, r) / 10)

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.t() @ self.lora_B.t()


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q_proj, self.v_proj = LoRALinear(dim, dim), LoRALinear(dim, dim)

    def forward(self, x):
        return x + torch.sigmoid(self.q_proj(x)) * self.v_proj(x)


class Gpt(nn.Module):
    gradient_checkpointing = False

    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim).requires_grad_(False)
        self.h = nn.ModuleList(Layer(dim) for _ in range(3))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.h:
            if self.gradient_checkpointing:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        return self.lm_head(x)


def finetune():
    model = Gpt()
    model.gradient_checkpointing = True
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def train_step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())
    return value


generator = torch.Generator().manual_seed(120)
batches = [
    {name: torch.randint(18, (4, 6), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train_step)
    print(titanlite.compare(Gpt, finetune, **options))
