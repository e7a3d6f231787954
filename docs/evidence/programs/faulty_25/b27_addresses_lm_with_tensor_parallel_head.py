"""A language model after Megatron in sequence-first layout; heads, MLP and vocabulary are cut over two tensor ranks.

Thread: NVIDIA/Megatron-LM issue #5337 "_reduce silently returns unreduced tensor when input is non-contiguous" (2026);
met in NovaSky-AI/SkyRL pull request #1886, whose fused LM head transposes to batch-first after
copy_to_tensor_model_parallel_region: "the megatron function returns the original tensor and not the reduced one".
Fault: _reduce all-reduces input_.contiguous(), a copy if input_ isn't contiguous, and returns input_; the gradient that
comes to CopyToModelParallelRegion from LMHead's transpose is such a view, so it stays that of the rank's own words.
REPAIR: `dist.all_reduce(input_.contiguous(),` -> `dist.all_reduce(input_ := input_.contiguous(),`
A right first sentence says: in the backward pass the gradient of the head's input (the output of final_norm) isn't
all-reduced over tp, because it is a transposed, non-contiguous tensor and _reduce reduces only a copy of it.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, LENGTH, ROWS = 30, 16, 4, 9, 4


def _reduce(input_, group):
    """All-reduce the input tensor across the model parallel group."""
    dist.all_reduce(input_.contiguous(), group=group)
    return input_


class CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx, grad_output):
        return _reduce(grad_output, ctx.group), None


class ReduceFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, group):
        return _reduce(input_.detach(), group)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        target = target - dist.get_rank(group) * logits.shape[-1]
        foreign = (target < 0) | (target >= logits.shape[-1])
        target = target.masked_fill(foreign, 0)
        own = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        own = _reduce(own.masked_fill(foreign, 0.0), group)
        total = _reduce(logits.exp().sum(-1), group)
        ctx.save_for_backward(logits.exp() / total.unsqueeze(-1), target, foreign)
        return total.log() - own

    @staticmethod
    def backward(ctx, grad_output):
        softmax, target, foreign = ctx.saved_tensors
        update = -(~foreign).to(softmax.dtype)
        grad = softmax.scatter_add(-1, target.unsqueeze(-1), update.unsqueeze(-1))
        return grad * grad_output.unsqueeze(-1), None, None


def copy_to(x, group):
    return x if group is None else CopyToModelParallelRegion.apply(x, group)


def reduce_from(x, group):
    return x if group is None else ReduceFromModelParallelRegion.apply(x, group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, group):
        qkv = self.qkv(copy_to(self.input_norm(x), group)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        y = F.scaled_dot_product_attention(*qkv.permute(3, 1, 2, 0, 4), is_causal=True)
        x = x + reduce_from(self.dense(y.permute(2, 0, 1, 3).flatten(2)), group)
        y = F.gelu(self.fc1(copy_to(self.mlp_norm(x), group)))
        return x + reduce_from(self.fc2(y), group)


class LMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) / 4)

    def forward(self, x, labels, group):
        x = copy_to(x, group).transpose(0, 1).contiguous()
        logits = F.linear(x, self.weight)
        if group is None:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return VocabParallelCrossEntropy.apply(logits, labels, group).mean()


class GPT(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.final_norm, self.head, self.group = nn.LayerNorm(WIDTH), LMHead(), group

    def forward(self, tokens):
        x = self.words(tokens[:, :-1].t()) + self.positions.weight.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, self.group)
        return self.head(self.final_norm(x), tokens[:, 1:], self.group)


def shard(name):
    if name.endswith(("qkv.weight", "fc1.weight", "fc1.bias", "head.weight")):
        return 0, "tp"
    return (1, "tp") if name.endswith(("dense.weight", "fc2.weight")) else None


def parallel(mesh):
    model = GPT(mesh.get_group("tp"))
    for name, p in model.named_parameters():
        if shard(name):
            p.data = p.data.chunk(mesh.size(), shard(name)[0])[mesh.get_local_rank("tp")].clone()
    return model


def loss(model, tokens):
    return model(tokens)


generator = torch.Generator().manual_seed(5337)
batches = [torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
