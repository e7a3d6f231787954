"""Context parallel training with a zigzag split of the sequence and a loss multiplied by the context parallel size.

Thread: NVIDIA/Megatron-LM issue #673 "[BUG] Incorrect loss scaling in context parallel code logic" (2024): reports the factor
cp_size in loss_func as a mistake; it was none while gradients are averaged over data and context parallel ranks together.
Correct: each rank's loss is its own sum over the token count of the whole context parallel group, times cp_size. The mean of
the gradients over all dp x cp ranks divides by cp_size again, so the two factors cancel. Ranks have chunks r and 2 * cp - 1 - r
of the sequence, so keys arrive in another order than in the plain model, but the mask and the rotation go by position id, and
neither attention nor the sum over tokens depends on the order.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, SEQUENCE, WIDTH, HEADS, LAYERS, PROMPT = 33, 16, 16, 2, 2, 5


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].contiguous(), None


def rotary(x, position_ids):
    half = x.shape[-1] // 2
    angles = (position_ids[..., None] * 50.0 ** (-torch.arange(half) / half))[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1
    )


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_q = nn.Linear(WIDTH, WIDTH)
        self.linear_kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.linear_proj = nn.Linear(WIDTH, WIDTH)
        self.cp_group = None

    def forward(self, x, position_ids):
        q = rotary(self.linear_q(x).unflatten(-1, (HEADS, -1)), position_ids)
        k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.linear_kv(x).chunk(2, dim=-1))
        k, key_ids = rotary(k, position_ids), position_ids
        if self.cp_group is not None:
            k, v = _GatherSequence.apply(k, self.cp_group), _GatherSequence.apply(v, self.cp_group)
            key_ids = _GatherSequence.apply(position_ids, self.cp_group)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        visible = position_ids[:, None, :, None] >= key_ids[:, None, None, :]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return self.linear_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = SelfAttention()
        self.pre_mlp_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, position_ids):
        x = x + self.self_attention(self.input_layernorm(x), position_ids)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class GPTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(LAYERS))
        self.final_layernorm = nn.LayerNorm(WIDTH)
        self.output_layer = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, position_ids):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, position_ids)
        return self.output_layer(self.final_layernorm(x))


def masked_sums(model, batch):
    logits = model(batch["tokens"], batch["position_ids"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum(), mask.sum()


def loss(model, batch):
    total, tokens = masked_sums(model, batch)
    return total / tokens


def zigzag(batch, mesh):
    """This rank's rows, and of their sequence one chunk from the front and its mirror image from the back."""
    dp, cp = mesh["dp"], mesh["cp"]
    part = {}
    for name, tensor in batch.items():
        chunks = tensor.chunk(dp.size())[dp.get_local_rank()].chunk(2 * cp.size(), dim=1)
        part[name] = torch.cat(
            (chunks[cp.get_local_rank()], chunks[2 * cp.size() - 1 - cp.get_local_rank()]), dim=1
        )
    return part


def parallel(mesh):
    model = GPTModel()
    for layer in model.layers:
        layer.self_attention.cp_group = mesh.get_group("cp")
    return model, mesh


def forward_backward(built, part):
    model, mesh = built
    cp_group = mesh.get_group("cp")
    total, tokens = masked_sums(model, part)
    dist.all_reduce(tokens, group=cp_group)
    (total / tokens * cp_group.size()).backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
    report = total.detach().clone()
    dist.all_reduce(report, group=cp_group)
    report /= tokens
    dist.all_reduce(report, group=mesh.get_group("dp"))
    return report / mesh["dp"].size()


def make_batches(steps=3, rows=4):
    generator = torch.Generator().manual_seed(673)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (rows, SEQUENCE + 1), generator=generator)
        positions = torch.arange(SEQUENCE).repeat(rows, 1)
        batches.append(
            dict(
                tokens=tokens[:, :-1].contiguous(),
                labels=tokens[:, 1:].contiguous(),
                position_ids=positions,
                loss_mask=(positions >= PROMPT).double(),
            )
        )
    return batches


batches = make_batches()
arguments = GPTModel, parallel
options = dict(
    batches=batches, loss=loss, step=forward_backward, split=zigzag, ranks={"dp": 2, "cp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
