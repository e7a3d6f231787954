"""A decoder with tensor parallel linears in reduce-scatter mode, with communication overlapped by hand.

Thread: huggingface/nanotron issue #46 "[Question] Correctness of backward pass of RowLinear" and pull request #172 "Fix
_RowLinearAsyncCommunication" (2024): with reduce-scatter and async communication the row linear hands back a wrong input
gradient; only the locally computed part of it is right.
Fault: in `_RowLinearAsync.backward`, each rank multiplies its own sequence shard of the output gradient with its own columns
of the weight and gathers these products along the sequence. The foreign parts come from other ranks' weight columns, so the
gradient of the sharded input is right on the own sequence part only, and what is upstream learns from a wrong gradient.
REPAIR: `grad_input = _gather(grad_output @ weight, group)` -> `handle.wait(); grad_input = total_grad_output @ weight`
A right first sentence says: the backward of the row parallel linear all-gathers local_grad_output @ local_weight instead of
multiplying the all-gathered grad_output with the local weight, so its input gradient mixes other ranks' weight columns.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, SEQUENCE, WIDTH, HEADS, HIDDEN, LAYERS = 29, 8, 16, 4, 32, 2


def _gather(tensor, group, async_op=False):
    out = tensor.new_empty(tensor.shape[0] * group.size(), *tensor.shape[1:])
    handle = dist.all_gather_into_tensor(out, tensor.contiguous(), group=group, async_op=async_op)
    return (out, handle) if async_op else out


def _scatter_sum(tensor, group):
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor, group=group)
    return tensor.chunk(group.size())[group.rank()].contiguous()


class _ColumnLinearAsync(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return _gather(x, group) @ weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        total_x, handle = _gather(x, ctx.group, async_op=True)
        grad_x = _scatter_sum(grad_output @ weight, ctx.group)
        handle.wait()
        return grad_x, grad_output.flatten(0, -2).t() @ total_x.flatten(0, -2), None


class _RowLinearAsync(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return _scatter_sum(x @ weight.t(), group)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        group = ctx.group
        total_grad_output, handle = _gather(grad_output, group, async_op=True)
        grad_input = _gather(grad_output @ weight, group)
        handle.wait()
        grad_weight = total_grad_output.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_input, grad_weight, None


class ParallelLinear(nn.Module):
    def __init__(self, linear, dim, function, group):
        super().__init__()
        self.weight = nn.Parameter(
            linear.weight.detach().chunk(group.size(), dim)[group.rank()].clone()
        )
        self.function, self.group = function, group

    def forward(self, x):
        return self.function.apply(x, self.weight, self.group)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (-1, WIDTH // HEADS)).permute(1, 2, 0, 3)

        y = F.scaled_dot_product_attention(
            heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)), is_causal=True
        )
        return self.o_proj(y.permute(2, 0, 1, 3).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Hidden states are (sequence, batch, width); in tensor parallel runs each rank has a part of the sequence."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_layernorm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens.t())
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_layernorm(x)).transpose(0, 1)


def loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["label_ids"].flatten())


def parallel(mesh):
    model, group = Decoder(), mesh.get_group("tp")
    for layer in model.layers:
        for module, columns, rows in (
            (layer.attn, ("q_proj", "k_proj", "v_proj"), ("o_proj",)),
            (layer.mlp, ("gate_proj", "up_proj"), ("down_proj",)),
        ):
            for name in columns:
                setattr(
                    module,
                    name,
                    ParallelLinear(getattr(module, name), 0, _ColumnLinearAsync, group),
                )
            for name in rows:
                setattr(
                    module, name, ParallelLinear(getattr(module, name), 1, _RowLinearAsync, group)
                )
    return model, group


def step(built, part):
    model, group = built
    output = loss(model, part) / group.size()
    output.backward()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.RMSNorm, nn.Linear)):
            dist.all_reduce(module.weight.grad, group=group)
    total = output.detach().clone()
    dist.all_reduce(total, group=group)
    return total


generator = torch.Generator().manual_seed(46)
batches = [
    {
        name: torch.randint(VOCAB, (3, SEQUENCE), generator=generator)
        for name in ("input_ids", "label_ids")
    }
    for _ in range(3)
]
arguments = Decoder, parallel
options = dict(batches=batches, loss=loss, step=step, split={"tp": 1}, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
