"""A language model with a head for the token after the next in a hand-written pipeline; its loss rides on the backward pass.

Thread: ISEEKYAN/Megatron-LM pull request #56 "scale MTP aux-loss gradient via pre_forward_hook" (2026; also #57): no hook sets
MTPLossAutoScaler.main_loss_backward_scale, so it stays 1.0 while the main loss is divided by the number of micro-batches.
Fault: Runtime has no pre_forward_hooks, so AuxiliaryLoss.scale keeps its default of 1.0; every micro-batch adds the whole
gradient of its multi-token prediction loss, while that of the main loss is divided by MICROBATCHES. The reported loss is right.
REPAIR: `self.pre_forward_hooks = []` -> `self.pre_forward_hooks = [lambda: AuxiliaryLoss.set_scale(1 / MICROBATCHES)]`
A right first sentence says: the gradient of the auxiliary multi-token prediction loss isn't scaled by one over the number of
micro-batches as the main loss is, so it is too large by the number of micro-batches.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS = 23, 12, 2, 8, 4
ROWS, MICROBATCHES, MTP_WEIGHT = 8, 4, 0.3


class AuxiliaryLoss(torch.autograd.Function):
    """Passes the hidden states on; the loss joins their backward pass."""

    scale = 1.0

    @classmethod
    def set_scale(cls, scale):
        cls.scale = scale

    @staticmethod
    def forward(ctx, hidden, loss):
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, AuxiliaryLoss.scale)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """All layers or those of a stage; the embedding is on the first, the heads are on the last."""

    def __init__(self, stage=0, stages=1):
        super().__init__()
        words, places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        blocks = [Block() for _ in range(LAYERS)]
        first, last = LAYERS * stage // stages, LAYERS * (stage + 1) // stages
        self.words, self.places = (words, places) if stage == 0 else (None, None)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in range(first, last)})
        mtp, norm, head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        heads = (mtp, norm, head) if last == LAYERS else (None, None, None)
        self.mtp, self.norm, self.head = heads

    def hidden(self, x):
        if self.words is not None:
            x = self.words(x) + self.places.weight
        for block in self.blocks.values():
            x = block(x)
        return x

    def cross_entropy(self, hidden, labels):
        return F.cross_entropy(self.head(self.norm(hidden)).mT, labels)

    def mtp_loss(self, hidden, later):
        return MTP_WEIGHT * self.cross_entropy(self.mtp(hidden), later)


class Runtime:
    """All micro-batches forward, then all backward; the stages talk to their neighbours."""

    def __init__(self, model, group):
        self.model, self.group, self.stage = model, group, dist.get_rank(group)
        ranks = dist.get_process_group_ranks(group)
        self.previous, self.following = ranks[self.stage - 1], ranks[(self.stage + 1) % len(ranks)]
        self.last_rank, self.last = ranks[-1], self.stage == len(ranks) - 1
        self.pre_forward_hooks = []

    def forward_step(self, batch):
        tokens, labels, later = batch
        source = tokens
        if self.stage > 0:
            source = torch.empty(*tokens.shape, WIDTH, dtype=torch.get_default_dtype())
            dist.recv(source, self.previous, group=self.group)
            source.requires_grad_()
        result, reported = self.model.hidden(source), None
        if self.last:
            auxiliary = self.model.mtp_loss(result, later)
            main = self.model.cross_entropy(AuxiliaryLoss.apply(result, auxiliary), labels)
            result, reported = main / MICROBATCHES, (main + auxiliary).detach() / MICROBATCHES
        else:
            dist.send(result.detach(), self.following, group=self.group)
        return source, result, reported

    def backward_step(self, source, result):
        if self.last:
            result.backward()
        else:
            grad = torch.empty_like(result)
            dist.recv(grad, self.following, group=self.group)
            result.backward(grad)
        if self.stage > 0:
            dist.send(source.grad, self.previous, group=self.group)

    def train_step(self, batch):
        for hook in self.pre_forward_hooks:
            hook()
        steps = [self.forward_step(part) for part in zip(*(x.chunk(MICROBATCHES) for x in batch))]
        for source, result, _ in steps:
            self.backward_step(source, result)
        value = sum(reported for *_, reported in steps) if self.last else torch.zeros(())
        dist.broadcast(value, self.last_rank, group=self.group)
        return value


def plain():
    return Model()


def parallel(mesh):
    model = Model(mesh.get_local_rank("pp"), mesh["pp"].size())
    return model, Runtime(model, mesh.get_group("pp"))


def loss(model, batch):
    hidden, (_, labels, later) = model.hidden(batch[0]), batch
    return model.cross_entropy(hidden, labels) + model.mtp_loss(hidden, later)


def step(built, batch):
    return built[1].train_step(batch)


generator = torch.Generator().manual_seed(57)


def texts():
    text = torch.randint(0, VOCAB, (ROWS, LENGTH + 2), generator=generator)
    return text[:, :-2].contiguous(), text[:, 1:-1].contiguous(), text[:, 2:].contiguous()


batches = [texts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
