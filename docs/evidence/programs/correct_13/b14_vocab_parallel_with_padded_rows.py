"""Tensor parallel language model whose vocabulary does not divide by the ranks and is padded in the sharded layers.

Thread: hpcaitech/ColossalAI pull request #5489 "[shardformer]enable padding vocabulary size." (2024): sharded embedding and
lm_head get extra rows so that the vocabulary divides by the tensor parallel size.
Correct: 30 tokens are padded to 32 on 4 ranks, so the last rank has 6 real rows and 2 that the plain model does not have. These
start as zeros, no token selects them, and the head sets their logits to -inf before the softmax, so their gradients are zero
and they stay zero, also under weight decay. Embedding and head add up over the ranks with one all-reduce each way.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, PADDED, SEQUENCE, WIDTH, HIDDEN, LAYERS = 30, 32, 7, 16, 32, 2


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def pad_vocabulary(weight):
    return F.pad(weight, (0, 0, 0, PADDED - weight.shape[0]))


def padded_shard(weight):
    return pad_vocabulary(weight).chunk(dist.get_world_size())[dist.get_rank()]


class PaddedEmbedding(nn.Module):
    def __init__(self, embedding, group):
        super().__init__()
        self.weight = nn.Parameter(padded_shard(embedding.weight.detach()).clone())
        self.first, self.group = group.rank() * self.weight.shape[0], group

    def forward(self, tokens):
        local = tokens - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        out = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(
            outside[..., None], 0.0
        )
        return _SumOfRanks.apply(out, self.group)


class PaddedLMHead(nn.Module):
    """Logits of this rank's part of the vocabulary."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = nn.Parameter(padded_shard(linear.weight.detach()).clone())
        self.first, self.group = group.rank() * self.weight.shape[0], group

    def forward(self, x):
        logits = F.linear(_CopyToRanks.apply(x, self.group), self.weight)
        ids = self.first + torch.arange(self.weight.shape[0])
        return logits.masked_fill(ids >= VOCAB, float("-inf"))


class ColumnParallel(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().chunk(group.size())[group.rank()].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(group.size())[group.rank()].clone())
        self.group = group

    def forward(self, x):
        return F.linear(_CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.weight = nn.Parameter(
            linear.weight.detach().chunk(group.size(), dim=1)[group.rank()].clone()
        )
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.group = group

    def forward(self, x):
        return _SumOfRanks.apply(F.linear(x, self.weight), self.group) + self.bias


class Mixer(nn.Module):
    """A running mean over the sequence in place of attention, then an MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense_h_to_4h = nn.Linear(WIDTH, HIDDEN)
        self.dense_4h_to_h = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.norm(x).cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(y)))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def vocab_parallel_loss(model, batch):
    tokens, targets = batch
    logits, head = model(tokens).flatten(0, 1), model.lm_head
    top = logits.detach().amax(dim=-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=head.group)
    logits = logits - top[:, None]
    local = targets.flatten() - head.first
    outside = (local < 0) | (local >= logits.shape[1])
    picked = logits.gather(1, local.masked_fill(outside, 0)[:, None])[:, 0].masked_fill(
        outside, 0.0
    )
    log_sum = _SumOfRanks.apply(logits.exp().sum(dim=-1), head.group).log()
    return (log_sum - _SumOfRanks.apply(picked, head.group)).mean()


def parallel(mesh):
    model, group = LanguageModel(), mesh.get_group("tp")
    model.embed = PaddedEmbedding(model.embed, group)
    model.lm_head = PaddedLMHead(model.lm_head, group)
    for layer in model.layers:
        layer.dense_h_to_4h = ColumnParallel(layer.dense_h_to_4h, group)
        layer.dense_4h_to_h = RowParallel(layer.dense_4h_to_h, group)
    return model


def shard(name):
    if name in ("embed.weight", "lm_head.weight"):
        return padded_shard
    if "dense_h_to_4h" in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("dense_4h_to_h.weight") else None


generator = torch.Generator().manual_seed(5489)
batches = [torch.randint(VOCAB, (2, 3, SEQUENCE), generator=generator).unbind() for _ in range(3)]
arguments = LanguageModel, parallel
options = dict(
    batches=batches, loss=loss, parallel_loss=vocab_parallel_loss, shard=shard, ranks={"tp": 4}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
