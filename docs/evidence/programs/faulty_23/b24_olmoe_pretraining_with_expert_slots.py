"""Pretraining of a small OLMoE with its experts split over the ranks: tokens are replicated, outputs all-reduced.

Thread: huggingface/transformers issue #48687 "Wrong router gradient with experts_implementation="batched_mm" under
expert parallelism" (2026), mended by pull request #48689: slots of experts on other ranks point at a local expert,
whose output isn't zero; the zero routing weight hides that in the forward pass, but not in the backward pass.
Fault: in SplitExperts.forward the routing weights of slots of other ranks are set to zero in place on the data of the
weights, unseen by autograd; the product's backward pass still gives those slots a gradient from the clamped expert,
and the sum over the ranks adds it to the router's gradient.
REPAIR: `weights.data[elsewhere] = 0.0` -> `weights = weights.masked_fill(elsewhere, 0.0)`
A right first sentence says: outputs and loss are right, but the router's gradient contains the slots of experts that
other ranks hold, because their weights are zeroed without autograd while a wrong local expert's output fills the slot.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

import titanlite

VOCAB, LENGTH, ROWS, EXPERTS, TOP_K = 26, 10, 4, 8, 3


class CopyToGroup(torch.autograd.Function):
    """The same tensor on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverGroup(torch.autograd.Function):
    """Partial sums become the same tensor on all ranks; its gradient is the same as well."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SplitExperts(nn.Module):
    """The rank's experts of a layer; all slots are computed at once with gathered weights."""

    def __init__(self, experts, mesh):
        super().__init__()
        self.group, self.count = mesh.get_group(), EXPERTS // mesh.size()
        self.first, self.act_fn = mesh.get_local_rank() * self.count, experts.act_fn
        self.gate_up_proj = nn.Parameter(distribute_tensor(experts.gate_up_proj, mesh, [Shard(0)]))
        self.down_proj = nn.Parameter(distribute_tensor(experts.down_proj, mesh, [Shard(0)]))

    def forward(self, hidden, index, weights):
        hidden = CopyToGroup.apply(hidden, self.group)
        weights = CopyToGroup.apply(weights, self.group)
        index = index - self.first
        elsewhere = (index < 0) | (index >= self.count)
        weights.data[elsewhere] = 0.0
        index = index.clamp(0, self.count - 1).flatten()
        tokens = hidden.repeat_interleave(TOP_K, dim=0).unsqueeze(-1)
        gate_up = self.gate_up_proj.to_local()[index] @ tokens
        gate, up = gate_up.squeeze(-1).chunk(2, dim=-1)
        inner = (self.act_fn(gate) * up).unsqueeze(-1)
        output = (self.down_proj.to_local()[index] @ inner).squeeze(-1)
        output = output.unflatten(0, (-1, TOP_K)) * weights.unsqueeze(-1)
        return SumOverGroup.apply(output.sum(1), self.group)


def build_model():
    config = OlmoeConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=False,
        output_router_logits=False,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    return OlmoeForCausalLM(config)


def plain():
    return build_model()


def parallel(mesh):
    model = build_model()
    for layer in model.model.layers:
        layer.mlp.experts = SplitExperts(layer.mlp.experts, mesh["ep"])
    return model


def loss(model, batch):
    logits = model(input_ids=batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


generator = torch.Generator().manual_seed(48687)


def documents():
    return torch.randint(2, VOCAB, (ROWS, LENGTH + 1), generator=generator)


batches = [documents() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"ep": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, foreach=False),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
