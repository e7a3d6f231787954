"""RLOO updates under FSDP2; the ranks pack rows into micro-batches of a token budget, a prompt's samples are on two ranks.

Might be accused because: the gradients are summed and not averaged; a micro-batch's loss is a plain sum over tokens divided by
the number of all; the ranks have different numbers of micro-batches of different sizes, some rows are computed once more with a
weight of zero, padding is cut off, and the baseline of a rank's rows comes from the rewards of other ranks.
Correct because: sums of the tokens' losses don't depend on how the rows are grouped, the divisor is the number of completion
tokens of all ranks, FSDP's divide factor is one, and the idle turns add exactly zero; they only keep the ranks' collectives in
step. The cut columns are padding behind the last token of causal rows. The baselines are those of the whole groups, as in one
process.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, PROMPT = 20, 16, 2, 14, 3
PROMPTS, SAMPLES, BUDGET, BETA = 2, 4, 24, 0.05


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        qkv = self.wqkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.pos_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1) - 1)
        x = self.tok_embeddings(tokens[:, :-1]) + self.pos_embeddings(positions)
        for layer in self.layers:
            x = layer(x)
        return -F.cross_entropy(self.output(self.norm(x)).mT, tokens[:, 1:], reduction="none")


def leave_one_out(rewards):
    """The samples of a prompt are PROMPTS rows apart."""
    groups = rewards.view(SAMPLES, PROMPTS)
    baseline = (groups.sum(0) - groups) / (SAMPLES - 1)
    return (groups - baseline).flatten()


def token_losses(logps, ref_logps, advantages):
    """The policy gradient and the k3 estimate of the divergence from the reference."""
    difference = ref_logps - logps
    kl = difference.exp() - difference - 1
    return BETA * kl - advantages.unsqueeze(-1) * logps


def completion_mask(lengths):
    places = torch.arange(1, LENGTH)
    return (places >= PROMPT) & (places < lengths.unsqueeze(-1))


def pack(lengths):
    """Longest rows first, as many as fit the budget when they are padded to the longest."""
    packs = [[]]
    for row in lengths.argsort(descending=True).tolist():
        longest = lengths[packs[-1][0]] if packs[-1] else lengths[row]
        if packs[-1] and longest * (len(packs[-1]) + 1) > BUDGET:
            packs.append([])
        packs[-1].append(row)
    return packs


def same_number(packs):
    """Rows of zero weight for the ranks that would run out of packs."""
    number = torch.tensor(len(packs))
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    idle = number.item() - len(packs)
    return [(rows, 1.0) for rows in packs] + [(packs[-1][:1], 0.0)] * idle


def plain():
    return Policy()


def parallel(mesh):
    model = Policy()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
    return model


def loss(model, batch):
    tokens, lengths, ref_logps, rewards = batch
    mask = completion_mask(lengths)
    losses = token_losses(model(tokens), ref_logps, leave_one_out(rewards))
    return (losses * mask).sum() / mask.sum()


def step(model, batch):
    tokens, lengths, ref_logps, rewards = batch
    every = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
    dist.all_gather(every, rewards.contiguous())
    advantages = leave_one_out(torch.cat(every)).split(len(rewards))[dist.get_rank()]
    mask = completion_mask(lengths)
    count, value = mask.sum(), 0.0
    dist.all_reduce(count)
    turns = same_number(pack(lengths))
    for turn, (rows, weight) in enumerate(turns):
        model.set_requires_gradient_sync(turn == len(turns) - 1)
        end = int(lengths[rows].max())
        logps = model(tokens[rows, :end])
        losses = token_losses(logps, ref_logps[rows, : end - 1], advantages[rows])
        part = weight * (losses * mask[rows, : end - 1]).sum() / count
        part.backward()
        value = value + part.detach()
    dist.all_reduce(value)
    return value


generator = torch.Generator().manual_seed(21)


def samples():
    rows = PROMPTS * SAMPLES
    prompts = torch.randint(0, VOCAB, (PROMPTS, PROMPT), generator=generator).repeat(SAMPLES, 1)
    texts = torch.randint(0, VOCAB, (rows, LENGTH - PROMPT), generator=generator)
    lengths = torch.randint(PROMPT + 1, LENGTH + 1, (rows,), generator=generator)
    lengths[: rows // 2] = lengths[: rows // 2].clamp(max=7)
    noise = torch.randn(rows, LENGTH - 1, generator=generator, dtype=torch.float64)
    rewards = torch.rand(rows, generator=generator, dtype=torch.float64)
    return torch.cat([prompts, texts], 1), lengths, -3.0 + 0.3 * noise, rewards


batches = [samples() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
