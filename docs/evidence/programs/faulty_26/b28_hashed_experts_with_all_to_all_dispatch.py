"""A language model whose experts are chosen by a hash of the token, as in DeepSeek-V4's first layers, on expert ranks.

Thread: ISEEKYAN/Megatron-LM pull request #175 "lite: aggregate duplicate-expert routing probabilities" (2026): a
token's hash may name an expert in two slots; the dispatcher wrote the slots' probabilities with scatter_, "last-wins".
Fault: AllToAllDispatcher.dispatch scatters the weights of a token's slots into a row over all experts without adding
them, so a token whose two slots name one expert gets its output with the weight of one slot, a half, instead of one.
REPAIR: `.scatter(1, expert_ids, weights)` -> `.scatter_add(1, expert_ids, weights)`
A right first sentence says: the output of the first MoE layer is wrong for the tokens that choose one expert twice, as
the dispatch keeps only the last slot's routing weight (scatter in place of scatter_add): their weight is too small.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, EXPERTS, SLOTS, FFN, LAYERS, ROWS, LENGTH = 29, 16, 4, 2, 20, 2, 6, 7


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.arguments = received, sent, group
        output = x.new_empty(sum(received), x.size(1))
        dist.all_to_all_single(output, x.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.arguments), None, None, None


def new_expert():
    up, down = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(FFN, WIDTH, bias=False)
    return nn.Sequential(up, nn.SiLU(), down)


class HashMoE(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tid2eid = torch.randint(EXPERTS, (VOCAB, SLOTS), generator=generator)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): new_expert() for i in range(EXPERTS)})

    def route(self, x, ids):
        expert_ids = self.tid2eid[ids]
        scores = F.softplus(self.router(x)).sqrt().gather(1, expert_ids)
        return expert_ids, scores / scores.sum(-1, keepdim=True)

    def forward(self, x, ids):
        expert_ids, weights = self.route(x, ids)
        out = torch.zeros_like(x)
        for i, expert in self.experts.items():
            out = out + (weights * (expert_ids == int(i))).sum(-1, keepdim=True) * expert(x)
        return out


class AllToAllDispatcher:
    def __init__(self, group):
        self.group = group

    def dispatch(self, x, expert_ids, weights):
        zeros = x.new_zeros(len(x), EXPERTS)
        probabilities = zeros.scatter(1, expert_ids, weights)
        routing_map = zeros.bool().scatter(1, expert_ids, True)
        experts, self.tokens = routing_map.t().nonzero(as_tuple=True)
        self.weights, self.shape = probabilities.t()[experts, self.tokens], x.shape
        counts = routing_map.sum(0)
        everyone = [torch.empty_like(counts) for _ in range(self.group.size())]
        dist.all_gather(everyone, counts, group=self.group)
        own = torch.stack(everyone).chunk(self.group.size(), 1)[self.group.rank()]
        self.sent = [part.sum().item() for part in counts.chunk(self.group.size())]
        self.received = own.sum(1).tolist()
        arrived = _AllToAll.apply(x[self.tokens], self.sent, self.received, self.group)
        return arrived.split(own.flatten().tolist()), own.size(1)

    def combine(self, pieces):
        returned = _AllToAll.apply(torch.cat(pieces), self.received, self.sent, self.group)
        weighted = returned * self.weights.unsqueeze(-1)
        return returned.new_zeros(self.shape).index_add(0, self.tokens, weighted)


class ParallelHashMoE(HashMoE):
    def __init__(self, whole, group):
        nn.Module.__init__(self)
        self.tid2eid, self.router = whole.tid2eid, whole.router
        mine = torch.arange(EXPERTS).chunk(group.size())[group.rank()].tolist()
        self.experts = nn.ModuleDict({str(i): whole.experts[str(i)] for i in mine})
        self.dispatcher = AllToAllDispatcher(group)

    def forward(self, x, ids):
        pieces, local = self.dispatcher.dispatch(x, *self.route(x, ids))
        experts = list(self.experts.values())
        return self.dispatcher.combine([experts[i % local](p) for i, p in enumerate(pieces)])


class HashLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.moes = nn.ModuleList(HashMoE(seed) for seed in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x, counts = self.words(ids), torch.arange(1, LENGTH + 1).unsqueeze(-1)
        for mixer, moe in zip(self.mixers, self.moes):
            x = x + mixer(F.rms_norm(x, (WIDTH,)).cumsum(1) / counts)
            h = F.rms_norm(x, (WIDTH,)).flatten(0, 1)
            x = x + moe(h, ids.flatten()).view_as(x)
        return self.head(F.rms_norm(x, (WIDTH,)))


def plain():
    return HashLM()


def parallel(mesh):
    model = HashLM()
    model.moes = nn.ModuleList(ParallelHashMoE(moe, mesh.get_group("ep")) for moe in model.moes)
    return model, mesh.get_group("ep")


def loss(model, text):
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def step(built, text):
    model, group = built
    value = loss(model, text)
    value.backward()
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()
    return value.detach()


generator = torch.Generator().manual_seed(175)
batches = [torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="ep", ranks={"ep": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
