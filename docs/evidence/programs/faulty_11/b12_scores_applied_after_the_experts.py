"""Llama 4's experts on several ranks: the router's score scales the tokens before their expert, there after it.

Thread: vllm-project/llm-compressor pull request #1907 "[MoE] Fix llama4 calibration, bump transformers" (2025): "llama4 applies
router scores **before** experts, whereas most MoEs apply router scores after experts."
Fault: ParallelMoE is built with the default, score_before_experts=False, so an expert's output is scaled, not its input.
REPAIR: `score_before_experts=False` -> `score_before_experts=True`
A right first sentence says: the output of moe is the first that differs, on both ranks, its input and the router agree: the
scores are multiplied with the outputs of the experts and not with their inputs (the tokens that enter the experts are not
scaled).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, EXPERTS = 11, 6, 4


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to_send, to_receive, group):
        ctx.splits = to_receive, to_send
        ctx.group = group
        out = x.new_empty(sum(to_receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), to_receive, to_send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.splits, ctx.group), None, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(silu(gate) * up)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def forward(self, x):
        score, chosen = self.router(x).max(-1)
        score = score.sigmoid()[:, None]
        out = torch.zeros_like(x)
        for key, expert in self.experts.items():
            rows = (chosen == int(key)).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows] * score[rows]))
        return out


class ParallelMoE(nn.Module):
    """Each rank has its own tokens and a part of the experts."""

    def __init__(self, moe, group, score_before_experts=False):
        super().__init__()
        self.group, self.size = group, dist.get_world_size(group)
        self.score_before_experts = score_before_experts
        self.own = EXPERTS // self.size
        first = self.own * dist.get_rank(group)
        self.router = moe.router
        keys = map(str, range(first, first + self.own))
        self.experts = nn.ModuleDict({key: moe.experts[key] for key in keys})

    def forward(self, x):
        score, chosen = self.router(x).max(-1)
        score = score.sigmoid()[:, None]
        order = chosen.argsort(stable=True)
        tokens = x[order]
        if self.score_before_experts:
            tokens = tokens * score[order]
        counts = chosen.bincount(minlength=EXPERTS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        splits = [c.view(self.size, -1).sum(1).tolist() for c in (counts, received)]
        tokens = AllToAll.apply(tokens, *splits, self.group)
        owner = torch.arange(self.own).repeat(self.size).repeat_interleave(received)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts.values()):
            rows = (owner == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(tokens[rows]))
        out = AllToAll.apply(out, *splits[::-1], self.group)
        if not self.score_before_experts:
            out = out * score[order]
        return torch.zeros_like(x).index_add(0, order, out)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.norm, self.moe, self.head = nn.LayerNorm(DIM), MoE(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = (x + torch.tanh(self.mix(x.cumsum(1)))).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    model.moe = ParallelMoE(model.moe, mesh.get_group("ep"))
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


rng = torch.Generator().manual_seed(406)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (8, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"ep": 2}, split="ep")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
