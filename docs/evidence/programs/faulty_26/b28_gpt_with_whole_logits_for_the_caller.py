"""A GPT in Megatron's tensor parallel layout that can hand whole logits to its caller, trained on the labels path.

Thread: NVIDIA/Megatron-LM issue #7452 "Silent numerical-correctness bugs in Megatron Core parallelism composition"
(2026), finding 2: GPTModel given labels with parallel_output=False: "Loss = correct + log(TP); wrong gradients".
Fault: with parallel_output=False GPTModel.forward gathers the logits also if it has labels, and the vocabulary parallel
cross entropy takes the whole vocabulary for the rank's part: the denominators of both ranks are added, so the loss is
log 2 too large, the softmax in the gradient is half of what it should be, and only rank 0 finds targets.
REPAIR: `gather_output=not self.parallel_output` -> `gather_output=labels is None and not self.parallel_output`
A right first sentence says: the loss is too large by log 2 (log of the tensor parallel size) as the vocabulary parallel
cross entropy gets logits which the output layer has gathered, and sums the softmax's denominator over tp once more.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, HIDDEN, HEAD, FFN, LENGTH, LAYERS = 24, 16, 4, 32, 8, 2


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, group):
        ctx.kind, ctx.group, x = kind, group, x.contiguous().clone()
        if kind == "gather":
            parts = [torch.empty_like(x) for _ in range(group.size())]
            dist.all_gather(parts, x, group=group)
            x = torch.cat(parts, -1)
        elif kind == "reduce":
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.kind == "gather":
            return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()].contiguous(), None, None
        grad = grad.contiguous().clone()
        if ctx.kind == "copy":
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def region(x, kind, group):
    return _Region.apply(x, kind, group) if group else x


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        largest, partition = logits.max(-1).values, logits.size(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits, start = logits - largest.unsqueeze(-1), partition * group.rank()
        target_mask = (target < start) | (target >= start + partition)
        masked_target = (target - start).masked_fill(target_mask, 0).unsqueeze(-1)
        predicted = logits.gather(-1, masked_target).squeeze(-1)
        predicted[target_mask] = 0.0
        exp_logits = logits.exp()
        sums = torch.stack([predicted, exp_logits.sum(-1)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exp_logits / sums[1].unsqueeze(-1), target_mask, masked_target)
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, grad_output):
        softmax, target_mask, masked_target = ctx.saved_tensors
        grad = softmax.scatter_add(-1, masked_target, -(~target_mask).double().unsqueeze(-1))
        return grad * grad_output.unsqueeze(-1), None, None


class TransformerLayer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, n = group, group.size() if group else 1
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN // n, bias=False) for _ in range(3))
        self.proj = nn.Linear(HIDDEN // n, HIDDEN, bias=False)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, FFN // n), nn.Linear(FFN // n, HIDDEN, bias=False)

    def forward(self, x):
        h = region(self.norm1(x), "copy", self.group)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + region(self.proj(h), "reduce", self.group)
        h = F.gelu(self.fc1(region(self.norm2(x), "copy", self.group)))
        return x + region(self.fc2(h), "reduce", self.group)


class GPTModel(nn.Module):
    def __init__(self, group=None, parallel_output=True):
        super().__init__()
        self.group, self.parallel_output = group, parallel_output
        self.words, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(TransformerLayer(group) for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, VOCAB // (group.size() if group else 1), bias=False)

    def compute_logits(self, hidden, gather_output):
        logits = self.output_layer(region(hidden, "copy", self.group))
        return region(logits, "gather", self.group) if gather_output else logits

    def forward(self, tokens, labels=None):
        x = self.words(tokens) + self.positions.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        logits = self.compute_logits(self.final_norm(x), gather_output=not self.parallel_output)
        if labels is None:
            return logits
        if self.group:
            return _VocabParallelCrossEntropy.apply(logits, labels, self.group)
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def shard(name):
    module = name.split(".")[-2]
    cut = dict(q=0, k=0, v=0, proj=1, fc1=0, fc2=1, output_layer=0)
    return (cut[module], "tp") if module in cut else None


plain = GPTModel


def parallel(mesh):
    group, state = mesh.get_group("tp"), plain().state_dict()
    model = GPTModel(group, parallel_output=False)
    for name in filter(shard, state):
        state[name] = state[name].chunk(group.size(), shard(name)[0])[group.rank()]
    model.load_state_dict(state)
    return model


def loss(model, batch):
    tokens, labels, mask = batch
    return (model(tokens, labels) * mask).sum() / mask.sum()


generator = torch.Generator().manual_seed(7452)


def sample():
    text = torch.randint(VOCAB, (4, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:], torch.rand(4, LENGTH, generator=generator) < 0.8


arguments = plain, parallel
options = dict(batches=[sample() for _ in range(3)], loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
