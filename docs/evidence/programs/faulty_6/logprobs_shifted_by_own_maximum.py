"""DPO with a column-parallel head: the log-probabilities subtract the maximum of the rank's own vocabulary shard.

Thread: https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/394 "Question about the implementation of
mpu.cross_entropy when using tensor parallel" (another loss than torch's: partition vocabulary), 2023-08-03.
Wrong: the sums of exponentials are all-reduced, though each rank has subtracted another maximum; so has the rank that
owns the label. The maximum has to be all-reduced first.
EXPECT: the loss and all gradients differ from step 1 on, while all modules agree in the forward pass (the local logits
of lm_head too): the log-probabilities in the loss (VocabParallelLogps) subtract each rank's own maximum of the logits,
which is not all-reduced (MAX) over tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid

import titanlite

VOCAB, DIM, SEQ, BETA = 16, 12, 6, 0.5


class CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class VocabParallelLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group):
        size = logits.shape[-1]
        logits = logits - logits.amax(-1, keepdim=True)
        local = labels - group.rank() * size
        inside = (local >= 0) & (local < size)
        local = local.clamp(0, size - 1).unsqueeze(-1)
        predicted = logits.gather(-1, local).squeeze(-1) * inside
        dist.all_reduce(predicted, group=group)
        exp = logits.exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exp / total.unsqueeze(-1), local, inside)
        return predicted - total.log()

    @staticmethod
    def backward(ctx, grad):
        softmax, local, inside = ctx.saved_tensors
        grad_logits = -softmax
        grad_logits.scatter_add_(-1, local, inside.unsqueeze(-1).to(softmax.dtype))
        return grad_logits * grad.unsqueeze(-1), None, None


class Policy(nn.Module):
    tp_group = None

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.rnn = nn.LSTM(DIM, DIM, batch_first=True)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.norm(self.rnn(self.embed(tokens))[0])
        return self.lm_head(x if self.tp_group is None else CopyToTp.apply(x, self.tp_group))

    def logps(self, tokens, labels):
        logits = 3 * self(tokens)
        if self.tp_group is not None:
            return VocabParallelLogps.apply(logits, labels, self.tp_group)
        return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def loss(policy, batch):
    chosen = policy.logps(batch["chosen"][:, :-1], batch["chosen"][:, 1:]).sum(-1)
    rejected = policy.logps(batch["rejected"][:, :-1], batch["rejected"][:, 1:]).sum(-1)
    margin = (chosen - batch["ref_chosen"]) - (rejected - batch["ref_rejected"])
    return -logsigmoid(BETA * margin).mean()


def shard(name):
    return (0, "tp") if name == "lm_head.weight" else None


def parallel(mesh):
    policy = Policy()
    policy.tp_group = group = mesh.get_group("tp")
    weight = policy.lm_head.weight
    weight.data = weight.data.chunk(group.size())[group.rank()].clone()
    return policy


def draw(generator):
    pairs = {n: torch.randint(VOCAB, (4, SEQ), generator=generator) for n in ("chosen", "rejected")}
    refs = {n: -14 + torch.randn(4, generator=generator) for n in ("ref_chosen", "ref_rejected")}
    return pairs | refs


generator = torch.Generator().manual_seed(394)
batches = [draw(generator) for _ in range(3)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
