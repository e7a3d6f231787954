"""A language model in a 1F1B pipeline of two stages with two replicas; the head's weight gradient comes waits.

Thread: NVIDIA/Megatron-LM issue #1012 "[BUG] `finish_embedding_wgrad_compute` appears after grad all-reduce" (2024):
with --defer-embedding-wgrad-compute the schedule synchronizes the gradients before it computes the deferred ones.
Fault: Pipeline.step calls sync_gradients (all-reduce over dp) before finish_head_wgrad, which adds the deferred weight
gradient of the rank's own rows to lm_head.weight.grad, so that this is never averaged over dp.
REPAIR: `self.sync_gradients()` -> `self.finish_head_wgrad(), self.sync_gradients()`
A right first sentence says: the gradient of lm_head.weight isn't all-reduced over dp (each replica keeps that of its
own rows), since the deferred weight gradient is computed after the gradients have been synchronized.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, LENGTH, ROWS, LAYERS, MICROBATCH = 29, 16, 2, 9, 12, 3, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.silu(self.fc1(self.norm2(x))))


class GPTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.last = True
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        x = self.embedding(x) + self.positions.weight if self.first else x
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x)) if self.last else x


class DeferredWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, store):
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.store.append((grad.flatten(0, 1), x.flatten(0, 1)))
        return grad @ weight, None, None


class Pipeline:
    def __init__(self, model, mesh):
        self.model, self.pp, self.dp = model, mesh.get_group("pp"), mesh.get_group("dp")
        self.stage, self.stages, self.store = mesh.get_local_rank("pp"), mesh["pp"].size(), []
        if model.last:
            head = model.lm_head
            head.forward = lambda x: DeferredWeightGradient.apply(x, head.weight, self.store)

    def send(self, tensor, hop):
        peer = dist.get_global_rank(self.pp, self.stage + hop)
        self.sent.append((tensor, dist.isend(tensor.contiguous(), peer, group=self.pp)))

    def receive(self, shape, hop):
        buffer = next(self.model.parameters()).new_empty(shape)
        dist.recv(buffer, dist.get_global_rank(self.pp, self.stage + hop), group=self.pp)
        return buffer

    def forward(self, tokens):
        x = tokens[:, :-1]
        if not self.model.first:
            x = self.receive((*x.shape, WIDTH), -1).requires_grad_()
        y = self.model(x)
        if self.model.last:
            y = F.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten()) / self.microbatches
        else:
            self.send(y.detach(), 1)
        return x, y

    def backward(self, x, y):
        y.backward(None if self.model.last else self.receive(y.shape, 1))
        if not self.model.first:
            self.send(x.grad, -1)
        return y.detach()

    def step(self, rows):
        parts, pending, done, self.sent = rows.split(MICROBATCH), [], [], []
        self.microbatches = len(parts)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        for part in parts:
            pending.append(self.forward(part))
            if len(pending) == self.stages - self.stage:
                done.append(self.backward(*pending.pop(0)))
        while pending:
            done.append(self.backward(*pending.pop(0)))
        for _, work in self.sent:
            work.wait()
        self.sync_gradients()
        self.finish_head_wgrad()
        return sum(done) if self.model.last else None

    def sync_gradients(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad, group=self.dp)
            p.grad /= dist.get_world_size(self.dp)

    def finish_head_wgrad(self):
        while self.store:
            grad, x = self.store.pop()
            self.model.lm_head.weight.grad.addmm_(grad.t(), x)


def parallel(mesh):
    model = GPTModel()
    if mesh.get_local_rank("pp") == 0:
        model.last = False
        del model.layers["2"], model.norm, model.lm_head
    else:
        model.first = False
        del model.layers["0"], model.layers["1"], model.embedding, model.positions
    return Pipeline(model, mesh)


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


generator = torch.Generator().manual_seed(1012)
batches = [torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = GPTModel, parallel
options = dict(batches=batches, loss=loss, step=Pipeline.step, split="dp", ranks={"dp": 2, "pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
