"""Load balancing under context parallelism: the language-model loss is scaled by cp, the auxiliary one is not.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1652 "[BUG] aux_loss and z_loss is incorrect when use
calculate_per_token_loss and cp", 2025-06-26 (its second point: "lm_loss is scaled by cp in advance, but
aux_loss is not scaled by cp").
Wrong: gradients are averaged over cp. The loss is multiplied by cp before, but the auxiliary loss, whose
gradient AuxLossAutoScaler adds in the backward pass, is not, so its gradient is half as large.
A right diagnosis says: all outputs and the loss agree; in the backward pass the gradients of router.weight and
of router's input are the first that differ, while that of router's output agrees: inside the router the
auxiliary loss's part is 0.5 times as large, 1 over cp. The gradients of experts and output_layer agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

EXPERTS, DIM, HIDDEN, VOCAB, AUX_COEFF = 4, 16, 24, 20, 0.3


class AuxLossAutoScaler(torch.autograd.Function):
    """returns the scores; in the backward pass the auxiliary loss gets the gradient 1"""

    @staticmethod
    def forward(ctx, scores, aux_loss):
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


class TopKRouter(nn.Module):
    cp_group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.3)

    def aux_loss(self, probs, chosen):
        tokens_per_expert = torch.bincount(chosen, minlength=EXPERTS).to(probs.dtype)
        num_tokens = len(probs)
        if self.cp_group is not None:
            dist.all_reduce(tokens_per_expert, group=self.cp_group)
            num_tokens *= self.cp_group.size()
        fractions = tokens_per_expert / num_tokens
        return AUX_COEFF * EXPERTS * (fractions * probs.sum(0) / num_tokens).sum()

    def forward(self, x):
        probs = (x @ self.weight.T).softmax(-1)
        values, chosen = probs.max(-1)
        scores = torch.zeros_like(probs).scatter(-1, chosen[:, None], values[:, None])
        return AuxLossAutoScaler.apply(scores, self.aux_loss(probs, chosen))


class GroupedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * 0.2)
        self.weight2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * 0.2)

    def forward(self, x, scores):
        h = gelu(torch.einsum("td,edh->teh", x, self.weight1))
        return torch.einsum("teh,ehd,te->td", h, self.weight2, scores)


class GPTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.router, self.experts = TopKRouter(), GroupedMLP()
        self.output_layer = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens).flatten(0, 1)
        h = self.norm(x)
        return self.output_layer(x + self.experts(h, self.router(h)))


def masked_sum(model, batch):
    losses = cross_entropy(model(batch["tokens"]), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum(), mask.sum()


def loss(model, batch):
    total, num_tokens = masked_sum(model, batch)
    return total / num_tokens


def cp_loss(model, batch):
    total, num_tokens = masked_sum(model, batch)
    dist.all_reduce(num_tokens, group=model.router.cp_group)
    return total / num_tokens * model.router.cp_group.size()


def step(model, batch):
    value = cp_loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.router.cp_group)
        p.grad /= model.router.cp_group.size()
    return value


def parallel(mesh):
    model = GPTModel()
    model.router.cp_group = mesh.get_group("cp")
    return model


def draw(generator):
    batch = {n: torch.randint(VOCAB, (2, 8), generator=generator) for n in ("tokens", "labels")}
    return batch | {"loss_mask": (torch.rand(2, 8, generator=generator) < 0.7).double()}


generator = torch.Generator().manual_seed(1652)
batches = [draw(generator) for _ in range(3)]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1}, step=step)
    print(titanlite.compare(GPTModel, parallel, **options))
