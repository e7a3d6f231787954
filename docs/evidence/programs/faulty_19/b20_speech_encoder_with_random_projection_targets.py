"""Self-supervised speech pretraining as in BEST-RQ: masked frames are classified into the codes of a frozen random quantizer.

Thread: speechbrain/speechbrain pull request #2814 "[URGENT] Fix DDP broadcasting" (2025): modules without trainable parameters
aren't wrapped in DDP nor broadcast, and the seeds have the process's offset, so with BEST-RQ each GPU gets a different
quantizer.
Fault: Brain seeds every process with SEED plus its rank before it builds the modules; DDP then makes the trained ones equal,
but the quantizer has only buffers and stays unwrapped, so each rank's projection and codebook give other targets.
REPAIR: `torch.manual_seed(SEED + rank)` -> `torch.manual_seed(SEED)`
A right first sentence says: the frozen random quantizer is drawn with another seed on every rank and is never broadcast, as
only modules with trainable parameters are wrapped in DDP, so the ranks other than the first learn other targets.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SEED, MELS, FRAMES, STACK, CODES, CODE_WIDTH, WIDTH = 2814, 6, 32, 4, 10, 5, 16
STEPS, MASKED = FRAMES // STACK, 3


class RandomProjectionQuantizer(nn.Module):
    """Frozen: stacks STACK frames, projects them at random and takes the nearest code."""

    def __init__(self):
        super().__init__()
        projection = nn.init.xavier_normal_(torch.empty(STACK * MELS, CODE_WIDTH))
        self.register_buffer("projection", projection)
        self.register_buffer("codebook", F.normalize(torch.randn(CODES, CODE_WIDTH), dim=-1))

    @torch.no_grad()
    def forward(self, mels):
        x = F.layer_norm(mels, (MELS,)).reshape(len(mels), STEPS, STACK * MELS)
        x = F.normalize(x @ self.projection, dim=-1)
        return torch.cdist(x, self.codebook.expand(len(x), -1, -1)).argmin(-1)


class Subsampling(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, WIDTH, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, mels):
        x = F.gelu(self.conv2(F.gelu(self.conv1(mels.mT))))
        return self.norm(x.mT)


class ConformerLayer(nn.Module):
    def __init__(self, heads=2, kernel=3):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.heads = heads
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, kernel, padding=kernel // 2, groups=WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        x = x + F.silu(self.depthwise(F.glu(self.gate(self.norm2(x))).mT)).mT
        return x + self.ffn(self.norm3(x))


class Encoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(STEPS, WIDTH))
        self.layers = nn.ModuleList(ConformerLayer() for _ in range(layers))

    def forward(self, x):
        x = x + self.places
        for layer in self.layers:
            x = layer(x)
        return x


def build_modules():
    return nn.ModuleDict(
        {
            "quantizer": RandomProjectionQuantizer(),
            "cnn": Subsampling(),
            "encoder": Encoder(),
            "linear": nn.Linear(WIDTH, CODES),
        }
    )


class Brain:
    """Holds the modules, wrapped for several processes if there are any."""

    def __init__(self, rank=0, distributed=False):
        torch.manual_seed(SEED + rank)
        self.modules = build_modules()
        if distributed:
            self.wrap_distributed()

    def wrap_distributed(self):
        for name, module in self.modules.items():
            if any(p.requires_grad for p in module.parameters()):
                self.modules[name] = DistributedDataParallel(module)


def compute_loss(modules, batch):
    """Every utterance has the same number of masked steps."""
    mels, mask = batch
    targets = modules["quantizer"](mels)
    hidden = mels.masked_fill(mask.repeat_interleave(STACK, dim=1).unsqueeze(-1), 0.0)
    logits = modules["linear"](modules["encoder"](modules["cnn"](hidden)))
    return F.cross_entropy(logits[mask], targets[mask])


def plain():
    return Brain().modules


def parallel(mesh):
    return Brain(mesh.get_rank(), distributed=True).modules


def step(modules, batch):
    value = compute_loss(modules, batch)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


generator = torch.Generator().manual_seed(SEED)


def utterances(number=6):
    mels = torch.randn(number, FRAMES, MELS, generator=generator, dtype=torch.float64).cumsum(1)
    order = torch.rand(number, STEPS, generator=generator, dtype=torch.float64).argsort(-1)
    return mels, order < MASKED


batches = [utterances() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=compute_loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
