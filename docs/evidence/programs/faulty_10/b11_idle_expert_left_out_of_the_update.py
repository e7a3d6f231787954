"""Experts cut over the ranks: an expert that gets no token in a step is not called.

Thread: huggingface/transformers issue #32283 "Qwen2_moe: Avoid zero tokens fowarding for some experts" (2024), whose proposal
is `if current_state.shape[0] == 0: continue`.
Fault: in OwnExperts.forward, an expert without tokens is skipped, so its gradients are None, not zero, and the optimizer
leaves out its momentum and its weight decay in that step.
REPAIR: `if len(rows) == 0:` -> `if len(rows) < 0:`
Expected: in step 1 the loss and the gradients agree, but on rank 1 experts.4, which gets no token, has gradients of None
where the plain model's are zero; so AdamW does not update it (weight decay in step 1, in step 2 experts.3's momentum too),
and its weights and optimizer state are wrong after the step. OwnExperts.forward skips experts without tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu

import titanlite

VOCAB, DIM, EXPERTS = 10, 6, 6


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(relu(self.up(x)))


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Experts(nn.ModuleDict):
    def __init__(self):
        super().__init__({str(i): Expert() for i in range(EXPERTS)})

    def forward(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for key, expert in self.items():
            rows = (chosen == int(key)).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class OwnExperts(nn.ModuleDict):
    """The experts of this rank; all ranks have all tokens."""

    def __init__(self, whole):
        owned = EXPERTS // dist.get_world_size()
        first = owned * dist.get_rank()
        super().__init__({str(i): whole[str(i)] for i in range(first, first + owned)})

    def forward(self, x, weights, chosen):
        x, weights = CopyToRanks.apply(x), CopyToRanks.apply(weights)
        out = 0.0 * (x + weights[:, None])
        for key, expert in self.items():
            rows = (chosen == int(key)).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return SumOfRanks.apply(out)


class SwitchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = (
            nn.Embedding(VOCAB, DIM),
            nn.Linear(DIM, DIM),
            nn.LayerNorm(DIM),
        )
        self.router, self.experts = nn.Linear(DIM, EXPERTS), Experts()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = (x + torch.tanh(self.mix(x.cumsum(1)))).flatten(0, 1)
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).max(-1)
        return self.head(x + self.experts(y, weights, chosen))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def parallel(mesh):
    model = SwitchModel()
    model.experts = OwnExperts(model.experts)
    return model


rng = torch.Generator().manual_seed(310)
batches = []
for _ in range(4):
    rows = torch.randint(VOCAB, (3, 5), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = SwitchModel, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2}, optimizer=make_optimizer)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
