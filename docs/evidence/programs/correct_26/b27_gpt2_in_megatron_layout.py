"""A GPT-2 of Hugging Face, whose linear layers keep their weights transposed, and its copy in Megatron's layout.

Thread: NVIDIA/Megatron-LM issue #37 "Huggingface <-> Megatron-LM Compatibility" (2021), with the table of both models'
shapes: query_key_value is "[5760, 1920]  # need transpose", and its rows are ordered by heads.
What could be accused: the names differ, all matrices are transposed, query_key_value's rows have another order than
c_attn's columns and are its rank's heads alone, the activations lie sequence first, and of two layers around GELU only
the second is reduced; all of it is what shard and rename say, and nothing has to undo it.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, SIZE, LAYERS, LENGTH, ROWS = 19, 16, 4, 4, 2, 9, 4


class Conv1D(nn.Module):
    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(0.25 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(0.02 * torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Gpt2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.c_fc, self.mlp_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).split(WIDTH, -1)
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Gpt2Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.t()


class Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.group, ctx.sums = group, sums
        return x.view_as(x) if not sums else Region.total(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.sums else Region.total(gradient, ctx.group), None, None

    @staticmethod
    def total(x, group):
        dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), group=group)
        return x


class MegatronLayer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, n = group, dist.get_world_size(group)
        self.input_layernorm, self.post_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        rows, size = WIDTH // n, 4 * WIDTH // n
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * rows), nn.Linear(rows, WIDTH)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)

    def row_parallel(self, layer, x):
        return Region.apply(F.linear(x, layer.weight), self.group, True) + layer.bias

    def forward(self, x):
        mixed = self.query_key_value(Region.apply(self.input_layernorm(x), self.group, False))
        q, k, v = mixed.unflatten(-1, (-1, 3 * SIZE)).permute(1, 2, 0, 3).split(SIZE, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.row_parallel(self.dense, y.permute(2, 0, 1, 3).flatten(2))
        up = self.dense_h_to_4h(Region.apply(self.post_layernorm(x), self.group, False))
        return x + self.row_parallel(self.dense_4h_to_h, F.gelu(up, approximate="tanh"))


class MegatronGpt(Gpt2):
    def __init__(self, group):
        super().__init__()
        self.layers = nn.ModuleList(MegatronLayer(group) for _ in self.h)
        for name, parameter in self.layers.named_parameters(prefix="layers"):
            source, cut = self.get_parameter(rename(name)).detach(), shard(rename(name))
            parameter.data.copy_(cut(source) if cut else source)
        del self.h

    def forward(self, tokens):
        x = self.wte(tokens.t()) + self.wpe.weight.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return (self.ln_f(x) @ self.wte.weight.t()).transpose(0, 1)


NAMES = {"layers.": "h.", "input_layernorm": "ln_1", "post_layernorm": "ln_2"}
NAMES |= {"query_key_value": "c_attn", "dense_h_to_4h": "c_fc", "dense_4h_to_h": "mlp_proj"}


def rename(name):
    for own, theirs in (NAMES | {"dense": "c_proj"}).items():
        name = name.replace(own, theirs)
    return name


def shard(name):
    rank, size = dist.get_rank(), dist.get_world_size()

    def own(x):
        return x.chunk(size)[rank]

    if "c_attn" in name:
        return lambda x: own(x.t().unflatten(0, (3, HEADS, -1)).transpose(0, 1)).flatten(0, 2)
    if name.endswith("proj.weight"):
        return lambda x: own(x).t()
    return (lambda x: own(x.t())) if "c_fc" in name else None


def parallel(mesh):
    return MegatronGpt(mesh.get_group("tp"))


def loss(model, tokens):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


generator = torch.Generator().manual_seed(37)
batches = [torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(3)]
plain = Gpt2
arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, rename=rename)
options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
