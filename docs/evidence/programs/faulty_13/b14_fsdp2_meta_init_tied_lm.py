"""A language model with tied embeddings, built on the meta device, loaded from a checkpoint and sharded by FSDP2.

Thread: Modalities/modalities issue #357 "Weight tying breaks with meta device initialisation" (2025): after initialisation on
the meta device, lm_head.weight is no longer wte.weight, though weight tying is configured.
Fault: in `parallel`, to_empty gives each name of the tied parameter a tensor of its own. Loading the checkpoint fills both
with equal values, so the first loss is right, but from there on they are two parameters: each gets only its own part of the
gradient and they drift apart.
REPAIR: `model.to_empty(device="cpu")` -> `model.to_empty(device="cpu"); model.tie_weights()`
A right first sentence says: to_empty after meta initialisation unties lm_head.weight from wte.weight and nothing ties them
again, so the embedding and the output head train as two parameters, each with only its own part of the gradient.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, BLOCK, WIDTH, HEADS, LAYERS = 40, 10, 16, 2, 3


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.W = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.V = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.W_2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.W_2(F.silu(self.W(x)) * self.V(x))


class GPT2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.q_attn = nn.Linear(WIDTH, WIDTH)
        self.k_attn = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_attn = nn.Linear(WIDTH, WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.mlp = SwiGLU()

    def forward(self, x):
        y = self.attention_norm(x)
        q, k, v = (
            f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f in (self.q_attn, self.k_attn, self.v_attn)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ffn_norm(x))


class GPT2LLM(nn.Module):
    def __init__(self, use_weight_tying=True):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(GPT2Block() for _ in range(LAYERS))
        self.lm_head_norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.use_weight_tying = use_weight_tying
        self.tie_weights()

    def tie_weights(self):
        if self.use_weight_tying:
            self.wte.weight = self.lm_head.weight

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.lm_head_norm(x))


def loss(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten())


def load_checkpoint():
    return GPT2LLM().state_dict()


def parallel(mesh):
    state = load_checkpoint()
    with torch.device("meta"):
        model = GPT2LLM()
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_batches(steps=3, rows=4):
    generator = torch.Generator().manual_seed(357)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (rows, BLOCK + 1), generator=generator)
        batches.append(
            dict(input_ids=tokens[:, :-1].contiguous(), target_ids=tokens[:, 1:].contiguous())
        )
    return batches


batches = make_batches()
arguments = GPT2LLM, parallel
options = dict(batches=batches, loss=loss, split="dp_shard", ranks={"dp_shard": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
