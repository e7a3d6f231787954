"""Preference optimization in a torch pipeline: all chosen answers, then all rejected ones, in one batch.

Thread: of the kind alibaba/ChatLearn issue #143 "[QUESTION] why do we need a `dpo_train_step`?" (2024): "We concat chosen_ids
and reject_ids first, which doubles micro_batch_size for forwarding", with pipeline parallelism.
Fault: join concatenates the whole batch's answers, and the schedule cuts the result into microbatches by rows, so the
halves of a microbatch that the loss takes for chosen and rejected are both chosen, or both rejected.
REPAIR: `torch.cat([chosen, rejected])` -> `torch.cat([t for pair in zip(chosen.chunk(MICRO), rejected.chunk(MICRO)) for t in pair])`
Expected: the loss is wrong in step 1 and so are all gradients on both stages, while the model's outputs per row agree: the
microbatches of the schedule do not contain pairs (the first has chosen answers only, the second rejected ones only), since
the batch is [chosen; rejected] and is cut by rows.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import logsigmoid

import titanlite

VOCAB, DIM, BETA, GAMMA, MICRO = 13, 8, 2.0, 0.5, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        past = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.down(torch.relu(self.up(x)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.block0, self.block1 = Block(), Block()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.head(self.block1(self.block0(self.embed(tokens))))


class First(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.embed, self.block0 = policy.embed, policy.block0

    def forward(self, tokens):
        return self.block0(self.embed(tokens))


class Last(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.block1, self.head = policy.block1, policy.head

    def forward(self, x):
        return self.head(self.block1(x))


def simpo(logits, tokens):
    """SimPO's loss; the first half of the rows are chosen answers, the second half the rejected ones."""
    logps = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].mean(1)
    chosen, rejected = logps.chunk(2)
    return -logsigmoid(BETA * (chosen - rejected) - GAMMA).mean()


def loss(model, batch):
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    return simpo(model(tokens), tokens)


def join(chosen, rejected):
    return torch.cat([chosen, rejected])


def parallel(mesh):
    index = mesh.get_local_rank("pp")
    module = (First, Last)[index](Policy())
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, ScheduleGPipe(stage, MICRO, loss_fn=simpo)


def step(built, batch):
    module, schedule = built
    tokens = join(batch["chosen"], batch["rejected"])
    if isinstance(module, First):
        schedule.step(tokens)
        return None
    losses = []
    schedule.step(target=tokens, losses=losses)
    return torch.stack(losses).mean()


rng = torch.Generator().manual_seed(316)


def draw():
    prompt = torch.randint(VOCAB, (4, 2), generator=rng)
    answers = torch.randint(VOCAB, (2, 4, 4), generator=rng)
    chosen, rejected = (torch.cat([prompt, answer], 1) for answer in answers)
    return {"chosen": chosen, "rejected": rejected}


batches = [draw() for _ in range(3)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
