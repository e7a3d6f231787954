"""A GRPO policy with experts, in Megatron's sequence-first layout, which replays the experts chosen in the rollout.

Thread: radixark/miles pull request #3146 "fix(megatron): align BSHD routing replay token order" (2026): the replay data
are flattened batch-first, the router's tokens are sequence-first: "Matching tensor shapes do not detect this."
Fault: fill_replay_data flattens [B, S, L, K] to rows in the order of the batch and cuts them over the sequence parallel
ranks; the hidden states are [S, B, H], so that most tokens get the expert ids of another token.
REPAIR: `flat = routed_experts.flatten(0, 1)` -> `flat = routed_experts.transpose(0, 1).flatten(0, 1)`
A right first sentence says: the output of the first layer's experts is wrong since its router replays expert ids of
other tokens: the replayed routes are in batch-first, the hidden states in sequence-first order (no transpose).
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, HIDDEN, HEAD, EXPERTS, TOPK, FFN, LAYERS, ROWS, LENGTH = 21, 16, 4, 4, 2, 12, 2, 4, 8


def whole_of(x, group):
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def part_of(x, group):
    return x.chunk(group.size())[group.rank()].contiguous()


def part_of_sum(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return part_of(x, group)


class _SequenceRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward, group):
        ctx.operation, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.operation(grad, ctx.group), None, None, None


def move(x, forward, backward, group):
    return _SequenceRegion.apply(x, forward, backward, group) if group else x


class Layer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, n, rank = group, group.size() if group else 1, group.rank() if group else 0
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN // n, bias=False) for _ in range(3))
        self.out = nn.Linear(HIDDEN // n, HIDDEN, bias=False)
        self.router, self.mine = nn.Linear(HIDDEN, EXPERTS), torch.arange(EXPERTS).chunk(n)[rank]
        self.up = nn.Parameter(torch.randn(EXPERTS // n, HIDDEN, FFN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS // n, FFN, HIDDEN) / 4)

    def attend(self, x):
        x = x.transpose(0, 1) if self.group else x
        heads = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(x.transpose(0, 1) if self.group else x)

    def forward(self, x, routes):
        h = self.attend(move(self.norm1(x), whole_of, part_of_sum, self.group))
        x = x + move(h, part_of_sum, whole_of, self.group)
        h = self.norm2(x).flatten(0, 1)
        scores = self.router(h).gather(-1, routes).softmax(-1)
        gates = torch.zeros(len(h), EXPERTS).scatter(-1, routes, scores)
        h, gates = (move(t, whole_of, part_of_sum, self.group) for t in (h, gates))
        h = torch.einsum("te,eth->th", gates[:, self.mine], F.silu(h @ self.up) @ self.down)
        return x + move(h, part_of_sum, whole_of, self.group).view_as(x)


class Policy(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, self.words = group, nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(group) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens, routed_experts):
        x, rows = self.words(tokens), routed_experts.flatten(0, 1)
        if self.group:
            x = move(x.transpose(0, 1), part_of, whole_of, self.group)
            rows = self.fill_replay_data(routed_experts)
        for layer, routes in zip(self.layers, rows.unbind(1)):
            x = layer(x, routes)
        x = move(self.norm(x), whole_of, part_of, self.group)
        return self.head(x.transpose(0, 1) if self.group else x)

    def fill_replay_data(self, routed_experts):
        flat = routed_experts.flatten(0, 1)
        return part_of(flat, self.group)


plain = Policy


def shard(name):  # noqa: RET503
    if any(part in name for part in (".q", ".k", ".v", ".out", ".up", ".down")):
        return 1 if ".out" in name else 0, "tp"


def parallel(mesh):
    group, state = mesh.get_group("tp"), plain().state_dict()
    for name in filter(shard, state):
        state[name] = state[name].chunk(group.size(), shard(name)[0])[group.rank()]
    model = Policy(group)
    model.load_state_dict(state)
    return model


def loss(model, batch):
    tokens, routed_experts, advantages, old_logps = batch
    logits = model(tokens, routed_experts)[:, :-1].transpose(1, 2)
    ratio = (-F.cross_entropy(logits, tokens[:, 1:], reduction="none") - old_logps).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()


def step(model, batch):
    (value := loss(model, batch)).backward()
    for name, parameter in model.named_parameters():
        if "norm" in name or "router" in name:  # sequence parallel
            dist.all_reduce(parameter.grad, group=model.group)
    return value.detach()


generator = torch.Generator().manual_seed(3146)


def rollout():
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    routes = torch.rand(ROWS, LENGTH, LAYERS, EXPERTS, generator=generator).topk(TOPK).indices
    old_logps = 0.3 * torch.randn(ROWS, LENGTH - 1, generator=generator) - 3
    return tokens, routes, torch.randn(ROWS, 1, generator=generator), old_logps


arguments = plain, parallel
batches = [rollout() for _ in range(3)]
options = dict(batches=batches, loss=loss, step=step, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
