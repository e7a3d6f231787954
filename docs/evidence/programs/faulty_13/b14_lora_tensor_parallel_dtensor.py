"""LoRA fine-tuning with DTensor tensor parallelism and FSDP2: own parallel styles cut the frozen weights and the adapters.

Thread: NVIDIA-NeMo/Automodel issue #547 "TP+DP fails to train only LoRA Adapters in Automodel" (2025): with tensor parallelism
and LoRA all parameters got requires_grad=True, not only the adapters; pull request #520 keeps it in own parallel styles.
Fault: in distribute_param, the distributed tensor is wrapped in a new nn.Parameter without requires_grad, which is True by
default. The base weights that freeze_base had frozen get gradients again in the layers of the plan, and the optimizer trains
them.
REPAIR: `dist_param = nn.Parameter(distribute_tensor(param, device_mesh, placements))` ->
`dist_param = nn.Parameter(distribute_tensor(param, device_mesh, placements), requires_grad=param.requires_grad)`
A right first sentence says: the frozen base weights of the tensor parallel projections (q_proj ... down_proj) become trainable,
because distribute_param makes new nn.Parameters without keeping requires_grad=False, so they get gradients and are updated.
"""

from typing import ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import titanlite

VOCAB, DIM, HEADS, HIDDEN, LAYERS, SEQ, RANK, ALPHA = 24, 16, 4, 32, 2, 5, 4, 8


class LinearLoRA(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)
        self.lora_A = nn.Parameter(torch.randn(RANK, in_features) / in_features**0.5)
        self.lora_B = nn.Parameter(torch.randn(out_features, RANK) / 10)

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_A), self.lora_B) * (
            ALPHA / RANK
        )


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(DIM)
        self.q_proj, self.k_proj, self.v_proj = (LinearLoRA(DIM, DIM) for _ in range(3))
        self.o_proj = LinearLoRA(DIM, DIM)
        self.post_attention_layernorm = nn.LayerNorm(DIM)
        self.up_proj, self.down_proj = LinearLoRA(DIM, HIDDEN), LinearLoRA(HIDDEN, DIM)

    def forward(self, x):
        b, s, _ = x.shape
        y = self.input_layernorm(x)
        q, k, v = (
            p(y).view(b, s, -1, DIM // HEADS).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.down_proj(F.silu(self.up_proj(self.post_attention_layernorm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def freeze_base(model):
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    return model


def distribute_param(module, name, device_mesh, placements):
    param = getattr(module, name)
    dist_param = nn.Parameter(distribute_tensor(param, device_mesh, placements))
    module.register_parameter(name, dist_param)


class LoRAStyle(ParallelStyle):
    """How a LinearLoRA is cut; takes and returns plain tensors."""

    placements: dict
    input_layout = output_layout = Replicate()

    def _partition(self, name, module, device_mesh):
        for param_name, placement in self.placements.items():
            distribute_param(module, param_name, device_mesh, [placement])

    def _prepare_input(self, module, inputs, device_mesh):
        return DTensor.from_local(inputs[0], device_mesh, [self.input_layout], run_check=False)

    def _prepare_output(self, module, output, device_mesh):
        return output.redistribute(placements=[self.output_layout]).to_local()

    def _apply(self, module, device_mesh):
        return distribute_module(
            module, device_mesh, self._partition, self._prepare_input, self._prepare_output
        )


class ColwiseLoRA(LoRAStyle):
    placements: ClassVar = {"weight": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)}
    output_layout = Shard(-1)


class RowwiseLoRA(LoRAStyle):
    placements: ClassVar = {"weight": Shard(1), "lora_A": Shard(1), "lora_B": Replicate()}
    input_layout = Shard(-1)


def reference():
    return freeze_base(Model())


def parallel(mesh):
    model = freeze_base(Model())
    plan = {name: ColwiseLoRA() for name in ("q_proj", "k_proj", "v_proj", "up_proj")}
    plan |= {name: RowwiseLoRA() for name in ("o_proj", "down_proj")}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def loss(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(8)
    for _ in range(count):
        text = torch.randint(VOCAB, (rows, SEQ + 1), generator=generator)
        yield {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


arguments = reference, parallel
options = dict(
    batches=list(make_batches(3, rows=4)), loss=loss, split="dp", ranks={"dp": 2, "tp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
