"""Data parallel training without DDP: the optimizer reduce-scatters gradients, updates its slices and gathers the weights.

Thread: KellerJordan/modded-nanogpt pull request #102 "Remove all_reduce altogether and shard the optimizer(new WR)" (2025): the
all-reduce before the optimizer gives way to a reduce-scatter inside of it, and each rank keeps the moments of its slice only.
Correct: after the backward pass, .grad is each rank's own and stays so; nothing ever holds the averaged gradient of a whole
parameter. DistAdamW averages slice by slice, in buffers padded to a multiple of the ranks, and AdamW is elementwise, so
updating slices is updating the parameter. Parameters smaller than SMALL are all-reduced and updated everywhere.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, DIM, HEADS, LAYERS, SEQ = 27, 15, 3, 2, 6
SMALL = 32
HYPER = dict(lr=3e-3, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.c_proj = nn.Linear(DIM, DIM, bias=False)
        self.c_fc = nn.Linear(DIM, 4 * DIM, bias=False)
        self.c_out = nn.Linear(4 * DIM, DIM, bias=False)
        self.skip = nn.Parameter(torch.ones(2))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, s, DIM)
        )
        x = self.skip[0] * x + self.c_proj(y)
        return self.skip[1] * x + self.c_out(F.relu(self.c_fc(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return 8 * torch.tanh(self.lm_head(x) / 8)


class DistAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def _padded(self, tensor):
        flat = tensor.reshape(-1)
        return F.pad(flat, (0, -flat.numel() % self.world_size))

    def _reduce(self, p):
        """A pending reduction, and where its sum arrives."""
        if p.numel() < SMALL:
            total = p.grad.reshape(-1).clone()
            return dist.all_reduce(total, async_op=True), total
        parts = list(self._padded(p.grad).chunk(self.world_size))
        total = torch.empty_like(parts[0])
        return dist.reduce_scatter(total, parts, async_op=True), total

    def _update(self, p_slice, grad, state, group):
        beta1, beta2 = group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
        p_slice.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
            group["lr"] * mean / (root + group["eps"])
        )

    @torch.no_grad()
    def step(self, closure=None):
        pending = [
            (group, p, *self._reduce(p))
            for group in self.param_groups
            for p in reversed(group["params"])
        ]
        gathers = []
        for group, p, work, grad in pending:
            work.wait()
            grad /= self.world_size
            if p.numel() < SMALL:
                self._update(p.view(-1), grad, self.state[p], group)
                continue
            p_slice = self._padded(p).chunk(self.world_size)[self.rank].clone()
            self._update(p_slice, grad, self.state[p], group)
            whole = torch.empty(self.world_size, p_slice.numel())
            gathers.append((p, whole, dist.all_gather(list(whole), p_slice, async_op=True)))
        for p, whole, work in gathers:
            work.wait()
            p.copy_(whole.view(-1)[: p.numel()].view_as(p))


def plain_optimizer(params):
    return torch.optim.AdamW(params, **HYPER)


def parallel():
    model = GPT()
    for p in model.parameters():
        dist.broadcast(p.detach(), 0)
    return model, DistAdamW(model.parameters(), **HYPER)


def loss(model, batch):
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        text = torch.randint(VOCAB, (rows, SEQ + 1), generator=generator)
        yield {"inputs": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


arguments = GPT, parallel
options = dict(
    batches=list(make_batches(4, rows=8)),
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 4},
    optimizer=plain_optimizer,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
