"""Experts under DDP: rows are padded to a multiple of eight, and the router's balance loss sees the padding.

Thread: huggingface/transformers issue #28505 "Exclude the load balancing loss of padding tokens in Mixtral-8x7B" (2024).
Fault: in step, the padded batch goes to the model without its mask, so the padding takes part in the balance loss. The
labels of the padding are -100, and no token sees what follows it.
REPAIR: `model(tokens)` -> `model(tokens, mask)`
Expected: the logits of all real tokens and the cross entropy agree; the loss is wrong by the balance loss, and with it the
gradients of the routers and of what lies below, on both ranks: the padding that step adds at the end of the rows is counted
in the balance loss. The head's gradient agrees.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot, pad, silu
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, EXPERTS, TOP, PAD, MULTIPLE, AUX = 12, 8, 4, 2, 0, 8, 0.1


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) / DIM**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) / DIM**0.5)

    def forward(self, x, mask):
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(TOP)
        routed = one_hot(chosen, EXPERTS).to(x.dtype)
        combine = (weights[..., None] / weights.sum(-1)[..., None, None] * routed).sum(2)
        y = silu(torch.einsum("btd,edh->bteh", x, self.w1))
        y = torch.einsum("bteh,ehd,bte->btd", y, self.w2, combine)
        # Per row: the share of the tokens that each expert gets, times its mean probability.
        count = mask.sum(1)[:, None]
        share = (routed.sum(2) * mask[..., None]).sum(1) / count
        mean = (probabilities * mask[..., None]).sum(1) / count
        return y, EXPERTS * (share * mean).sum(1).mean()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.mix = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.moe = Experts()

    def forward(self, x, mask):
        past = self.norm1(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        y, balance = self.moe(self.norm2(x), mask)
        return x + y, balance


class MoeForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, mask=None):
        mask = torch.ones_like(tokens) if mask is None else mask
        x, total = self.embed(tokens), 0.0
        for layer in self.layers:
            x, balance = layer(x, mask)
            total = total + balance
        return self.head(x), total


def objective(output, labels):
    logits, balance = output
    return cross_entropy(logits.flatten(0, 1), labels.flatten()) + AUX * balance


def loss(model, batch):
    return objective(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    return DistributedDataParallel(MoeForCausalLM(), process_group=mesh.get_group("dp"))


def step(model, batch):
    missing = -batch["tokens"].shape[1] % MULTIPLE
    mask = pad(torch.ones_like(batch["tokens"]), (0, missing))
    tokens = pad(batch["tokens"], (0, missing), value=PAD)
    labels = pad(batch["labels"], (0, missing)).masked_fill(mask == 0, -100)
    value = objective(model(tokens), labels)
    value.backward()
    return value


rng = torch.Generator().manual_seed(309)
batches = []
for length in (6, 5, 7):
    rows = torch.randint(1, VOCAB, (6, length + 1), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = MoeForCausalLM, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
