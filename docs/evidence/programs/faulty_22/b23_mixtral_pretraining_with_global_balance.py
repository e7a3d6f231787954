"""Pretraining of a small Mixtral with DDP and a load balancing loss over the tokens of the global batch.

Thread: NVIDIA/Megatron-LM pull request #3769 "fix(moe): correct global_aux_loss gradient scaling by dp_size", issue
#3672 (2026).
Fault: GlobalAuxLoss.layer divides by the square of the global number of tokens, but sums only the probabilities of
the rank's own tokens; averaged by DDP over the data parallel ranks, the balancing term and its gradient are too small
by the number of ranks.
REPAIR: `return aux_loss` -> `return aux_loss * self.dp_size`
A right first sentence says: the load balancing (auxiliary) loss is normalized by the global token count although each
rank sums just its own tokens' router probabilities, so after DDP's average it is too small by the data parallel size.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

import titanlite

VOCAB, LENGTH, ROWS, EXPERTS, TOP_K = 28, 10, 4, 4, 2
AUX_COEFF, Z_COEFF = 0.05, 1e-3


def build_model():
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        sliding_window=None,
        initializer_range=0.2,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    return MixtralForCausalLM(config)


def route(logits):
    probs = logits.softmax(-1)
    chosen = probs.topk(TOP_K, dim=-1).indices
    return probs, F.one_hot(chosen, EXPERTS).sum((0, 1))


def switch_load_balancing_loss(router_logits):
    """The balancing loss of one process, summed over the layers."""
    total = 0.0
    for logits in router_logits:
        probs, tokens_per_expert = route(logits)
        scale = EXPERTS * AUX_COEFF / (TOP_K * probs.size(0) ** 2)
        total = total + scale * (probs.sum(0) * tokens_per_expert).sum()
    return total


def z_loss(router_logits):
    return Z_COEFF * sum(logits.logsumexp(-1).square().mean() for logits in router_logits)


class GlobalAuxLoss:
    """The balancing loss of the global batch: tokens per expert are counted over all data parallel ranks."""

    def __init__(self, mesh):
        self.group, self.dp_size = mesh.get_group(), mesh.size()

    def layer(self, logits):
        probs, tokens_per_expert = route(logits)
        dist.all_reduce(tokens_per_expert, group=self.group)
        total_num_tokens = probs.size(0) * self.dp_size
        aggregated = probs.sum(0)
        scale = EXPERTS * AUX_COEFF / (TOP_K * total_num_tokens**2)
        aux_loss = scale * (aggregated * tokens_per_expert).sum()
        return aux_loss

    def __call__(self, router_logits):
        return sum(self.layer(logits) for logits in router_logits)


def lm_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pretrainer:
    def __init__(self, model, mesh):
        self.model = DistributedDataParallel(model, process_group=mesh.get_group())
        self.aux_loss, self.group = GlobalAuxLoss(mesh), mesh.get_group()

    def train_step(self, tokens):
        outputs = self.model(input_ids=tokens[:, :-1], output_router_logits=True)
        value = lm_loss(outputs.logits, tokens[:, 1:])
        value = value + self.aux_loss(outputs.router_logits) + z_loss(outputs.router_logits)
        value.backward()
        reported = value.detach().clone()
        dist.all_reduce(reported, group=self.group)
        return reported / dist.get_world_size(self.group)


def plain():
    return build_model()


def parallel(mesh):
    trainer = Pretrainer(build_model(), mesh["dp"])
    return trainer.model, trainer


def loss(model, tokens):
    outputs = model(input_ids=tokens[:, :-1], output_router_logits=True)
    balance = switch_load_balancing_loss(outputs.router_logits)
    return lm_loss(outputs.logits, tokens[:, 1:]) + balance + z_loss(outputs.router_logits)


def step(built, tokens):
    return built[1].train_step(tokens)


generator = torch.Generator().manual_seed(3672)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
