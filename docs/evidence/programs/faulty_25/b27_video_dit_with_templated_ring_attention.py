"""A small video diffusion transformer whose tokens are spread over a context parallel ring of three ranks.

Thread: huggingface/diffusers issue #14265 "Ring attention backward uses stale iteration-0 KV from ctx.saved_tensors -
silent gradient corruption when training with context parallelism" (2026): the forward pass is right; the backward pass
rotates keys and values through local variables, while the per-iteration backward op reads what the forward pass saved.
Fault: TemplatedRingAttention.backward fetches the key and value of each ring step, but math_attention_backward_op takes
query, key and value from ctx.saved_tensors, which are those of step 0: each step repeats the rank's own keys.
REPAIR: `ctx.backward_op(ctx, grad_out)` -> `ctx.backward_op(ctx, grad_out, key, value)`; and
`def math_attention_backward_op(ctx, grad_out):` -> `def math_attention_backward_op(ctx, grad_out, key, value):`; and
`query, key, value = ctx.saved_tensors` -> `query = ctx.saved_tensors[0]`
A right first sentence says: in the backward pass of the ring attention every step uses the rank's own key and value
(saved at step 0) instead of those that came round the ring, so the gradients of query, key and value are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

CHANNELS, WIDTH, HEADS, TOKENS, ROWS, RING = 6, 24, 3, 18, 2, 3


def math_attention_forward_op(ctx, query, key, value, save_ctx):
    if save_ctx:
        ctx.save_for_backward(query, key, value)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)


def math_attention_backward_op(ctx, grad_out):
    query, key, value = ctx.saved_tensors
    scale = query.shape[-1] ** -0.5
    probs = (query @ key.mT * scale - ctx.lse).exp()
    grad_scores = grad_out @ value.mT - (grad_out * ctx.out).sum(-1, keepdim=True)
    grad_scores = probs * grad_scores * scale
    return grad_scores @ key, grad_scores.mT @ query, probs.mT @ grad_out


MATH_OPS = math_attention_forward_op, math_attention_backward_op


def send_to_previous(tensor, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (dist.get_global_rank(group, (rank + hop) % size) for hop in (-1, 1))
    received = torch.empty_like(tensor)
    ops = [(dist.isend, tensor, left), (dist.irecv, received, right)]
    for work in dist.batch_isend_irecv([dist.P2POp(*op, group=group) for op in ops]):
        work.wait()
    return received


class TemplatedRingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, group, forward_op, backward_op):
        ctx.group, ctx.backward_op = group, backward_op
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own = torch.stack([key, value])
        buffer = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(buffer, own, group=group)
        for i in range(size):
            if i > 0:
                key, value = buffer[(rank + i) % size].unbind()
            step_out, step_lse = forward_op(ctx, query, key, value, i == 0)
            if i > 0:
                step_out = out - torch.sigmoid(step_lse - lse) * (out - step_out)  # noqa: F821
                step_lse = lse - F.logsigmoid(lse - step_lse)  # noqa: F821
            out, lse = step_out, step_lse
        ctx.out, ctx.lse, ctx.buffer = out, lse, buffer
        return out

    @staticmethod
    def backward(ctx, grad_out):
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        grad_query, grad_kv = 0.0, torch.zeros_like(ctx.buffer[0])
        for i in range(size):
            key, value = ctx.buffer[(rank + i) % size].unbind()  # noqa: RUF059
            grad_query_op, *grad_kv_op = ctx.backward_op(ctx, grad_out)
            grad_query = grad_query + grad_query_op
            grad_kv = send_to_previous(grad_kv + torch.stack(grad_kv_op), ctx.group)
        return grad_query, *grad_kv.unbind(), None, None, None


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.modulation, self.group = nn.Linear(WIDTH, 4 * WIDTH), None
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, conditioning):
        scale1, gate1, scale2, gate2 = self.modulation(conditioning).chunk(4, -1)
        qkv = self.qkv(F.layer_norm(x, (WIDTH,)) * (1 + scale1)).unflatten(-1, (3, HEADS, -1))
        attend = TemplatedRingAttention.apply if self.group else F.scaled_dot_product_attention
        out = attend(*qkv.permute(2, 0, 3, 1, 4), *([self.group, *MATH_OPS] if self.group else []))
        x = x + gate1 * self.out(out.transpose(1, 2).flatten(2))
        return x + gate2 * self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)) * (1 + scale2))))


class VideoDiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.positions = nn.Linear(CHANNELS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.time, self.proj_out = nn.Linear(1, WIDTH), nn.Linear(WIDTH, CHANNELS)

    def forward(self, latents, sigma, positions):
        x, conditioning = self.patch(latents) + self.positions(positions), F.silu(self.time(sigma))
        for block in self.blocks:
            x = block(x, conditioning)
        return self.proj_out(x)


def parallel(mesh):
    model, group = VideoDiT(), mesh.get_group("ring")
    for block in model.blocks:
        block.group = group
    return model, group


def loss(model, batch):
    clean, noise, sigma = batch["clean"], batch["noise"], batch["sigma"]
    velocity = model((1 - sigma) * clean + sigma * noise, sigma, batch["positions"])
    return F.mse_loss(velocity, noise - clean)


def step(built, batch):
    model, group = built
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
    return value.detach()


generator, batches = torch.Generator().manual_seed(14265), []
for _ in range(3):
    clean, noise = torch.randn(2, ROWS, TOKENS, CHANNELS, generator=generator).unbind()
    sigma = torch.rand(ROWS, 1, 1, generator=generator).expand(ROWS, TOKENS, 1)
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    batches.append(dict(clean=clean.cumsum(1) / 3, noise=noise, sigma=sigma, positions=positions))

arguments = VideoDiT, parallel
options = dict(batches=batches, loss=loss, step=step, split={"ring": 1}, ranks={"ring": RING})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
