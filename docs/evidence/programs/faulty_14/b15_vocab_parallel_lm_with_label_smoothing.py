"""A small tensor-parallel language model whose loss is computed on vocabulary shards, with label smoothing.

Thread: NVIDIA/Megatron-LM issue #737 "[BUG] cross-entropy loss not computed correctly when label_smoothing is
enabled" (2024). The mean log-probability of the smoothing term was taken over the rank's own part of the vocabulary,
so that the loss could differ between tensor-parallel ranks.
Fault: in VocabShardCrossEntropy the smoothing term regards the vocabulary shard as the vocabulary: forward takes the
mean of the local log-probabilities, and backward spreads the smoothing over the local width. The loss differs from
rank to rank and every logit's gradient has a wrong smoothing part, which spoils all gradients of the model.
REPAIR: `ctx.classes = logits.size(-1)` -> `ctx.classes = logits.size(-1) * dist.get_world_size(group)`
REPAIR: `spread = log_probs.mean(dim=-1)` -> `spread = reduced(log_probs.sum(dim=-1), group) / ctx.classes`
A right first sentence says: In the vocabulary-parallel cross entropy (VocabShardCrossEntropy), the label smoothing
term uses the mean log-probability and the size of the rank's local vocabulary shard, instead of reducing over the
tensor-parallel group to get those of the whole vocabulary.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import titanlite

VOCAB, WIDTH, HIDDEN, LAYERS, SMOOTHING = 24, 16, 32, 2, 0.1


def reduced(tensor, group, op=dist.ReduceOp.SUM):
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


class EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad, ctx.group), None


class LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class VocabShardCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, smoothing, group):
        ctx.classes = logits.size(-1)
        ctx.smoothing = smoothing
        width = logits.size(-1)
        first = dist.get_rank(group) * width

        logits = logits - reduced(logits.amax(dim=-1), group, dist.ReduceOp.MAX).unsqueeze(-1)
        total = reduced(logits.exp().sum(dim=-1), group)
        log_probs = logits - total.log().unsqueeze(-1)

        elsewhere = (target < first) | (target >= first + width)
        index = (target - first).masked_fill(elsewhere, 0)
        picked = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        picked = reduced(picked, group)

        spread = log_probs.mean(dim=-1)
        ctx.save_for_backward(log_probs.exp(), index, elsewhere)
        return -(1 - smoothing) * picked - smoothing * spread

    @staticmethod
    def backward(ctx, grad):
        probs, index, elsewhere = ctx.saved_tensors
        hit = (1.0 - elsewhere.to(probs.dtype)) * (1 - ctx.smoothing)
        out = probs - ctx.smoothing / ctx.classes
        out.scatter_add_(-1, index.unsqueeze(-1), -hit.unsqueeze(-1))
        return out * grad.unsqueeze(-1), None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ColumnLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 0)[rank].clone())
        self.bias = (
            None
            if linear.bias is None
            else nn.Parameter(linear.bias.detach().chunk(size, 0)[rank].clone())
        )

    def forward(self, x):
        return F.linear(EnterRegion.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(
            linear.weight.detach()
            .chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
            .clone()
        )

    def forward(self, x):
        return LeaveRegion.apply(F.linear(x, self.weight), self.group)


def plain():
    return Model()


def parallel(mesh):
    group = mesh.get_group("tp")
    model = Model()
    for block in model.blocks:
        block.up = ColumnLinear(block.up, group)
        block.down = RowLinear(block.down, group)
    model.head = ColumnLinear(model.head, group)
    return model


def loss(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=SMOOTHING
    )


def shard_loss(model, batch):
    logits = model(batch["tokens"])
    return VocabShardCrossEntropy.apply(logits, batch["labels"], SMOOTHING, model.head.group).mean()


def make_batches(count=3, rows=4, length=6):
    generator = torch.Generator().manual_seed(11)
    texts = [torch.randint(0, VOCAB, (rows, length + 1), generator=generator) for _ in range(count)]
    return [
        {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()} for text in texts
    ]


batches = make_batches()
arguments = plain, parallel
options = dict(batches=batches, loss=loss, parallel_loss=shard_loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
