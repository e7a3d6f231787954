"""DPO of a Llama with LoRA adapters under DDP, whose reference model is the policy with its adapters off.

Might be accused because: the reference's log-probabilities come from the model in training and from model.module,
past DDP; most parameters are frozen and get no gradient at all; the ranks trim their answers to different lengths;
the term of the chosen answers' likelihood is divided by a count of all ranks and then multiplied by the number of
ranks, the DPO term isn't.
Correct because: without adapters the model is its frozen base, which never changes, and no gradient flows there. The
DPO term is a mean over equally many pairs on each rank, which DDP's average makes the global mean; the likelihood is
a sum over unequally many tokens, divided by the global count, so that the average over the ranks has to be undone.
Trimmed columns hold padding alone, at the right, where causal attention from real tokens never looks.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import titanlite

VOCAB, PAD, PROMPT, ANSWER, PAIRS = 24, 0, 4, 8, 6
RANK, SCALE, BETA, NLL_WEIGHT = 3, 2.0, 0.4, 0.2


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.enabled = base.requires_grad_(False), True
        self.lora_a = nn.Parameter(0.3 * torch.randn(RANK, base.in_features))
        self.lora_b = nn.Parameter(0.1 * torch.randn(base.out_features, RANK))

    def forward(self, x):
        y = self.base(x)
        return y + SCALE * (x @ self.lora_a.T) @ self.lora_b.T if self.enabled else y


def build_model():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj)
        layer.mlp.down_proj = LoraLinear(layer.mlp.down_proj)
    return model


@contextmanager
def adapters_disabled(model):
    adapters = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def answer_logps(model, tokens):
    """Log-probabilities of the answers' tokens; zeros at padding."""
    logits = model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[
        :, PROMPT - 1 : -1
    ]
    targets = tokens[:, PROMPT:]
    logps = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logps.masked_fill(targets == PAD, 0.0)


def dpo_term(policy, reference):
    chosen, rejected = (policy - reference).sum(1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def trim(tokens):
    return tokens[:, : int((tokens != PAD).sum(1).max())]


class DPOTrainer:
    def __init__(self, model, mesh):
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.model = DistributedDataParallel(model, process_group=self.group)

    def training_step(self, batch):
        tokens = trim(torch.cat([batch["chosen"], batch["rejected"]]))
        with torch.no_grad(), adapters_disabled(self.model.module):
            reference = answer_logps(self.model.module, tokens)
        policy = answer_logps(self.model, tokens)
        count = (batch["chosen"][:, PROMPT:] != PAD).sum()
        dist.all_reduce(count, group=self.group)
        nll = -policy.chunk(2)[0].sum() / count * self.ranks
        value = dpo_term(policy, reference) + NLL_WEIGHT * nll
        value.backward()
        reported = value.detach().clone()
        dist.all_reduce(reported, group=self.group)
        return reported / self.ranks


def plain():
    return build_model()


def parallel(mesh):
    trainer = DPOTrainer(build_model(), mesh["dp"])
    return trainer.model, trainer


def loss(model, batch):
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    with torch.no_grad(), adapters_disabled(model):
        reference = answer_logps(model, tokens)
    policy = answer_logps(model, tokens)
    nll = -policy.chunk(2)[0].sum() / (batch["chosen"][:, PROMPT:] != PAD).sum()
    return dpo_term(policy, reference) + NLL_WEIGHT * nll


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(2456)


def answers(prompts):
    lengths = torch.randint(2, ANSWER + 1, (PAIRS, 1), generator=generator)
    answer = torch.randint(1, VOCAB, (PAIRS, ANSWER), generator=generator)
    return torch.cat([prompts, answer * (torch.arange(ANSWER) < lengths)], dim=1)


def pairs():
    prompts = torch.randint(1, VOCAB, (PAIRS, PROMPT), generator=generator)
    return {"chosen": answers(prompts), "rejected": answers(prompts)}


batches = [pairs() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
