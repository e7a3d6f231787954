"""A causal LM trained with Ulysses sequence parallelism (all-to-all between sequence and heads) and DDP.

Thread: huggingface/transformers pull request #36607 "[ForCausalLMLoss] allow users to pass shifted labels" (2025): with
sequence parallelism the loss shifts the labels of each shard, so the label that crosses to the next shard is lost.
Fault: in `train_step`, the labels are cut into sequence shards first and shifted inside the shard then, so the last token of
every shard but the last one has no label: its loss term is missing from the sum and from the token count.
REPAIR: `shift_labels(sequence_shard(batch["labels"], sp_mesh))` -> `sequence_shard(shift_labels(batch["labels"]), sp_mesh)`
A right first sentence says: in train_step the labels are shifted after they were sharded over the sequence, so each shard's
last position gets the ignore index instead of the first label of the next shard, and these tokens drop out of the loss.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

VOCAB, SEQUENCE, WIDTH, HEADS, LAYERS, IGNORE = 37, 12, 16, 4, 2, -100


class _SeqAllToAll(torch.autograd.Function):
    """Cuts dimension `scatter` over the group and joins dimension `gather`; the backward pass does the reverse."""

    @staticmethod
    def forward(ctx, group, x, scatter, gather):
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        sent = torch.stack([part.contiguous() for part in x.chunk(group.size(), scatter)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=gather)

    @staticmethod
    def backward(ctx, grad):
        return None, _SeqAllToAll.apply(ctx.group, grad, ctx.gather, ctx.scatter), None, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.sp_group = None

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, dim=-1))
        if self.sp_group is not None:
            q, k, v = (_SeqAllToAll.apply(self.sp_group, y, 2, 1) for y in (q, k, v))
        y = F.scaled_dot_product_attention(
            *(y.transpose(1, 2) for y in (q, k, v)), is_causal=True
        ).transpose(1, 2)
        if self.sp_group is not None:
            y = _SeqAllToAll.apply(self.sp_group, y, 1, 2)
        return self.out(y.flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.embed_positions = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids, position_ids):
        x = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def shift_labels(labels):
    return F.pad(labels, (0, 1), value=IGNORE)[:, 1:].contiguous()


def token_loss_sum(logits, targets):
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def loss(model, batch):
    targets = shift_labels(batch["labels"])
    return (
        token_loss_sum(model(batch["input_ids"], batch["position_ids"]), targets)
        / (targets != IGNORE).sum()
    )


def sequence_shard(tensor, sp_mesh):
    return tensor.chunk(sp_mesh.size(), dim=1)[sp_mesh.get_local_rank()]


def parallel(mesh):
    model = CausalLM()
    for layer in model.layers:
        layer.attention.sp_group = mesh.get_group("sp")
    return DDP(model), mesh["sp"]


def train_step(built, batch):
    model, sp_mesh = built
    input_ids, position_ids = (
        sequence_shard(batch[name], sp_mesh) for name in ("input_ids", "position_ids")
    )
    targets = shift_labels(sequence_shard(batch["labels"], sp_mesh))
    tokens = (targets != IGNORE).sum()
    dist.all_reduce(tokens)
    local = token_loss_sum(model(input_ids, position_ids), targets) / tokens
    (local * dist.get_world_size()).backward()
    total = local.detach().clone()
    dist.all_reduce(total)
    return total


def make_batches(steps=3, rows=4):
    generator = torch.Generator().manual_seed(36607)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (rows, SEQUENCE), generator=generator)
        prompt = torch.randint(1, 5, (rows, 1), generator=generator)
        positions = torch.arange(SEQUENCE).repeat(rows, 1)
        batches.append(
            dict(
                input_ids=tokens,
                position_ids=positions,
                labels=tokens.masked_fill(positions < prompt, IGNORE),
            )
        )
    return batches


batches = make_batches()
arguments = CausalLM, parallel
options = dict(batches=batches, loss=loss, step=train_step, split="dp", ranks={"dp": 2, "sp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
