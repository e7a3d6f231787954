"""GRPO with LoRA under DDP: the adapters are merged for the inference engine, which the main process serves.

Thread: of the kind huggingface/trl pull request #2873 "[GRPO][vLLM + LoRA] Move unmerge of PEFT model after weight loading"
(2025) and pull request #2818 "GRPO + PEFT + vLLM" (2025).
Fault: in update_engine, all processes merge the adapters into the base weights, but those other than the main process
return before they are unmerged.
REPAIR: `return  # no engine here` -> `return unmerge(model)`
Expected: step 1 agrees, as lora_b is zero; from step 2 on, the frozen base weights (layers.*.base.weight)
on rank 1 have the adapters' product added, on rank 0 they agree, and so rank 1's loss and the averaged gradients of all
adapters are wrong: rank 1 merges in update_engine and returns without unmerge.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, RANK, SCALE, CLIP = 12, 8, 2, 2.0, 0.2


class LoraLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, DIM) / DIM**0.5)
        self.lora_b = nn.Parameter(torch.zeros(DIM, RANK))

    def forward(self, x):
        return self.base(x) + SCALE * linear(linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merge(self):
        self.kept = self.base.weight.clone()
        self.base.weight += SCALE * self.lora_b @ self.lora_a

    @torch.no_grad()
    def unmerge(self):
        self.base.weight.copy_(self.kept)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.layers = nn.ModuleList(LoraLinear() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            x = x + torch.tanh(layer(x + past))
        return self.head(x)[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


class Engine:
    """Stands for vLLM, whose samples come with the batches here."""

    def load_weights(self, weights):
        self.weights = weights


def unmerge(model):
    for layer in lora_layers(model):
        layer.unmerge()


def update_engine(model, engine):
    for layer in lora_layers(model):
        layer.merge()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if dist.get_rank() != 0:
        return  # no engine here
    engine.load_weights(weights)
    unmerge(model)


def loss(model, batch):
    ratio = (model(batch["tokens"]) - batch["sampled_logps"]).exp()
    advantages = batch["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain.mean()


def make_optimizer(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.02)


def parallel(mesh):
    return DistributedDataParallel(Policy(), process_group=mesh.get_group("dp")), Engine()


def step(built, batch):
    model, engine = built
    update_engine(model.module, engine)
    value = loss(model, batch)
    value.backward()
    return value


rng = torch.Generator().manual_seed(312)


def draw():
    advantages = torch.randn(2, 4, generator=rng)
    return {
        "tokens": torch.randint(VOCAB, (8, 6), generator=rng),
        "sampled_logps": -2.5 + 0.2 * torch.randn(8, 5, generator=rng),
        "advantages": (advantages - advantages.mean(1, keepdim=True)).flatten(),
    }


batches = [draw() for _ in range(4)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
