"""A reward model on a Qwen2 backbone, trained on pairs of answers by an FSDP2 engine with an optimizer of its own.

Thread: verl-project/verl issue #5070 "Weight decay is applied to all model's parameters" (2026): the FSDP engine
passes module.parameters() as one collection, while transformers' trainer leaves biases and normalization weights out
of the decay.
Fault: FSDPEngine.initialize builds AdamW over all parameters with one weight decay; the norms' weights and the biases
of the attention projections decay too, which the single process excludes by decay_groups.
REPAIR: `parameters = self.module.parameters()` -> `parameters = decay_groups(self.module.parameters())`
A right first sentence says: gradients are right, but the FSDP engine's optimizer applies weight decay to the norm
weights and biases as well, since it has a single parameter group, so these weights differ after the step.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2Model

import titanlite

VOCAB, PAD, LENGTH, ROWS = 26, 0, 11, 6
LR, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.1, 1.0


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        config = Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.2,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = Qwen2Model(config)
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids):
        mask = input_ids != PAD
        hidden = self.model(input_ids=input_ids, attention_mask=mask.long()).last_hidden_state
        rewards = self.score(hidden).squeeze(-1)
        last = mask.sum(1, keepdim=True) - 1
        return rewards.gather(1, last).squeeze(1)


def decay_groups(parameters):
    """Matrices and embeddings decay; norms and biases don't."""
    parameters = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)


def pairwise_loss(rewards, margins):
    chosen, rejected = rewards.chunk(2)
    return -F.logsigmoid(chosen - rejected - margins).mean()


class FSDPEngine:
    def __init__(self, mesh):
        self.mesh = mesh

    def initialize(self):
        module = RewardModel()
        for layer in module.model.layers:
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=True)
        self.module = fully_shard(module, mesh=self.mesh)
        parameters = self.module.parameters()
        self.optimizer = build_optimizer(parameters)
        return self

    def forward_backward_batch(self, batch):
        answers = torch.cat([batch["chosen"], batch["rejected"]])
        value = pairwise_loss(self.module(answers), batch["margins"])
        value.backward()
        metric = value.detach().clone()
        dist.all_reduce(metric, group=self.mesh.get_group())
        return metric / self.mesh.size()


def plain():
    return RewardModel()


def parallel(mesh):
    engine = FSDPEngine(mesh["dp"]).initialize()
    return engine.module, engine.optimizer, engine


def loss(model, batch):
    return pairwise_loss(model(torch.cat([batch["chosen"], batch["rejected"]])), batch["margins"])


def step(built, batch):
    return built[2].forward_backward_batch(batch)


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


generator = torch.Generator().manual_seed(5070)


def answers():
    tokens = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    return tokens * (torch.arange(LENGTH) < lengths)


def comparisons():
    margins = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return {"chosen": answers(), "rejected": answers(), "margins": margins}


batches = [comparisons() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    clip=clip,
    optimizer=lambda parameters: build_optimizer(decay_groups(parameters)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
