"""GRPO on the tokens with high entropy alone: the quantile is taken over the rank's own tokens.

Thread: https://github.com/huggingface/trl/pull/3833 "[GRPO]: Fix Entropy Mask Threshold Calculation when using
Multi-GPU training", 2025-08-01; also https://github.com/modelscope/ms-swift/pull/5270 (2025-08-05).
Wrong: each rank trains the upper half of its own tokens, where the upper half of all tokens of the batch is meant.
The entropies have to be gathered before the quantile is taken.
EXPECT: the loss and all gradients differ from step 1 on, as the ranks compute the entropy threshold (the quantile)
from their own rows: a statistic of the local part of the batch that decides which tokens count. No module's output
is wrong; gather the entropies over dp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, TOP_QUANTILE = 12, 16, 0.5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.rnn, self.lm_head = nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.lm_head(self.norm(self.rnn(self.embed(tokens))[0]))


def high_entropy_mask(entropies):
    threshold = torch.quantile(entropies.flatten(), 1 - TOP_QUANTILE)
    return entropies >= threshold


def policy_loss(model, batch, num_tokens):
    logps = model(batch["tokens"]).log_softmax(-1)
    entropies = -(logps.detach().exp() * logps.detach()).sum(-1)
    mask = high_entropy_mask(entropies)
    taken = logps.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = (taken - batch["old_logps"]).exp()
    advantages = batch["advantages"].unsqueeze(-1)
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate * mask).sum() / num_tokens


def loss(model, batch):
    return policy_loss(model, batch, batch["tokens"].numel())


def parallel(mesh):
    return DistributedDataParallel(Policy(), process_group=mesh.get_group("dp"))


def step(model, batch):
    num_tokens = torch.tensor(batch["tokens"].numel())
    dist.all_reduce(num_tokens)
    value = policy_loss(model, batch, num_tokens / dist.get_world_size())
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(3833)


def rollout():
    tokens = torch.randint(VOCAB, (8, 6), generator=generator)
    tokens[:4] = tokens[:4] % 3
    return {
        "tokens": tokens,
        "actions": torch.randint(VOCAB, (8, 6), generator=generator),
        "old_logps": -2.5 + 0.1 * torch.randn(8, 6, generator=generator),
        "advantages": torch.randn(8, generator=generator),
    }


batches = [rollout() for _ in range(3)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
