"""Data parallel training without DDP: a sharded AdamW reduces the gradients itself when it steps.

Thread: KellerJordan/modded-nanogpt pull request #102 "Remove all_reduce altogether and shard the optimizer(new WR)" (2025): each
rank reduce-scatters the gradients inside the optimizer, updates its rows of a parameter and all-gathers the new values.
Correct: after the backward pass the gradients differ between the ranks and nothing averages them there. `DistAdamW.step` does,
before anything uses them: it scatters the mean of a parameter's gradient by rows, applies AdamW to the own rows with moments
kept for these rows only, and gathers the parameter. AdamW is elementwise, so that is the step of one process. Parameters
whose rows do not divide by the ranks are averaged and updated whole on each rank.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, BLOCK, WIDTH, HEADS, LAYERS = 35, 9, 16, 4, 2


class DistAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def own(self, tensor):
        return tensor.chunk(self.world)[self.rank] if tensor.shape[0] % self.world == 0 else tensor

    def reduced(self, grad):
        if grad.shape[0] % self.world:
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad / self.world
        parts = [part.contiguous() for part in grad.chunk(self.world)]
        out = torch.empty_like(parts[self.rank])
        dist.reduce_scatter(out, parts)
        return out / self.world

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad, rows, state = self.reduced(p.grad), self.own(p), self.state[p]
                if not state:
                    state.update(
                        step=0, exp_avg=torch.zeros_like(rows), exp_avg_sq=torch.zeros_like(rows)
                    )
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                size = group["lr"] / (1 - beta1 ** state["step"])
                scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                rows = (
                    rows * (1 - group["lr"] * group["weight_decay"])
                    - size * state["exp_avg"] / scale
                )
                if rows.shape == p.shape:
                    p.copy_(rows)
                else:
                    parts = [torch.empty_like(rows) for _ in range(self.world)]
                    dist.all_gather(parts, rows)
                    p.copy_(torch.cat(parts))


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.c_q, self.c_k, self.c_v)
        )
        q, k = (F.rms_norm(y, (y.shape[-1],)) for y in (q, k))
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = CausalSelfAttention()
        self.mlp = MLP()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.1, 0.05]))

    def forward(self, x, x0):
        x = (
            self.lambdas[0] * x
            + self.lambdas[1] * x0
            + self.lambdas[2] * x.mean(dim=-1, keepdim=True)
        )
        x = x + self.attn(F.rms_norm(x, (WIDTH,)))
        return x + self.mlp(F.rms_norm(x, (WIDTH,)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = x0 = F.rms_norm(self.embed(tokens) + self.position.weight[: tokens.shape[1]], (WIDTH,))
        for block in self.blocks:
            x = block(x, x0)
        return self.lm_head(F.rms_norm(x, (WIDTH,)))


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def parallel():
    model = GPT()
    return model, DistAdamW(model.parameters())


def step(built, part):
    model, _ = built
    output = loss(model, part)
    output.backward()
    mean = output.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def make_batches(steps=4, rows=6):
    generator = torch.Generator().manual_seed(102)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (rows, BLOCK + 1), generator=generator)
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return batches


batches = make_batches()
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
