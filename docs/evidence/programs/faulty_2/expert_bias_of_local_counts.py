"""Load balancing without auxiliary loss: the bias of the experts follows each rank's own token counts.

Thread: https://github.com/pytorch/torchtitan/pull/1114 "[llama4] add auxiliary-loss-free load balancing to
MoE token routing", 2025-04-17 ("sync tokens per expert across all DP ranks").
Wrong: tokens_per_expert is not summed over dp before the bias is updated, so the ranks' biases differ
from each other and later send tokens to different experts.
A right diagnosis says: in step 1 loss, gradients and weights agree, but the buffer moe.expert_bias does
not (and differs between the ranks): it is computed from each rank's own tokens.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

EXPERTS, TOP_K, DIM, VOCAB, COEFF = 4, 2, 16, 20, 0.05


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, 24) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 24, DIM) * 0.2)

    def forward(self, x, weights):
        h = silu(torch.einsum("td,edh->teh", x, self.w1))
        return torch.einsum("teh,ehd,te->td", h, self.w2, weights)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, EXPERTS, bias=False), GroupedExperts()
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.expert_bias).topk(TOP_K, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.training:
            self.tokens_per_expert = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        return self.experts(x, weights)

    @torch.no_grad()
    def update_expert_bias(self):
        counts = self.tokens_per_expert.to(self.expert_bias.dtype)
        self.expert_bias.add_(COEFF * torch.sign(counts.mean() - counts))


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
    moe = model.module.moe if isinstance(model, DDP) else model.moe
    moe.update_expert_bias()
    return value


def parallel(mesh):
    return DDP(Model(), process_group=mesh.get_group("dp"), broadcast_buffers=False)


generator = torch.Generator().manual_seed(35)
batches = [
    {name: torch.randint(VOCAB, (6, 7), generator=generator) for name in ("x", "y")}
    for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Model, parallel, **options))
