"""A value critic of robot observations and instructions on a Gemma3 backbone, in two stages of a GPipe schedule.

Thread: RLinf/RLinf pull request #1098 "fix(embodied): avoid double scaling Gemma3 embeddings" (2026), the same in
TensorAuto/OpenTau pull request #179: Gemma3's embed_tokens multiplies by the square root of the hidden size itself,
and code carried over from the first Gemma does it once more.
Fault: FirstStage.embed_prefix multiplies what embed_tokens returns by sqrt(hidden size) again, so the words of the
instruction come in as many times too large beside the observations; in one process Gemma3 scales them once.
REPAIR: `words = self.gemma.embed_tokens(tokens) * math.sqrt(WIDTH)` -> `words = self.gemma.embed_tokens(tokens)`
A right first sentence says: the first pipeline stage scales the word embeddings by sqrt(hidden_size) a second time,
since Gemma3's scaled word embedding has done so; values, loss and gradients of all stages are wrong from there on.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from transformers import Gemma3TextConfig, Gemma3TextModel

import titanlite

VOCAB, WIDTH, SENSORS, FRAMES, WORDS, ROWS, LAYERS, MICROBATCHES = 22, 16, 5, 4, 6, 8, 4, 4


class ValueCritic(nn.Module):
    """The backbone is tuned except for its norms; the value is read at the last word."""

    def __init__(self):
        super().__init__()
        config = Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            query_pre_attn_scalar=4,
            max_position_embeddings=32,
            layer_types=["full_attention"] * LAYERS,
            initializer_range=0.2,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.observations = nn.Linear(SENSORS, WIDTH)
        self.gemma = Gemma3TextModel(config)
        self.value = nn.Linear(WIDTH, 1)
        for name, parameter in self.gemma.named_parameters():
            parameter.requires_grad_("norm" not in name)

    def forward(self, frames, tokens):
        words = self.gemma.embed_tokens(tokens)
        prefix = torch.cat([self.observations(frames), words], dim=1)
        hidden = self.gemma(inputs_embeds=prefix).last_hidden_state
        return self.value(hidden[:, -1]).squeeze(-1)


class CriticStage(ValueCritic):
    """The layers begin, begin + 1, ..., end - 1; what belongs to other stages is taken out."""

    def __init__(self, stage, stages):
        super().__init__()
        per_stage = LAYERS // stages
        self.begin, self.end = stage * per_stage, (stage + 1) * per_stage
        for i in range(LAYERS):
            if not self.begin <= i < self.end:
                self.gemma.layers[i] = nn.Identity()

    def run_layers(self, hidden):
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotary = self.gemma.rotary_emb(hidden, positions, "full_attention")
        for layer in self.gemma.layers[self.begin : self.end]:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        return hidden


class FirstStage(CriticStage):
    def __init__(self, stage, stages):
        super().__init__(stage, stages)
        del self.gemma.norm, self.value

    def embed_prefix(self, frames, tokens):
        words = self.gemma.embed_tokens(tokens) * math.sqrt(WIDTH)
        return torch.cat([self.observations(frames), words], dim=1)

    def forward(self, frames, tokens):
        return self.run_layers(self.embed_prefix(frames, tokens))


class LastStage(CriticStage):
    def __init__(self, stage, stages):
        super().__init__(stage, stages)
        del self.observations, self.gemma.embed_tokens

    def forward(self, hidden):
        hidden = self.gemma.norm(self.run_layers(hidden))
        return self.value(hidden[:, -1]).squeeze(-1)


class PipelineTrainer:
    def __init__(self, model, mesh):
        self.group, rank, stages = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.last = rank == stages - 1
        stage = PipelineStage(model, rank, stages, torch.device("cpu"), group=self.group)
        self.schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=F.mse_loss)

    def step(self, frames, tokens, returns):
        value = torch.zeros(())
        if self.last:
            losses = []
            self.schedule.step(target=returns, losses=losses)
            value = torch.stack(losses).mean().detach()
        else:
            self.schedule.step(frames, tokens)
        dist.all_reduce(value, group=self.group)
        return value


def plain():
    return ValueCritic()


def parallel(mesh):
    rank, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    model = (FirstStage if rank == 0 else LastStage)(rank, stages)
    return model, PipelineTrainer(model, mesh["pp"])


def loss(model, batch):
    frames, tokens, returns = batch
    return F.mse_loss(model(frames, tokens), returns)


def step(built, batch):
    return built[1].step(*batch)


generator = torch.Generator().manual_seed(1098)


def rollouts():
    frames = torch.randn(ROWS, FRAMES, SENSORS, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, VOCAB, (ROWS, WORDS), generator=generator)
    returns = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return frames, tokens, returns


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
