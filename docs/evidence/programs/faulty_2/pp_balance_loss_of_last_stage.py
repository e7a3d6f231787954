"""Sequence-wise load-balancing loss in a pipeline: only the last stage's layers take part.

Thread: https://github.com/pytorch/torchtitan/pull/2061 "[moe] brings batch/sequence-wise load balance
loss", 2025-11-19 ("the aux loss does not work well with PP").
Wrong: the loss function runs on the last stage and adds the balance losses that this stage's modules
have recorded. Those of stage 0 are never added to any loss.
A right diagnosis says: the loss lacks the balance loss of layers.0, on stage 0. The logits and stage 1's
gradients agree; of stage 0, layers.0's router (and what is before it) has a wrong gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, one_hot, silu

import titanlite

EXPERTS, DIM, VOCAB, SEQ, MICROBATCHES, WEIGHT = 4, 16, 20, 6, 2, 0.1


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, 24) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 24, DIM) * 0.2)

    def forward(self, x):  # [b, s, d]
        h = self.norm(x)
        scores = self.router(h).softmax(-1)
        best = scores.max(-1)
        chosen = one_hot(best.indices, EXPERTS).to(x.dtype)
        # per sequence: share of the tokens times mean score, then the mean over the batch
        self.load_balance_loss = EXPERTS * (chosen.mean(1) * scores.mean(1)).sum(-1).mean()
        h = silu(torch.einsum("bsd,edh->bseh", h, self.w1))
        weights = chosen * best.values.unsqueeze(-1)
        return x + torch.einsum("bseh,ehd,bse->bsd", h, self.w2, weights)


class Model(nn.Module):
    def __init__(self, keep=(0, 1)):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): MoE() for i in range(2)})
        self.output = nn.Linear(DIM, VOCAB)
        if 0 not in keep:
            self.tok_embeddings = None
            del self.layers["0"]
        if 1 not in keep:
            self.output = None
            del self.layers["1"]

    def forward(self, x):
        h = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            h = layer(h)
        return h if self.output is None else self.output(h)


def loss_fn(model, logits, labels):
    aux = sum(layer.load_balance_loss for layer in model.layers.values())
    return cross_entropy(logits.flatten(0, 1), labels.flatten()) + WEIGHT * aux


def plain_loss(model, batch):
    return loss_fn(model, model(batch["input"]), batch["labels"])


def parallel(mesh):
    return Model(keep=(mesh.get_local_rank("pp"),))


def one_forward_one_backward(stage, batch):
    losses = []
    for tokens, labels in zip(*(batch[name].chunk(MICROBATCHES) for name in ("input", "labels"))):
        if stage.output is None:
            h = stage(tokens)
            dist.send(h.detach(), 1)
            grad = torch.empty_like(h)
            dist.recv(grad, 1)
            h.backward(grad)
        else:
            h = torch.empty(len(labels), SEQ, DIM)
            dist.recv(h, 0)
            h.requires_grad_()
            value = loss_fn(stage, stage(h), labels) / MICROBATCHES
            value.backward()
            dist.send(h.grad, 0)
            losses.append(value.detach())
    return torch.stack(losses).sum() if losses else None


generator = torch.Generator().manual_seed(36)
batches = [
    {name: torch.randint(VOCAB, (4, SEQ), generator=generator) for name in ("input", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"pp": 2}, step=one_forward_one_backward)
    print(titanlite.compare(Model, parallel, **options))
