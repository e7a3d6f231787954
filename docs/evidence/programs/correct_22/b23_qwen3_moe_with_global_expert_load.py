"""Pretraining of a small Qwen3-MoE with DDP, micro-batches and a balancing loss over the global load.

Might be accused because: the experts' load is all-reduced without a gradient; the mean of the router's probabilities
is one of the rank's own micro-batch and never reduced; a first pass without gradients runs through model.module and
so past DDP; the balancing loss of each micro-batch is divided by the accumulation steps as if it were linear;
micro-batches are seen twice.
Correct because: the load is a count and has no gradient in the single process either. Given the global load, the loss
is linear in the probabilities, so the mean of the parts' losses over micro-batches and DDP's ranks (all of the same
number of tokens) is that of the whole batch. The first pass only counts, with the weights that the second pass uses.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import titanlite

VOCAB, LENGTH, ROWS, MICRO_ROWS, EXPERTS, TOP_K, AUX_COEF = 26, 8, 8, 2, 4, 2, 0.05


def build_model():
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        initializer_range=0.2,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    return Qwen3MoeForCausalLM(config)


def expert_counts(router_logits):
    chosen = [logits.topk(TOP_K, dim=-1).indices for logits in router_logits]
    return torch.stack([F.one_hot(indices, EXPERTS).sum((0, 1)) for indices in chosen])


def balance_loss(router_logits, load):
    """load: the share of the assignments, of each layer and expert."""
    probs = torch.stack([logits.softmax(-1).mean(0) for logits in router_logits])
    return AUX_COEF * EXPERTS * (load * probs).sum()


def language_loss(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class MoeTrainer:
    def __init__(self, model, mesh):
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.model = DistributedDataParallel(model, process_group=self.group)

    @torch.no_grad()
    def global_load(self, micro_batches):
        counts = 0
        for tokens in micro_batches:
            outputs = self.model.module(input_ids=tokens[:, :-1], output_router_logits=True)
            counts = counts + expert_counts(outputs.router_logits)
        dist.all_reduce(counts, group=self.group)
        return counts / counts.sum(-1, keepdim=True)

    def training_step(self, batch):
        micro_batches = batch.split(MICRO_ROWS)
        load = self.global_load(micro_batches)
        total = torch.zeros(())
        for i, tokens in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else self.model.no_sync():
                outputs = self.model(input_ids=tokens[:, :-1], output_router_logits=True)
                value = language_loss(outputs.logits, tokens)
                value = value + balance_loss(outputs.router_logits, load)
                value = value / len(micro_batches)
                value.backward()
            total += value.detach()
        dist.all_reduce(total, group=self.group)
        return total / self.ranks


def plain():
    return build_model()


def parallel(mesh):
    trainer = MoeTrainer(build_model(), mesh["dp"])
    return trainer.model, trainer


def loss(model, tokens):
    outputs = model(input_ids=tokens[:, :-1], output_router_logits=True)
    counts = expert_counts(outputs.router_logits)
    load = counts / counts.sum(-1, keepdim=True)
    return language_loss(outputs.logits, tokens) + balance_loss(outputs.router_logits, load)


def step(built, tokens):
    return built[1].training_step(tokens)


generator = torch.Generator().manual_seed(2061)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    microbatches=4,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
