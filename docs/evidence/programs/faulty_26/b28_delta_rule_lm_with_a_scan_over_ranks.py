"""A DeltaNet language model in context parallelism, whose states come from a prefix scan over ranks with ppermutes.

Thread: AI-Hypercomputer/maxtext pull request #5040 "Add context parallelism to the Gated Delta Net" (2026): a shard is
an affine map of the incoming state, ranks are stitched by "a prefix scan over those pairs"; attention-gym pull
request #453 has H_out = H_in @ A + B. A cousin: the maps are associative, but don't commute.
Fault: combine multiplies the transitions of an earlier and a later run of tokens in the wrong order (later @ earlier),
so that the state that enters the last of the four ranks is wrong; those of the first three ranks are right.
REPAIR: `transition = later[..., V:, :] @ earlier[..., V:, :]` ->
`transition = earlier[..., V:, :] @ later[..., V:, :]`
A right first sentence says: on the last rank of cp only, the state that enters the first DeltaNet layer is wrong, as
the scan over ranks (combine) multiplies the transition matrices in the wrong order.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, K, V, LAYERS, ROWS, LENGTH = 19, 16, 2, 4, 8, 2, 2, 16


class PPermute(torch.autograd.Function):
    """Every rank sends to the one hops further on; the first hops ranks get zeros, as in JAX."""

    @staticmethod
    def forward(ctx, x, hops, group):
        ctx.hops, ctx.group = hops, group
        return PPermute.shift(x, hops, group)

    @staticmethod
    def backward(ctx, grad):
        return PPermute.shift(grad, -ctx.hops, ctx.group), None, None

    @staticmethod
    def shift(x, hops, group):
        received, operations = torch.zeros(x.shape, dtype=x.dtype), []
        for operation, tensor, peer in (
            (dist.isend, x.contiguous(), group.rank() + hops),
            (dist.irecv, received, group.rank() - hops),
        ):
            if 0 <= peer < group.size():
                peer = dist.get_global_rank(group, peer)
                operations.append(dist.P2POp(operation, tensor, peer, group))
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return received


def combine(earlier, later):
    """Of two runs of tokens; a map is [bias; transition], it gives state @ transition + bias."""
    bias = earlier[..., :V, :] @ later[..., V:, :] + later[..., :V, :]
    transition = later[..., V:, :] @ earlier[..., V:, :]
    return torch.cat([bias, transition], -2)


def entry_state(summary, group):
    """The bias of the maps of all previous ranks, by recursive doubling and one last hop."""
    identity = torch.cat([torch.zeros(V, K), torch.eye(K)]).expand_as(summary)
    hops = 1
    while hops < group.size():
        earlier = PPermute.apply(summary, hops, group)
        earlier = torch.where(torch.tensor(group.rank() >= hops), earlier, identity)
        summary, hops = combine(earlier, summary), 2 * hops
    return PPermute.apply(summary, 1, group)[..., :V, :]


class DeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, HEADS * K, bias=False) for _ in range(2))
        self.v, self.out = nn.Linear(WIDTH, HEADS * V), nn.Linear(HEADS * V, WIDTH)
        self.beta = nn.Linear(WIDTH, HEADS)

    def forward(self, x, group=None):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (self.q, self.k, self.v))
        q, k, beta = F.silu(q), F.normalize(k, dim=-1), 2 * torch.sigmoid(self.beta(x))
        state = torch.zeros(len(x), HEADS, V, K)
        if group is not None:
            start = torch.cat([state, torch.eye(K).expand(len(x), HEADS, K, K)], -2)
            bias = F.pad(v, (0, K))
            state = entry_state(self.recur(start, k, bias, beta)[-1], group)
        states = self.recur(state, k, v, beta)
        y = torch.stack([(s @ q[:, t].unsqueeze(-1)).squeeze(-1) for t, s in enumerate(states)], 1)
        return self.out(y.flatten(2))

    def recur(self, state, k, v, beta):
        states = []
        for t in range(k.size(1)):
            key, b = k[:, t].unsqueeze(-2), beta[:, t, :, None, None]
            error = v[:, t].unsqueeze(-1) - state @ key.transpose(-1, -2)
            state = state + b * error @ key
            states.append(state)
        return states


class DeltaLM(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, self.words = group, nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.ModuleList(DeltaNet() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(LAYERS + 1))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x), self.group)
        return self.head(self.norms[-1](x))


def plain():
    return DeltaLM()


def parallel(mesh):
    return DeltaLM(mesh.get_group("cp"))


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=model.group)
        parameter.grad /= model.group.size()
    return value.detach()


generator = torch.Generator().manual_seed(5040)


def text():
    words = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return {"tokens": words[:, :-1], "targets": words[:, 1:]}


arguments = plain, parallel
options = dict(
    batches=[text() for _ in range(3)], loss=loss, step=step, split={"cp": 1}, ranks={"cp": 4}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
