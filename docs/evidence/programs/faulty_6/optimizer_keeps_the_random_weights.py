"""Fine-tuning with ZeRO-1: the optimizer's master weights are copied before the checkpoint is loaded.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/174 "Optimizer will hold unloaded model weights when model
weights but not optimizer states are loaded from a checkpoint.", 2022-01-03; also
https://github.com/hpcaitech/ColossalAI/pull/4618 "[zero] hotfix master param sync" (2023-09-05).
Wrong: the first step adds the update to the master weights of the random initialization and sends these to all ranks.
So the checkpoint is gone after step 1.
EXPECT: step 1's loss and gradients agree, all weights differ after step 1, on all ranks alike and by far more than
one update: the optimizer steps from (and writes back) its own copy of the weights, which was made before the
checkpoint was loaded. Reload the master weights from the model.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LENGTH = 11, 8, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return self.lm_head(self.ln_f(self.blocks(x)))


@torch.no_grad()
def load_checkpoint(model):
    generator = torch.Generator().manual_seed(174)
    for p in model.parameters():
        p.copy_(p.mean() + 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


class DistributedOptimizer(torch.optim.AdamW):
    def __init__(self, parameters, group):
        super().__init__(parameters, lr=1e-3)
        self.group, self.model_params = group, self.param_groups[0]["params"]
        self.own = self.model_params[group.rank() :: group.size()]
        self.param_groups[0]["params"] = self.own
        self.main_params = [p.detach().clone() for p in self.own]

    @torch.no_grad()
    def step(self):
        for p, main in zip(self.own, self.main_params):
            p.copy_(main)
        super().step()
        for p, main in zip(self.own, self.main_params):
            main.copy_(p)
        for i, p in enumerate(self.model_params):
            dist.broadcast(p, i % self.group.size(), group=self.group)


def loss(model, batch):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def finetuned():
    return load_checkpoint(GPT())


def parallel(mesh):
    model, group = GPT(), mesh.get_group("dp")
    optimizer = DistributedOptimizer(model.parameters(), group)
    load_checkpoint(model)
    return model, optimizer, group


def step(built, batch):
    model, _, group = built
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()
    return value.detach()


generator = torch.Generator().manual_seed(4618)
batches = [
    {n: torch.randint(VOCAB, (8, LENGTH), generator=generator) for n in ("tokens", "targets")}
    for _ in range(3)
]
arguments = finetuned, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
