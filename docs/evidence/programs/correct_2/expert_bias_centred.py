"""Load balancing without auxiliary loss: the update of the experts' bias is centred around 0.

Thread: https://github.com/pytorch/torchtitan/issues/1506 "Correct MoE auxiliary-loss-free load
balancing?", 2025-07-31 (why is expert_bias_delta assigned twice?).
Right: the counts of all ranks are summed before the sign is taken; subtracting the mean keeps the choice
of experts. DDP broadcasts buffers, which are the same on every rank anyway.
Must not be accused: the counter (a plain attribute) of a rank's own tokens, the bias in the choice but
not in the weights, experts that some ranks' tokens do not reach.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

EXPERTS, TOP_K, DIM, VOCAB, COEFF = 4, 2, 16, 20, 0.05


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, 24) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 24, DIM) * 0.2)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.tokens_per_expert = torch.zeros(EXPERTS)
        self.dp_group = None

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.expert_bias).topk(TOP_K, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        with torch.no_grad():
            self.tokens_per_expert = torch.bincount(chosen.flatten(), minlength=EXPERTS).to(x.dtype)
        h = silu(torch.einsum("td,edh->teh", x, self.w1))
        return torch.einsum("teh,ehd,te->td", h, self.w2, weights)

    @torch.no_grad()
    def update_expert_bias(self):
        if self.dp_group is not None:
            dist.all_reduce(self.tokens_per_expert, group=self.dp_group)
        counts = self.tokens_per_expert
        expert_bias_delta = COEFF * torch.sign(counts.mean() - counts)
        expert_bias_delta = expert_bias_delta - expert_bias_delta.mean()
        self.expert_bias.add_(expert_bias_delta)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe, self.output = MoE(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.output(x + self.moe(self.norm(x)))


def loss(model, batch):
    value = cross_entropy(model(batch["x"]), batch["y"].flatten())
    getattr(model, "module", model).moe.update_expert_bias()
    return value


def parallel(mesh):
    model = Model()
    model.moe.dp_group = mesh.get_group("dp")
    return DDP(model, process_group=mesh.get_group("dp"))


generator = torch.Generator().manual_seed(46)
batches = [
    {name: torch.randint(VOCAB, (6, 7), generator=generator) for name in ("x", "y")}
    for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Model, parallel, **options))
