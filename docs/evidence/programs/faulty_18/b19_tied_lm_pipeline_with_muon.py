"""A language model with tied embeddings in a pipeline, its matrices trained by Muon and its embeddings, norms and biases by Adam.

Thread: NVIDIA/Megatron-LM issue #4641 "Muon + PP + MTP: tied word_embeddings on MTP-only last PP stage is routed to Muon
instead of Adam" (2026): the mark of embedding parameters is set on the first stage only; the two copies get different updates.
Fault: Decoder marks its embeddings for Adam only where pre_process is true; on the last stage the tied copy of the word
embedding is an ordinary matrix, gets Muon's orthogonalized update and drifts away from the first stage's copy.
REPAIR: `embeddings = [self.wte, self.wpe] if pre_process else []` -> `embeddings = [m for m in (self.wte, self.wpe) if m]`
A right first sentence says: the last stage's copy of the tied word embedding isn't marked and is therefore updated by Muon,
while the first stage's is updated by Adam, so the copies get different updates from the same gradient.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, ROWS, MICROBATCHES = 20, 12, 2, 8, 4, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc_1, self.fc_2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_2(F.gelu(self.fc_1(self.ln_2(x))))


class Decoder(nn.Module):
    """One stage of the model, by default the only one; the head is the word embedding."""

    def __init__(self, stage=0, stages=1):
        super().__init__()
        pre_process, post_process = stage == 0, stage == stages - 1
        per_stage = LAYERS // stages
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        self.pre_process, self.post_process = pre_process, post_process
        self.wte = nn.Embedding(VOCAB, WIDTH) if pre_process or post_process else None
        self.wpe = nn.Embedding(LENGTH, WIDTH) if pre_process else None
        self.h = nn.ModuleDict({str(i): Block() for i in layers})
        self.ln_f = nn.LayerNorm(WIDTH) if post_process else None
        embeddings = [self.wte, self.wpe] if pre_process else []
        for embedding in embeddings:
            nn.init.normal_(embedding.weight, std=0.3)
            embedding.weight.is_embedding = True

    def forward(self, x):
        if self.pre_process:
            x = self.wte(x) + self.wpe.weight
        for block in self.h.values():
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight) if self.post_process else x


def orthogonalized(matrix, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    wide = x if x.size(0) <= x.size(1) else x.T
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.size(0) <= x.size(1) else wide.T


class Muon(torch.optim.Optimizer):
    """Muon for the matrices, Adam for all that is marked as an embedding or isn't a matrix."""

    def __init__(self, parameters, lr=0.01, adam_lr=2e-3, momentum=0.95, betas=(0.9, 0.95)):
        parameters = list(parameters)
        adam = [p for p in parameters if p.ndim != 2 or getattr(p, "is_embedding", False)]
        muon = [p for p in parameters if not any(p is other for other in adam)]
        groups = [dict(params=muon, lr=lr, muon=True), dict(params=adam, lr=adam_lr, muon=False)]
        super().__init__([g for g in groups if g["params"]], dict(momentum=momentum, betas=betas))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            update = self.muon if group["muon"] else self.adam
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(update(p, self.state[p], group), alpha=-group["lr"])

    def muon(self, p, state, group):
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        buffer.lerp_(p.grad, 1 - group["momentum"])
        scale = max(1, p.size(0) / p.size(1)) ** 0.5
        return scale * orthogonalized(p.grad.lerp(buffer, group["momentum"]))

    def adam(self, p, state, group):
        (b1, b2), state["step"] = group["betas"], state.get("step", 0) + 1
        first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 1 - b1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad**2, 1 - b2)
        first, second = first / (1 - b1 ** state["step"]), second / (1 - b2 ** state["step"])
        return first / (second.sqrt() + 1e-8)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pipeline:
    def __init__(self, model, rank, stages, group):
        self.model, self.rank, self.stages, self.group = model, rank, stages, group
        stage = PipelineStage(model, rank, stages, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy)

    def step(self, tokens, labels):
        losses = []
        if self.rank == 0:
            self.schedule.step(tokens)
        else:
            self.schedule.step(target=labels, losses=losses)
        dist.all_reduce(self.model.wte.weight.grad, group=self.group)
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(value, self.stages - 1, group=self.group)
        return value


def plain():
    return Decoder()


def parallel(mesh):
    rank, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    model = Decoder(rank, stages)
    return model, Pipeline(model, rank, stages, mesh.get_group("pp"))


def loss(model, batch):
    return cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def step(built, batch):
    return built[1].step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())


generator = torch.Generator().manual_seed(4641)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, ranks={"pp": 2}, optimizer=Muon, copy_weights=True
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
