"""A classifier of support tickets under FSDP2, whose trainer keeps a running accuracy measured without dropout.

Thread: pytorch/pytorch issue #144289 "[FSDP2] model weights are not DTensor after forward pass" (2025) with #131965 and
pull request #155319: a root to which fully_shard was applied without reshard_after_forward stays unsharded after its
forward pass, in the belief that the backward pass follows at once.
Fault: Accuracy.update runs a forward pass under no_grad between backward() and the optimizer's step; the root's own
parameters (words, places, norm, head) stay gathered after it, the step changes their shards only, and the next forward
pass doesn't gather again because they are unsharded already: it uses their values from before the step.
REPAIR: `fully_shard(model, mesh=mesh["dp"])` -> `fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)`
A right first sentence says: the root's own parameters (words, places, norm, head) are left unsharded by the forward
pass without gradients after backward, so the optimizer's step on their shards doesn't reach the weights that are used.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

WORDS, LENGTH, WIDTH, HEADS, QUEUES, ROWS = 40, 10, 16, 4, 6, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, mask):
        q, k, v = self.wqkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.wo(y.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.ffn = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, mask):
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.ffn(self.ffn_norm(x))


class TicketRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, QUEUES)

    def forward(self, tokens):
        mask = tokens > 0
        x = self.words(tokens) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x, mask)
        pooled = (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.norm(pooled))


class Accuracy:
    """Of the training data, in evaluation mode, as it is reported for the validation data."""

    def __init__(self):
        self.right, self.seen = 0, 0

    @torch.no_grad()
    def update(self, model, batch):
        model.eval()
        guess = model(batch["tokens"]).argmax(-1)
        model.train()
        self.right += int((guess == batch["queue"]).sum())
        self.seen += len(guess)

    def compute(self):
        return self.right / max(self.seen, 1)


class Trainer:
    def __init__(self, model):
        self.model = model
        self.accuracy = Accuracy()

    def training_step(self, batch):
        value = loss(self.model, batch)
        value.backward()
        self.accuracy.update(self.model, batch)
        return value.detach()


def plain():
    return TicketRouter()


def parallel(mesh):
    model = TicketRouter()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, Trainer(model)


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["queue"])


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(144289)


def tickets():
    tokens = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=generator)
    tokens = tokens.masked_fill(torch.arange(LENGTH) >= lengths, 0)
    return {"tokens": tokens, "queue": tokens[:, :3].sum(1) % QUEUES}


batches = [tickets() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
