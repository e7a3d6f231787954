"""REINFORCE with a KL penalty: the reference model's log-probabilities come back in the order of the micro-batches.

Thread: https://github.com/verl-project/verl/issues/2185 "[Bug] Critical Bug in use_dynamic_bsz=True: Reward
Misalignment Due to Shuffled Batch Order", 2025-06-24.
Wrong: compute_log_prob packs rows by length and concatenates the results. Rows of the policy are then compared with
the reference's log-probabilities of other rows; nothing puts them back in order.
EXPECT: the loss and the gradients of actor.* differ in step 1 though actor and reference have the right outputs (the
reference sees the rows in another order or in pieces): the reference log-probabilities (KL penalty) belong to other
rows, as the order of the micro-batches (sorted by length) is not undone after they are concatenated. No reduction is
missing.
"""

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, LENGTH, TOKEN_BUDGET, BETA = 12, 12, 8, 14, 0.4


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.rnn, self.head = nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.head(self.norm(self.rnn(self.embed(tokens))[0])).log_softmax(-1)


class Worker(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = CausalLM()
        self.ref = copy.deepcopy(self.actor).requires_grad_(False)
        with torch.no_grad():
            for p in self.ref.parameters():
                p.add_(0.1 * torch.randn_like(p))


def log_prob(model, batch):
    logps = model(batch["tokens"])
    return logps.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)


def policy_loss(logps, ref_logps, batch):
    mask = torch.arange(LENGTH) < batch["lengths"].unsqueeze(1)
    delta = ref_logps - logps
    per_token = BETA * (delta.exp() - delta - 1) - batch["advantages"].unsqueeze(1) * logps
    return ((per_token * mask).sum(1) / batch["lengths"]).mean()


def loss(worker, batch):
    with torch.no_grad():
        ref_logps = log_prob(worker.ref, batch)
    return policy_loss(log_prob(worker.actor, batch), ref_logps, batch)


def rearrange_micro_batches(batch):
    indices, tokens = [[]], 0
    for i in batch["lengths"].argsort(descending=True, stable=True).tolist():
        length = int(batch["lengths"][i])
        if indices[-1] and tokens + length > TOKEN_BUDGET:
            indices.append([])
            tokens = 0
        indices[-1].append(i)
        tokens += length
    return [{n: t[rows] for n, t in batch.items()} for rows in indices], indices


@torch.no_grad()
def compute_ref_log_prob(model, batch):
    micro_batches, _ = rearrange_micro_batches(batch)
    return torch.cat([log_prob(model, micro) for micro in micro_batches])


def parallel(mesh):
    worker = Worker()
    worker.actor = DistributedDataParallel(worker.actor, process_group=mesh.get_group("dp"))
    return worker


def update_policy(worker, batch):
    ref_logps = compute_ref_log_prob(worker.ref, batch)
    value = policy_loss(log_prob(worker.actor, batch), ref_logps, batch)
    value.backward()
    return value.detach()


def name_of(parameter):
    return parameter.replace("actor.module.", "actor.")


def create_optimizer(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=2e-3)


generator = torch.Generator().manual_seed(2185)


def rollout():
    return {
        "tokens": torch.randint(VOCAB, (8, LENGTH), generator=generator),
        "actions": torch.randint(VOCAB, (8, LENGTH), generator=generator),
        "advantages": torch.randn(8, generator=generator),
        "lengths": torch.randint(2, LENGTH + 1, (8,), generator=generator),
    }


batches = [rollout() for _ in range(3)]
arguments = Worker, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=update_policy)
options.update(rename=name_of, optimizer=create_optimizer)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
