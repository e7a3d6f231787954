"""Pretraining of a DeepSeek-like sparse language model under FSDP2, its experts balanced by a bias of the routing, not by a loss.

Thread: pytorch/torchtitan pull request #1304 "[llama4][auxiliary-loss-free load balancing] update expert_bias without backward
hooks" (2025): the first version moves the bias in every micro-batch of an accumulation; it belongs once after them.
Fault: Trainer.train_step calls update_expert_bias after each micro-batch, so the later ones are routed with a bias that has
already moved, and the bias moves several times in a step, by the counts of one micro-batch at a time.
REPAIR: `update_expert_bias(self.model, self.group)` -> `if last: update_expert_bias(self.model, self.group)`
A right first sentence says: the expert bias is updated after every micro-batch of the accumulation instead of once per step from
the counts of all micro-batches, so the routing of the later micro-batches and the bias itself differ.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, ROWS, MICRO_ROWS = 22, 16, 4, 8, 2, 8, 2
EXPERTS, TOP_K, SPEED = 4, 2, 0.05


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        indices = (scores + self.expert_bias).topk(TOP_K, dim=-1).indices
        chosen = torch.zeros_like(scores).scatter(-1, indices, 1.0)
        self.tokens_per_expert += chosen.detach().sum((0, 1))
        weights = scores * chosen
        return weights / weights.sum(-1, keepdim=True)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.shared = Router(), Expert()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        qkv = self.qkv(self.attn_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        weights = self.router(y).unbind(-1)
        routed = [w[..., None] * e(y) for w, e in zip(weights, self.experts, strict=True)]
        return x + self.shared(y) + sum(routed)


class SparseLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@torch.no_grad()
def update_expert_bias(model, group=None):
    """Raises the bias of experts with few tokens and lowers that of busy ones."""
    routers = [layer.router for layer in model.layers]
    counts = torch.stack([router.tokens_per_expert for router in routers])
    if group is not None:
        dist.all_reduce(counts, group=group)
    for router, own in zip(routers, counts, strict=True):
        router.expert_bias += SPEED * (own.mean() - own).sign()
        router.tokens_per_expert.zero_()


class Trainer:
    def __init__(self, model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        self.model, self.group = fully_shard(model, mesh=mesh), mesh.get_group()

    def train_step(self, tokens):
        micros, total = tokens.split(MICRO_ROWS), torch.zeros(())
        for number, micro in enumerate(micros, start=1):
            last = number == len(micros)
            self.model.set_requires_gradient_sync(last)
            value = next_token_loss(self.model, micro) / len(micros)
            value.backward()
            total += value.detach()
            update_expert_bias(self.model, self.group)
        dist.all_reduce(total, group=self.group)
        return total / dist.get_world_size(self.group)


def next_token_loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain():
    return SparseLM()


def parallel(mesh):
    trainer = Trainer(SparseLM(), mesh["dp"])
    return trainer.model, trainer


def loss(model, tokens):
    value = next_token_loss(model, tokens)
    update_expert_bias(model)
    return value


def step(built, tokens):
    return built[1].train_step(tokens)


generator = torch.Generator().manual_seed(1304)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
