"""Parallel code as its authors write it: correct programs, each with faults to switch on."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from parallel_code import CopyToRanks, SumOverRanks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

WIDTH, HEADS, VOCABULARY, LENGTH = 8, 4, 12, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Experts(nn.Module):
    """Every token goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x):
        chosen = x.detach()[..., 0] > 0
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y[chosen == index] = expert(x[chosen == index])
        return y


class Model(nn.Module):
    def __init__(self, ffn=Mlp) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = ffn()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x)
        x = x + self.mlp(self.norm(x))
        return self.head(x)


def token_losses(model, batch, **options):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), **options)


def loss(model, batch):
    return token_losses(model, batch)


CLASS_WEIGHTS = torch.arange(1, VOCABULARY + 1, dtype=torch.float64)


def weighted(model, batch):
    return token_losses(model, batch, weight=CLASS_WEIGHTS)


def make_batches(num_steps=1, rows=4, *, is_masked=False):
    generator = torch.Generator().manual_seed(1)

    def draw():
        return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)

    batches = [{"tokens": draw(), "targets": draw()} for _ in range(num_steps)]
    for batch in batches if is_masked else ():
        batch["targets"][0, 1:] = -100
    return batches


class Gather(torch.autograd.Function):
    """Concatenates the ranks' parts along `dim`; the gradient is summed and cut again."""

    @staticmethod
    def forward(ctx, x, dim, group, sums, turned):
        ctx.dim, ctx.group, ctx.sums = dim, group, sums
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts[::-1] if turned else parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if ctx.sums:
            dist.all_reduce(gradient, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(size, ctx.dim)[rank], None, None, None, None


def averaged(model, group=None):
    """Gradients become means over the ranks as they are accumulated."""

    def average(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


# Sequence shards: every rank has its part of each sequence, and gathers it in front of attention.


class SequenceParallel(Model):
    def __init__(self, group, fault="", ffn=Mlp):
        super().__init__(ffn)
        self.group, self.fault = group, fault

    def forward(self, tokens):
        x = self.embed(tokens)
        whole = self.gathered(x)
        y = self.attention(whole)
        if self.fault == "view":
            y = y.view(y.size(1), y.size(0), -1).transpose(0, 1)
        if self.fault == "data":
            y = y.data
        own = y.chunk(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)]
        x = x + own
        return self.head(self.flat_part(x) if self.fault != "function" else scaled(self, x))

    def gathered(self, x):
        if self.fault == "detached":
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(parts, x.contiguous(), group=self.group)
            return torch.cat(parts, 1)
        return Gather.apply(x, 1, self.group, self.fault != "unsummed", self.fault == "turned")

    def flat_part(self, x):
        """The MLP on flattened tokens, as Megatron's kernels want them."""
        flat = x.flatten(0, 1)
        if self.fault == "half":
            flat = flat + self.mlp(self.norm(flat) / 2)
        else:
            flat = flat + self.mlp(self.norm(flat))
        return flat.view_as(x)


def scaled(model, x):
    x = x + model.mlp(model.norm(x))
    return x * (1 + x.mean(1, keepdim=True))


def sequence_parallel(mesh, fault=""):
    group = mesh.get_group()
    return averaged(SequenceParallel(group, fault), group)


# Tensor parallelism by hand, with a fused QKV matrix.


class ShardedAttention(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        self.group, self.size = group, dist.get_world_size(group)
        rank = dist.get_rank(group)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // self.size)
        self.out = nn.Linear(WIDTH // self.size, WIDTH, bias=False)
        self.bias = nn.Parameter(whole.out.bias.detach().clone())
        with torch.no_grad():
            self.qkv.weight.copy_(cut_qkv(whole.qkv.weight, rank, self.size))
            self.qkv.bias.copy_(cut_qkv(whole.qkv.bias, rank, self.size))
            self.out.weight.copy_(whole.out.weight.chunk(self.size, 1)[rank])

    def forward(self, x):
        batch, length, _ = x.shape
        heads = HEADS // self.size
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(batch, length, heads, -1).transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return SumOverRanks.apply(y, self.group) + self.bias


def cut_qkv(whole, rank, size):
    return torch.cat([part.chunk(size)[rank] for part in whole.chunk(3)])


class TensorParallel(Model):
    def __init__(self, group, fault):
        super().__init__()
        self.group, self.fault = group, fault
        self.attention = ShardedAttention(self.attention, group)

    def forward(self, tokens):
        x = self.embed(tokens)
        given = x if self.fault == "not copied" else CopyToRanks.apply(x, self.group)
        if self.fault == "doubled":
            given = given * 2
        x = x + self.attention(given)
        if self.fault == "detach":
            x = x.detach()
        x = x + self.mlp(self.norm(x))
        return self.head(x)


def tensor_parallel(mesh, fault=""):
    return TensorParallel(mesh.get_group(), fault)


def shard_attention(name):
    if ".qkv." in name:
        size, rank = dist.get_world_size(), dist.get_rank()
        return functools.partial(cut_qkv, rank=rank, size=size)
    return (1, "tp") if name == "attention.out.weight" else None


TP = {"shard": shard_attention, "rename": {"attention.bias": "attention.out.bias"}}


# Expert parallelism: tokens travel to the rank of their expert and back.


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.counts, ctx.group = (sent, received), group
        y = x.new_empty(sum(received), x.size(-1))
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.counts
        x = gradient.new_empty(sum(sent), gradient.size(-1))
        dist.all_to_all_single(x, gradient.contiguous(), sent, received, group=ctx.group)
        return x, None, None, None


class ExpertParallel(nn.Module):
    def __init__(self, whole, group, fault):
        super().__init__()
        self.group, self.fault, self.rank = group, fault, dist.get_rank(group)
        self.experts = nn.ModuleDict({str(self.rank): whole.experts[self.rank]})
        self.register_buffer("counts", torch.zeros(2))

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = (flat.detach()[:, 0] > 0).long()
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=2)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self.counts = self.counts + sent
        tokens = Exchange.apply(flat[order], sent.tolist(), received.tolist(), self.group)
        y = self.experts[str(self.rank)](tokens)
        if self.fault == "scaled":
            y = y * 2
        y = Exchange.apply(y, received.tolist(), sent.tolist(), self.group)
        back = order if self.fault == "order" else order.argsort()
        return y[back].view_as(x)


class CountingExperts(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(2))


def make_experts():
    return Model(CountingExperts)


def expert_parallel(mesh, fault=""):
    model, group = make_experts(), mesh.get_group()
    model.mlp = ExpertParallel(model.mlp, group, fault)
    rest = [p for n, p in model.named_parameters() if ".experts." not in n]

    def average(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= 2

    def halve(parameter):
        parameter.grad /= 2

    for parameter in rest:
        parameter.register_post_accumulate_grad_hook(average)
    for parameter in model.mlp.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return model


# A loss of vocabulary shards.


class VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, fault):
        rank, size = dist.get_rank(group), logits.size(-1)
        most = logits.amax(-1, keepdim=True)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        total = (logits - most).exp().sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        if fault == "logarithm":
            dist.all_reduce(total, group=group)
        local = targets - rank * size
        is_own = (local >= 0) & (local < size)
        place = local.clamp(0, size - 1)[:, None]
        chosen = torch.where(is_own[:, None], logits.gather(-1, place) - most, 0.0)
        dist.all_reduce(chosen, group=group)
        ctx.save_for_backward((logits - most).exp() / total, place, is_own)
        ctx.fault = fault
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, gradient):
        probabilities, place, is_own = ctx.saved_tensors
        own = torch.zeros_like(probabilities).scatter_(-1, place, is_own[:, None].double())
        if ctx.fault == "targets":
            own = own / 2
        return gradient * (probabilities - own) / len(place), None, None, None


class VocabularyParallel(Model):
    def __init__(self, group, fault):
        super().__init__()
        self.group, self.fault = group, fault
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        whole, self.head = self.head, nn.Linear(WIDTH, VOCABULARY // size)
        with torch.no_grad():
            self.head.weight.copy_(whole.weight.chunk(size)[rank])
            self.head.bias.copy_(whole.bias.chunk(size)[rank])

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x)
        return self.head(CopyToRanks.apply(x + self.mlp(self.norm(x)), self.group))


def vocabulary_parallel(mesh, fault=""):
    return VocabularyParallel(mesh.get_group(), fault)


def vocabulary_loss(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    return VocabularyLoss.apply(logits, batch["targets"].flatten(), model.group, model.fault)


# Data parallelism, with steps of several forward passes.


def data_parallel(mesh):
    return Model()


def mean_over_ranks(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def accumulating(model, batch, fault=""):
    total = 0.0
    for rows, targets in zip(batch["tokens"].chunk(2), batch["targets"].chunk(2), strict=True):
        if fault == "doubled":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 2
        value = loss(model, {"tokens": rows, "targets": targets}) / 2
        value.backward()
        total += value.item()
    with torch.no_grad():
        loss(model, {"tokens": batch["targets"], "targets": batch["tokens"]})
    mean_over_ranks(model)
    return total


def weighing(model, batch, fault=""):
    """The mean of the ranks' means, or their sum in proportion to their numbers of targets."""
    share = torch.tensor(0.5)
    if fault == "by count":
        count = (batch["targets"] >= 0).sum()
        dist.all_reduce(total := count.clone())
        share = count / total
    value = weighted(model, batch) * 2 * share
    value.backward()
    mean_over_ranks(model)
    return value


# DTensors.


def partial_gradients(mesh):
    """The optimizer reduces the gradient of the head's bias itself."""
    model = Model()
    bias = nn.Parameter(distribute_tensor(model.head.bias.detach(), mesh, [Replicate()]))

    def split(parameter):
        local = parameter.grad.to_local() / mesh.size()
        parameter.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)

    bias.register_post_accumulate_grad_hook(split)
    model.head.bias = bias
    model.head.forward = lambda x: nn.functional.linear(x, model.head.weight, bias.to_local())
    return model


def interleaved(mesh):
    """The fused QKV matrix is stored as shards of q, of k and of v, and gathered to be used."""
    model = Model()
    whole = model.attention.qkv.weight.detach()
    placement = _StridedShard(0, split_factor=3)
    local = torch.cat(whole.chunk(6)[mesh.get_local_rank() :: 2])
    weight = nn.Parameter(
        DTensor.from_local(local, mesh, [placement], shape=whole.shape, stride=whole.stride())
    )
    model.attention.qkv.weight = weight
    bias = model.attention.qkv.bias

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            parts = [torch.empty_like(weight.to_local()) for _ in range(2)]
            dist.all_gather(parts, weight.to_local())
            return torch.cat([part.chunk(3)[i] for i in range(3) for part in parts])

        @staticmethod
        def backward(ctx, gradient):
            own = torch.cat(gradient.chunk(6)[mesh.get_local_rank() :: 2])
            return DTensor.from_local(
                own, mesh, [placement], shape=gradient.shape, stride=gradient.stride()
            )

    model.attention.qkv.forward = lambda x: nn.functional.linear(x, Whole.apply(weight), bias)
    return model


def as_dtensors(batch, mesh):
    return {name: distribute_tensor(field, mesh, [Shard(0)]) for name, field in batch.items()}


def local_loss(model, batch):
    return loss(model, {name: field.to_local() for name, field in batch.items()})


class Remembering(Model):
    """Adds what it has seen, in an attribute that is no buffer."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(WIDTH)

    def forward(self, tokens):
        self.seen = self.seen + 1
        return super().forward(tokens) + self.seen.sum() * self.head.bias


def remembering(mesh):
    return Remembering()


class Grouped(Model):
    """Has a product that refuses float64."""

    def forward(self, tokens):
        y = super().forward(tokens)
        if y.dtype == torch.float64:
            raise RuntimeError("grouped_mm: expected bfloat16 or float32")
        return y


def grouped(mesh):
    return averaged(Grouped())
