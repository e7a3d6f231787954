"""DPO where one rank runs the chosen answers and another the rejected ones of the same prompts, on two data parallel replicas.

Might be accused because: the pairs are torn apart; the rewards are exchanged by an all-gather without gradient; a rank calls
backward on its log-ratio and not on the loss; the gradients are summed over one axis and averaged over the other; the ranks of a
pair hold texts of different lengths.
Correct because: the loss of a pair depends on the two log-ratios only. Each rank gets both as numbers, computes the derivative of
the loss with respect to its own one and hands it to its log-ratio's backward pass. This gives the part of the gradient that
comes from its answers; the sum over the "role" axis is the gradient of the replica's loss. The logged loss is the real one.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, BETA, SMOOTHING = 16, 12, 0.4, 0.1
ROLES = ("chosen", "rejected")


class CausalConvBlock(nn.Module):
    def __init__(self, kernel=3):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, kernel)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.pad(self.norm(x).transpose(1, 2), (self.kernel - 1, 0))
        return x + self.out(F.glu(self.conv(y), dim=1).transpose(1, 2))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(CausalConvBlock() for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def answer_logps(policy, tokens, labels):
    """The log-probabilities of whole answers; labels outside the answers are -1."""
    logps = policy(tokens).log_softmax(-1)
    picked = logps.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * (labels >= 0)).sum(1)


class PreferenceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = Policy()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        for parameter in self.policy.parameters():
            nn.init.normal_(parameter, std=0.3)

    def log_ratio(self, tokens, labels):
        with torch.no_grad():
            reference = answer_logps(self.reference, tokens, labels)
        return answer_logps(self.policy, tokens, labels) - reference


def dpo_loss(chosen, rejected):
    """Conservative DPO (label smoothing), the mean over pairs."""
    margin = BETA * (chosen - rejected)
    return (-(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)).mean()


class RoleTrainer:
    def __init__(self, model, mesh):
        self.model = model
        self.role = mesh.get_local_rank("role")
        self.role_group, self.dp_group = mesh.get_group("role"), mesh.get_group("dp")

    def exchange(self, own):
        both = [torch.empty_like(own) for _ in ROLES]
        dist.all_gather(both, own, group=self.role_group)
        return [ratio.requires_grad_() for ratio in both]

    def backward(self, tokens, labels):
        own = self.model.log_ratio(tokens, labels)
        both = self.exchange(own.detach())
        value = dpo_loss(*both)
        (derivative,) = torch.autograd.grad(value, both[self.role])
        own.backward(derivative)
        return value.detach()

    def reduce_gradients(self):
        for parameter in self.model.policy.parameters():
            dist.all_reduce(parameter.grad, group=self.role_group)
            dist.all_reduce(parameter.grad, group=self.dp_group)
            parameter.grad /= dist.get_world_size(self.dp_group)

    def step(self, tokens, labels):
        value = self.backward(tokens, labels)
        self.reduce_gradients()
        dist.all_reduce(value, group=self.dp_group)
        return value / dist.get_world_size(self.dp_group)


def plain():
    return PreferenceModel()


def parallel(mesh):
    model = PreferenceModel()
    return model, RoleTrainer(model, mesh)


def loss(model, batch):
    return dpo_loss(*(model.log_ratio(*batch[role]) for role in ROLES))


def step(built, batch):
    return built[1].step(*batch)


def split(batch, mesh):
    texts = batch[ROLES[mesh.get_local_rank("role")]]
    return tuple(tensor.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for tensor in texts)


generator = torch.Generator().manual_seed(305)


def answers(prompts, longest):
    rows, start = prompts.shape
    text = torch.cat(
        [prompts, torch.randint(0, VOCAB, (rows, longest), generator=generator)], dim=1
    )
    ends = start + torch.randint(2, longest + 1, (rows, 1), generator=generator)
    places = torch.arange(text.size(1))
    labels = text.masked_fill((places < start) | (places >= ends), -1)
    return text[:, :-1], labels[:, 1:]


def preferences(rows=4):
    prompts = torch.randint(0, VOCAB, (rows, 3), generator=generator)
    return {"chosen": answers(prompts, 6), "rejected": answers(prompts, 9)}


batches = [preferences() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2, "role": 2},
    optimizer=lambda parameters: torch.optim.RMSprop(
        [p for p in parameters if p.requires_grad], lr=1e-3
    ),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
