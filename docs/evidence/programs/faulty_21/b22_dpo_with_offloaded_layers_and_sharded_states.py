"""DPO under DDP; some linear layers keep their weights in host memory, and each rank has the Adam states of some parameters.

Thread: lodestone-rock/RamTorch issue #13 "ZeRO-2 is broken due to a hook registration bug" (2026), in whose comments ZeRO-1
turns out to be broken too: broadcasting the updated parameters skips those of the offloaded layers, so only their owners get the
update.
Fault: ShardedAdamW.step broadcasts what the owners have updated, except weights marked as hosted; of these the other ranks keep
the values from before the step, and the replicas drift apart.
REPAIR: `updated = [p for p in members if not is_hosted(p)]` -> `updated = members`
A right first sentence says: after the sharded optimizer's step the weights of the offloaded (hosted) linear layers aren't
broadcast from the rank that owns their state, so the other ranks keep stale weights and the replicas differ.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, PAIRS, BETA = 19, 12, 3, 8, 2, 4, 0.4


class HostedLinear(nn.Linear):
    """A linear layer whose weights live in host memory and visit the device for each product."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        for parameter in self.parameters():
            parameter.hosted = True

    def forward(self, x):
        return F.linear(x, self.weight.to(x.device), self.bias.to(x.device))


def is_hosted(parameter):
    return getattr(parameter, "hosted", False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc_in, self.fc_out = HostedLinear(WIDTH, 3 * WIDTH), HostedLinear(3 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))


class Policy(nn.Module):
    """Returns the log-probability of the answer in each row."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, mask):
        x = self.wte(tokens[:, :-1]) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logprobs = self.head(self.ln_f(x)).log_softmax(-1)
        picked = logprobs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
        return (picked * mask).sum(-1)


class ShardedAdamW(torch.optim.AdamW):
    """ZeRO stage 1: a rank updates the parameters it owns, then the owners broadcast them."""

    def members(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        members = [p for p in self.members() if hasattr(p, "owner")]
        grads = [p.grad for p in members]
        for p in members:
            if p.owner != dist.get_rank():
                p.grad = None
        super().step(closure)
        for p, grad in zip(members, grads):
            p.grad = grad
        updated = [p for p in members if not is_hosted(p)]
        for p in updated:
            dist.broadcast(p.detach(), src=p.owner)


def assign_owners(model):
    """The largest parameters first, each to the rank with the fewest elements so far."""
    sizes = [0] * dist.get_world_size()
    for parameter in sorted(model.parameters(), key=torch.numel, reverse=True):
        parameter.owner = sizes.index(min(sizes))
        sizes[parameter.owner] += parameter.numel()


def plain():
    return Policy()


def parallel(mesh):
    model = Policy()
    assign_owners(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def loss(model, batch):
    rows = batch["chosen"].size(0)
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    mask = torch.cat([batch["chosen_mask"], batch["rejected_mask"]])
    chosen, rejected = model(tokens, mask).split(rows)
    margin = (chosen - rejected) - (batch["ref_chosen"] - batch["ref_rejected"])
    return -F.logsigmoid(BETA * margin).mean()


generator = torch.Generator().manual_seed(13)


def answers(prompts):
    replies = torch.randint(0, VOCAB, (PAIRS, LENGTH + 1 - prompts.size(1)), generator=generator)
    lengths = torch.randint(2, replies.size(1) + 1, (PAIRS, 1), generator=generator)
    places = torch.arange(LENGTH) - (prompts.size(1) - 1)
    mask = ((places >= 0) & (places < lengths)).double()
    noise = torch.randn(PAIRS, generator=generator, dtype=torch.float64)
    return torch.cat([prompts, replies], 1), mask, -3.0 * mask.sum(1) + noise


def preferences():
    prompts = torch.randint(0, VOCAB, (PAIRS, 3), generator=generator)
    batch = {}
    for kind in ("chosen", "rejected"):
        batch[kind], batch[f"{kind}_mask"], batch[f"ref_{kind}"] = answers(prompts)
    return batch


batches = [preferences() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: ShardedAdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
