"""Learning sums modulo a prime with amplified slow gradients (Grokfast), the filter being a communication hook of DDP.

Thread: pytorch/pytorch pull requests #48867 "[Gradient Compression] Replace the key of error_dict in PowerSGD state
with bucket index" (2020) and #51427 "Check start_PowerSGD_iter > 1" (2021): DDP rebuilds its buckets at the second
iteration, so what a hook keeps by bucket index from the first iteration belongs to another layout.
Fault: GradFilter keeps the moving average of the gradients by bucket index; there is one bucket, after the first step
DDP orders it by the arrival of the gradients, and the average of one parameter is added to the gradient of another.
REPAIR: `[(bucket.index(), bucket.buffer())]` -> `zip(bucket.parameters(), bucket.gradients())`
A right first sentence says: the moving average in the communication hook is kept by bucket index, and DDP rebuilds the
bucket in another order after the first step, so from step 2 on parameters get averages of other parameters' gradients.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

PRIME, WIDTH, HEADS, ROWS = 23, 16, 4, 24
ALPHA, LAMB = 0.9, 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, PRIME, bias=False)
        self.ln_f = nn.LayerNorm(WIDTH)
        self.token_embeddings = nn.Embedding(PRIME + 2, WIDTH)
        self.position_embeddings = nn.Embedding(4, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.token_embeddings(tokens) + self.position_embeddings.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln_f(x))[:, -1]


class GradFilter:
    """Grokfast: adds LAMB times the exponential moving average of a gradient to the gradient."""

    def __init__(self, alpha=ALPHA, lamb=LAMB):
        self.alpha, self.lamb, self.averages = alpha, lamb, {}

    def apply_(self, key, grad):
        if key not in self.averages:
            self.averages[key] = grad.clone()
        average = self.averages[key].mul_(self.alpha).add_(grad, alpha=1 - self.alpha)
        return grad.add_(average, alpha=self.lamb)


def gradfilter_ema_hook(state, bucket):
    """Averages over the ranks and filters while the rest of the backward pass goes on."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def filtered(future):
        reduced = future.value()[0]
        for key, grad in [(bucket.index(), bucket.buffer())]:
            state.apply_(key, grad)
        return reduced

    return future.then(filtered)


def plain():
    model, state = Decoder(), GradFilter()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: state.apply_(name, grad.clone()))
    return model


def parallel(mesh):
    model = DDP(Decoder(), process_group=mesh.get_group("dp"))
    model.register_comm_hook(GradFilter(), gradfilter_ema_hook)
    return model


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["answer"])


generator = torch.Generator().manual_seed(48867)


def sums():
    a, b = torch.randint(0, PRIME, (2, ROWS), generator=generator)
    plus, equals = torch.full_like(a, PRIME), torch.full_like(a, PRIME + 1)
    return {"tokens": torch.stack([a, plus, b, equals], 1), "answer": (a + b) % PRIME}


batches = [sums() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
