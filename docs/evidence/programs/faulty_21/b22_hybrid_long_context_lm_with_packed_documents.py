"""A hybrid language model (gated linear attention and softmax attention in turn) on packed documents, its tokens cut over "cp".

Thread: hiyouga/LlamaFactory pull request #10787 "[v1] fix: keep packed document boundaries in GDN context parallel" (2026): the
positions never reach the context parallel linear attention, which therefore carries its state from one document into the next.
Fault: LinearAttention.forward hands the start-of-document marks to the scan on one process, but not to scan_over_ranks; with
context parallelism the state is never reset, neither within a rank's tokens nor between ranks.
REPAIR: `return self.scan_over_ranks(x)` -> `return self.scan_over_ranks(x, positions == 0)`
A right first sentence says: under context parallelism the linear attention layers don't get the document boundaries (positions),
so their recurrent state isn't reset where a packed document begins and leaks into the next document.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, IGNORE = 18, 12, 2, 12, -100


class GatherRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


class LinearAttention(nn.Module):
    cp_group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.forget = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def inputs(self, x, starts):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        decay = self.forget(x).sigmoid() * (1 if starts is None else ~starts.unsqueeze(-1))
        return q, F.normalize(k, dim=-1), v, decay[..., None, None]

    def scan(self, q, k, v, decay, state=None):
        outputs = []
        state = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]) if state is None else state
        for t in range(q.size(1)):
            state = decay[:, t] * state + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append((q[:, t, :, None] @ state).squeeze(-2))
        return torch.stack(outputs, 1).flatten(2), state

    def scan_over_ranks(self, x, starts=None):
        q, k, v, decay = self.inputs(x, starts)
        end, total = self.scan(q, k, v, decay)[1], decay.prod(1)
        summary = torch.cat([end, total.expand(*end.shape[:-1], 1)], -1)
        state = torch.zeros_like(end)
        for rank, part in enumerate(GatherRanks.apply(summary, self.cp_group)):
            earlier = torch.tensor(rank < dist.get_rank(self.cp_group))
            state = torch.where(earlier, part[..., -1:] * state + part[..., :-1], state)
        return self.out(self.scan(q, k, v, decay, state)[0])

    def forward(self, x, positions, documents):
        if self.cp_group is not None:
            return self.scan_over_ranks(x)
        return self.out(self.scan(*self.inputs(x, positions == 0))[0])


class SoftmaxAttention(nn.Module):
    cp_group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def all_tokens(self, x):
        return x if self.cp_group is None else torch.cat([*GatherRanks.apply(x, self.cp_group)], 1)

    def forward(self, x, positions, documents):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v, places, others = (self.all_tokens(t) for t in (k, v, positions, documents))
        mask = (documents[..., None] == others[:, None]) & (positions[..., None] >= places[:, None])
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(WIDTH), mixer

    def forward(self, x, positions, documents):
        return x + self.mixer(self.norm(x), positions, documents)


class HybridLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        mixers = LinearAttention(), SoftmaxAttention(), LinearAttention()
        self.layers = nn.ModuleList(Layer(mixer) for mixer in mixers)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, batch):
        x = self.embed(batch["tokens"]) + self.places(batch["positions"])
        for layer in self.layers:
            x = layer(x, batch["positions"], batch["documents"])
        return self.head(self.norm(x))


def plain():
    return HybridLM()


def parallel(mesh):
    model = HybridLM()
    for layer in model.layers:
        layer.mixer.cp_group = mesh.get_group("cp")
    return model


def summed(model, batch):
    return F.cross_entropy(model(batch).mT, batch["labels"], ignore_index=IGNORE, reduction="sum")


def loss(model, batch):
    return summed(model, batch) / (batch["labels"] != IGNORE).sum()


def step(model, batch):
    group = model.layers[0].mixer.cp_group
    count = (batch["labels"] != IGNORE).sum()
    dist.all_reduce(count, group=group)
    value = summed(model, batch) / count
    value.backward()
    for tensor in [value.detach(), *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=group)
    return value.detach()


generator = torch.Generator().manual_seed(10787)


def packed(rows=3):
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    starts = torch.rand(rows, LENGTH + 1, generator=generator) < 0.25
    starts[:, 0] = True
    places = torch.arange(LENGTH + 1).expand(rows, -1)
    positions = places - (places * starts).cummax(1).values
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].masked_fill(starts[:, 1:], IGNORE),
        "positions": positions[:, :-1],
        "documents": starts.cumsum(1)[:, :-1],
    }


batches = [packed() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split={"cp": 1}, ranks={"cp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
