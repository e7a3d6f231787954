"""Supervised fine-tuning of a small chat model under FSDP2, with gradient accumulation and masked prompts.

Thread: huggingface/transformers issue #34242 "Add DDP token averaging for equivalent non-parallel training" (2024): after the
fix of gradient accumulation, num_items_in_batch counted the targets of all micro-batches, but only those of the own device.
Fault: SftTrainer.step divides each rank's summed loss by that rank's own number of targets, and FSDP averages the gradients
over the ranks with equal weights; answers have different lengths, so this isn't the mean over all targets of the batch.
REPAIR: `part = self.compute_loss(*micro) / num_items` -> `part = self.compute_loss(*micro) * self.mesh.size() / seen`
A right first sentence says: the loss is normalized by the rank's own count of target tokens rather than the count over all ranks,
so FSDP's average of the gradients is a mean of means that weights the tokens of ranks with few targets too much.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, IGNORE = 23, 16, 2, 10, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ChatModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.positions[: input_ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SftTrainer:
    """Runs the micro-batches of one optimizer step; gradients are reduced in the last one."""

    def __init__(self, model, mesh, micro_batch_size):
        self.model, self.mesh = model, mesh
        self.micro_batch_size = micro_batch_size
        self.tokens_seen = 0

    def compute_loss(self, input_ids, labels):
        logits = self.model(input_ids)[:, :-1]
        return F.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )

    def step(self, batch):
        micros = list(
            zip(
                batch["input_ids"].split(self.micro_batch_size),
                batch["labels"].split(self.micro_batch_size),
                strict=True,
            )
        )
        num_items = sum((labels[:, 1:] != IGNORE).sum() for _, labels in micros)
        seen = num_items.clone()
        dist.all_reduce(seen, group=self.mesh.get_group("dp"))
        self.tokens_seen += seen.item()

        total = 0.0
        for index, micro in enumerate(micros):
            self.model.set_requires_gradient_sync(index == len(micros) - 1)
            part = self.compute_loss(*micro) / num_items
            part.backward()
            total += part.detach()
        return total


def plain():
    return ChatModel()


def parallel(mesh):
    model = ChatModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, SftTrainer(model, mesh, micro_batch_size=2)


def loss(model, batch):
    logits = model(batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(34242)


def conversation():
    """Token ids whose prompt and padding have no labels."""
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    prompt = torch.randint(1, 6, (), generator=generator).item()
    end = torch.randint(prompt + 1, LENGTH + 1, (), generator=generator).item()
    labels = ids.clone()
    labels[:prompt], labels[end:] = IGNORE, IGNORE
    return ids, labels


def collate(rows):
    ids, labels = zip(*rows)
    return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}


batches = [collate([conversation() for _ in range(8)]) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
