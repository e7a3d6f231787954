"""The policy update of GRPO under FSDP2: clipped surrogate and KL per token, micro-batches accumulated, token-wise loss.

Thread: allenai/open-instruct pull request #1161 "Correct loss accumulation for grpo_fast" (2025): the loss was divided by the
valid tokens of the current minibatch instead of by those of the whole batch, wrong where minibatches differ in tokens.
Fault: in PolicyTrainer.train_batch, the loss of a micro-batch is the masked mean over its own response tokens, divided by the
number of micro-batches. Averaged over micro-batches and ranks this is a mean of means: tokens of short responses count more.
REPAIR: `loss = masked_mean(token_loss, mask) / len(micro_batches)` ->
`loss = (token_loss * mask).sum() / stats["num_tokens"] * dist.get_world_size()`
A right first sentence says: the GRPO loss is normalized by each micro-batch's own number of response tokens (masked_mean in
train_batch) instead of by the token count of the whole batch over all ranks, so all gradients are weighted wrongly.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, DIM, HEADS, LAYERS, SEQ = 20, 16, 2, 2, 9
MICRO_BATCH_SIZE, CLIP_LOW, CLIP_HIGH, BETA = 2, 0.2, 0.28, 0.05


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, DIM))
        return x + self.mlp(self.ln_2(x))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def response_logprobs(model, query_responses):
    logits = model(query_responses[:, :-1])
    return logits.log_softmax(-1).gather(-1, query_responses[:, 1:, None]).squeeze(-1)


def grpo_token_loss(new_logprobs, old_logprobs, ref_logprobs, advantages):
    ratio = (new_logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped)
    ref_diff = ref_logprobs - new_logprobs
    return pg_loss + BETA * (ref_diff.exp() - 1 - ref_diff)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


class PolicyTrainer:
    def __init__(self, model):
        self.model = model

    def train_batch(self, batch):
        rows = len(batch["query_responses"])
        micro_batches = [
            {key: value[i : i + MICRO_BATCH_SIZE] for key, value in batch.items()}
            for i in range(0, rows, MICRO_BATCH_SIZE)
        ]
        stats = {"num_tokens": batch["response_mask"].sum(), "loss": torch.zeros(())}
        dist.all_reduce(stats["num_tokens"])
        for i, micro in enumerate(micro_batches):
            self.model.set_requires_gradient_sync(i == len(micro_batches) - 1)
            new_logprobs = response_logprobs(self.model, micro["query_responses"])
            mask = micro["response_mask"]
            token_loss = grpo_token_loss(
                new_logprobs,
                micro["old_logprobs"],
                micro["ref_logprobs"],
                micro["advantages"][:, None],
            )
            loss = masked_mean(token_loss, mask) / len(micro_batches)
            loss.backward()
            stats["loss"] += loss.detach()
        return stats


def parallel(mesh):
    model = Policy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return model, PolicyTrainer(fully_shard(model, mesh=mesh))


def step(built, batch):
    return built[1].train_batch(batch)["loss"]


def loss(model, batch):
    new_logprobs = response_logprobs(model, batch["query_responses"])
    token_loss = grpo_token_loss(
        new_logprobs, batch["old_logprobs"], batch["ref_logprobs"], batch["advantages"][:, None]
    )
    return masked_mean(token_loss, batch["response_mask"])


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(41)
    for _ in range(count):
        lengths = torch.randint(1, SEQ - 2, (rows,), generator=generator)
        position = torch.arange(SEQ - 1)
        uniform = torch.rand(2, rows, SEQ - 1, generator=generator, dtype=torch.float64)
        rewards = torch.randn(rows // 4, 4, generator=generator, dtype=torch.float64)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, keepdim=True) + 1e-8
        )
        yield {
            "query_responses": torch.randint(VOCAB, (rows, SEQ), generator=generator),
            "response_mask": (position >= 2) & (position < 2 + lengths[:, None]),
            "old_logprobs": -3.0 + 0.4 * (uniform[0] - 0.5),
            "ref_logprobs": -3.0 + 0.4 * (uniform[1] - 0.5),
            "advantages": advantages.flatten(),
        }


arguments = Policy, parallel
options = dict(
    batches=list(make_batches(3, rows=8)), loss=loss, step=step, split="dp", ranks={"dp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
