"""DeepSeek's balancing by a bias, experts dealt to the ranks: the bias that chooses the experts also weights their outputs.

Thread: vllm-project/vllm pull request #12002 "[Bugfix] Fix deepseekv3 gate bias error" (2025) and
huggingface/transformers pull request #39581 "fix moe routing_weights" (2025): the correction bias is for the choice of
the experts only.
Fault: in ExpertParallelMoe.route, the weights of the chosen experts are read from the biased scores, not from the scores.
REPAIR: `weights = biased.gather(-1, chosen)` -> `weights = scores.gather(-1, chosen)`
Expected: in the forward pass, moe is the first module whose output differs, on all ranks alike: the chosen experts agree,
but their outputs are weighted by the scores with the balancing bias added; the weights have to be taken from the scores
without the bias.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, EXPERTS, TOP = 12, 8, 4, 2


class Copy(torch.autograd.Function):
    """The identity; in backward, the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(silu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.register_buffer("bias", torch.linspace(-0.2, 0.2, EXPERTS))
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def route(self, x):
        scores = torch.sigmoid(self.router(x))
        chosen = (scores + self.bias).topk(TOP).indices
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    def combine(self, x, weights, chosen):
        y = torch.zeros_like(x)
        for i, expert in self.experts.items():
            y = y + (weights * (chosen == int(i))).sum(-1, keepdim=True) * expert(x)
        return y

    def forward(self, x):
        return self.combine(x, *self.route(x))


class ExpertParallelMoe(Moe):
    """Each rank has some of the experts; all ranks route all tokens and add up what their experts give."""

    def __init__(self, whole, group):
        super().__init__()
        self.router, self.bias, self.group = whole.router, whole.bias, group
        share = EXPERTS // dist.get_world_size(group)
        first = dist.get_rank(group) * share
        self.experts = nn.ModuleDict(
            {str(i): whole.experts[str(i)] for i in range(first, first + share)}
        )

    def route(self, x):
        scores = torch.sigmoid(self.router(x))
        biased = scores + self.bias
        chosen = biased.topk(TOP).indices
        weights = biased.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        weights, chosen = self.route(x)
        weights = Copy.apply(weights, self.group)
        return Sum.apply(self.combine(Copy.apply(x, self.group), weights, chosen), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.mix, self.moe = nn.Linear(DIM, DIM), Moe()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + torch.tanh(self.mix(past))
        return self.head(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    model.moe = ExpertParallelMoe(model.moe, mesh.get_group("ep"))
    return model


generator = torch.Generator().manual_seed(210)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
