"""DAPO updates of a small policy under DDP in a trainer that accumulates micro-batches; the loss is a mean over all tokens.

Thread: modelscope/ms-swift issue #10117 and pull request #10116 "undo gradient-accumulation scaling for DAPO/CISPO/FIPO losses"
(2026): these losses are normalized by the tokens of the whole accumulation window, but the trainer divides by the steps again.
Fault: DAPOTrainer.compute_loss divides by the number of completion tokens in the window (all micro-batches and ranks), and
Trainer.training_step divides each micro-batch's loss by accumulation_steps on top; loss and gradients are 3 times too small.
REPAIR: `return masked.sum() / normalizer` -> `return masked.sum() / normalizer * self.accumulation_steps`
A right first sentence says: the loss is normalized by the tokens of the whole accumulation window and then divided by the number
of accumulation steps as well, so the loss and all the gradients are too small by the number of micro-batches.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, PROMPT = 19, 12, 3, 10, 3
ROWS, ACCUMULATION, CLIP_LOW, CLIP_HIGH = 12, 3, 0.2, 0.28


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )

    def forward(self, x):
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Policy(nn.Module):
    """Returns the log-probabilities of the given tokens, from the second one on."""

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.embed_positions = (nn.Embedding(n, WIDTH) for n in (VOCAB, LENGTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[: input_ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        logps = self.lm_head(self.norm(x))[:, :-1].log_softmax(-1)
        return logps.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def per_token_loss(logps, old_logps, advantages):
    ratio = (logps - old_logps).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    advantages = advantages.unsqueeze(-1)
    return -torch.minimum(ratio * advantages, clipped * advantages)


class Trainer:
    """The base class: losses of micro-batches are means, so they are averaged over the window."""

    def __init__(self, model, accumulation_steps):
        self.model = model
        self.accumulation_steps = accumulation_steps
        self.num_processes = dist.get_world_size()

    def compute_loss(self, inputs):
        raise NotImplementedError

    def prepare_window(self, window):
        pass

    def training_step(self, inputs):
        loss = self.compute_loss(inputs)
        loss = loss / self.accumulation_steps
        loss.backward()
        return loss.detach()

    def train_window(self, batch):
        parts = zip(*(tensor.chunk(self.accumulation_steps) for tensor in batch.values()))
        window = [dict(zip(batch, part)) for part in parts]
        self.prepare_window(window)
        total = 0.0
        for index, inputs in enumerate(window):
            last = index == len(window) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                total = total + self.training_step(inputs)
        dist.all_reduce(total)
        return total / self.num_processes


class DAPOTrainer(Trainer):
    num_items = None

    def prepare_window(self, window):
        self.num_items = sum(inputs["completion_mask"].sum() for inputs in window)
        dist.all_reduce(self.num_items)

    def compute_loss(self, inputs):
        logps = self.model(inputs["input_ids"])
        losses = per_token_loss(logps, inputs["old_logps"], inputs["advantages"])
        masked = losses * inputs["completion_mask"]
        normalizer = self.num_items / self.num_processes
        return masked.sum() / normalizer


def plain():
    return Policy()


def parallel(mesh):
    model = DistributedDataParallel(Policy())
    return model, DAPOTrainer(model, ACCUMULATION)


def loss(model, batch):
    losses = per_token_loss(model(batch["input_ids"]), batch["old_logps"], batch["advantages"])
    mask = batch["completion_mask"]
    return (losses * mask).sum() / mask.sum()


def step(built, batch):
    return built[1].train_window(batch)


generator = torch.Generator().manual_seed(10117)


def completions():
    """Prompts of 3 tokens, completions of 2 to 7; the advantages are those of groups of 4."""
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    ends = PROMPT + torch.randint(2, LENGTH - PROMPT + 1, (ROWS, 1), generator=generator)
    places = torch.arange(1, LENGTH)
    rewards = torch.rand(ROWS // 4, 4, generator=generator, dtype=torch.float64)
    spread = rewards.std(1, keepdim=True)
    noise = torch.randn(ROWS, LENGTH - 1, generator=generator, dtype=torch.float64)
    return {
        "input_ids": ids,
        "completion_mask": (places >= PROMPT) & (places < ends),
        "old_logps": -3.0 + 0.3 * noise,
        "advantages": ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten(),
    }


batches = [completions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
