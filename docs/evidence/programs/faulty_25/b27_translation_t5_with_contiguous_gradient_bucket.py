"""A small T5-like model in data parallel training after DeepSpeed: gradients move into a bucket, which is all-reduced.

Thread: deepspeedai/DeepSpeed pull request #4321 "Fix Zero3 contiguous grads, reduce scatter false accuracy issue"
(2023; see also #3832): "a corner case met when running Zero3 on flan-t5 HF model. Where HF auto bucket size becomes
exactly the same size if hidden_size^2", the size of some parameters, which "are not being reduced during backward".
Fault: GradientBucket.add moves a gradient into the flat buffer only if the elements stay below bucket_size (`<`), while
reduce takes the flat buffer for up to bucket_size elements (`<=`); gradients of d_model^2 elements stay the rank's own.
REPAIR: `if self.elements + p.numel() < self.bucket_size:` -> `if self.elements + p.numel() <= self.bucket_size:`
A right first sentence says: the gradients of the square matrices (q, k, v, o of all attentions), which fill the bucket
exactly, aren't all-reduced over dp: they aren't moved into the buffer that is reduced (GradientBucket.add).
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, D_MODEL, D_FF, HEADS, LENGTH, ROWS, PASSES = 21, 12, 20, 3, 7, 12, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(2 * LENGTH - 1, HEADS)

    def forward(self, x, memory, causal=False):
        q, k, v = (
            linear(t).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        distance = torch.arange(LENGTH) - torch.arange(LENGTH).unsqueeze(1)
        bias = self.relative_attention_bias(distance + LENGTH - 1).permute(2, 0, 1)
        if causal:
            bias = bias.masked_fill(distance > 0, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1, -1))
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.attention, self.cross = Attention(), Attention() if decoder else None
        self.wi_0, self.wi_1, self.wo = (
            nn.Linear(*size, bias=False) for size in 2 * [(D_MODEL, D_FF)] + [(D_FF, D_MODEL)]
        )
        self.norms = nn.ModuleList(nn.RMSNorm(D_MODEL) for _ in range(3 if decoder else 2))

    def forward(self, x, memory=None):
        h = self.norms[0](x)
        x = x + self.attention(h, h, causal=memory is not None)
        if memory is not None:
            x = x + self.cross(self.norms[1](x), memory)
        h = self.norms[-1](x)
        return x + self.wo(F.gelu(self.wi_0(h)) * self.wi_1(h))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(WORDS, D_MODEL)
        self.encoder, self.decoder = Block(False), Block(True)
        self.norms = nn.ModuleList(nn.RMSNorm(D_MODEL) for _ in range(2))
        self.lm_head = nn.Linear(D_MODEL, WORDS, bias=False)

    def forward(self, source, target):
        memory = self.norms[0](self.encoder(self.shared(source)))
        shifted = F.pad(target[:, :-1], (1, 0))
        return self.lm_head(self.norms[1](self.decoder(self.shared(shifted), memory)))


class GradientBucket:
    """Takes the gradients as they come and reduces them, as soon as the next one has no place."""

    def __init__(self, model, group, bucket_size):
        self.group, self.bucket_size, self.params = group, bucket_size, list(model.parameters())
        self.buffer = self.params[0].detach().new_zeros(bucket_size)
        self.in_bucket, self.elements, self.averaged = [], 0, {}
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.add)

    def add(self, p):
        if self.in_bucket and self.elements + p.numel() > self.bucket_size:
            self.reduce()
        if self.elements + p.numel() < self.bucket_size:
            place = self.buffer.narrow(0, self.elements, p.numel()).view_as(p)
            p.grad = place.copy_(p.grad)
        self.in_bucket.append(p)
        self.elements += p.numel()

    def reduce(self):
        if self.elements <= self.bucket_size:
            gradients = [self.buffer.narrow(0, 0, self.elements)]
        else:
            gradients = [p.grad for p in self.in_bucket]
        for gradient in gradients:
            gradient /= dist.get_world_size(self.group)
            dist.all_reduce(gradient, group=self.group)
        for p in self.in_bucket:
            self.averaged[p] = self.averaged.get(p, 0.0) + p.grad
            p.grad = None
        self.in_bucket, self.elements = [], 0

    def finish(self):
        self.reduce()
        for p in self.params:
            p.grad = self.averaged.pop(p)


def parallel(mesh):
    model = T5()
    return model, GradientBucket(model, mesh.get_group("dp"), bucket_size=D_MODEL**2)


def loss(model, batch):
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["target"].flatten())


def step(built, batch):
    model, bucket = built
    total = 0.0
    for part in zip(batch["source"].chunk(PASSES), batch["target"].chunk(PASSES)):
        value = loss(model, dict(zip(("source", "target"), part))) / PASSES
        value.backward()
        bucket.reduce()
        total = total + value.detach()
    bucket.finish()
    return total


generator = torch.Generator().manual_seed(4321)


def sentences():
    source = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    return {"source": source, "target": (source.flip(1) * 2) % WORDS}


arguments = T5, parallel
options = dict(
    batches=[sentences() for _ in range(3)], loss=loss, step=step, split="dp", ranks={"dp": 3}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
