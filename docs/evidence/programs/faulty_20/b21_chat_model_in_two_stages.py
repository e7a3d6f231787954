"""Instruction tuning of a small decoder, cut into two pipeline stages (1F1B) with two data parallel copies of the pipeline.

Thread: pytorch/torchtitan issue #2972 "PP and non-PP produce differently scaled gradients" (2026): the schedule runs backward on
the summed loss; the division by the global number of valid tokens comes after the step and reaches the reported loss alone.
Fault: ChatPipeline's schedule starts each backward pass at the sum over the micro-batch's answer tokens and doesn't scale the
gradients; train_step divides only the value that it returns by the batch's answer tokens.
REPAIR: `dist.all_reduce(parameter.grad, group=self.dp)` -> `dist.all_reduce(parameter.grad.div_(valid), group=self.dp)`
A right first sentence says: in the pipeline the backward pass starts from the summed token loss, not divided by the global
number of answer tokens, so all gradients are too large by that number although the reported loss is right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, MICROBATCHES, IGNORE = 19, 16, 2, 9, 4, 2, -100


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.wqkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.w2(F.silu(self.w1(self.norm_2(x))))


class ChatModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def keep_stage(self, stage, stages):
        """Drops all that the other stages compute."""
        own = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        for i in set(range(LAYERS)) - set(own):
            del self.layers[str(i)]
        if stage > 0:
            self.words = self.places = None
        if stage < stages - 1:
            self.norm = self.head = None
        return self

    def forward(self, x):
        if self.words is not None:
            x = self.words(x) + self.places.weight
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def summed_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class ChatPipeline:
    def __init__(self, module, mesh):
        self.module, self.dp, self.pp = module, mesh.get_group("dp"), mesh.get_group("pp")
        self.stage, self.stages = mesh.get_local_rank("pp"), mesh["pp"].size()
        device = torch.device("cpu")
        stage = PipelineStage(module, self.stage, self.stages, device, group=self.pp)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=summed_loss, scale_grads=False)

    def train_step(self, tokens, labels):
        valid, losses = (labels != IGNORE).sum(), []
        dist.all_reduce(valid, group=self.dp)
        if self.stage == 0:
            self.schedule.step(tokens)
        else:
            self.schedule.step(target=labels, losses=losses)
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.dp)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(total, group=self.dp)
        dist.broadcast(total, group=self.pp, group_src=self.stages - 1)
        return total / valid


def plain():
    return ChatModel()


def parallel(mesh):
    module = ChatModel().keep_stage(mesh.get_local_rank("pp"), mesh["pp"].size())
    return module, ChatPipeline(module, mesh)


def loss(model, batch):
    tokens, labels = batch
    return summed_loss(model(tokens), labels) / (labels != IGNORE).sum()


def step(built, batch):
    return built[1].train_step(*batch)


generator = torch.Generator().manual_seed(2972)


def conversations(rows=8):
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    prompt = torch.randint(1, LENGTH - 1, (rows, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, IGNORE)
    return text[:, :-1].contiguous(), labels.contiguous()


batches = [conversations() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2, "pp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
