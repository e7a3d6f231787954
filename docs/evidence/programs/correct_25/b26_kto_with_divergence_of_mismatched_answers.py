"""KTO in the manner of trl: answers that are good or bad by themselves, against a divergence taken over all ranks.

Thread: huggingface/trl issue #1911 "Minor KTO mis-estimation of KL term on odd batch sizes" (2024): the prompts are
paired with the answers of other rows, and the mean log ratio of these pairs, gathered and cut off below zero, is the
reference point of the loss.
Correct: the pairs are made for the whole batch before it is dealt out, in a circle, so they don't depend on the ranks.
The divergence has no gradient: DDP runs once more under no_grad for it, before the pass that counts. A rank may have
good answers only; then the tensor of its bad ones is empty. The mean is over the two kinds together, as many rows on
each rank. The reference model is a frozen deep copy of the policy outside DDP, and its weights stay as they were drawn.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import titanlite

VOCAB, PROMPT, ANSWER, ROWS, BETA = 36, 4, 6, 12, 0.3
DESIRABLE, UNDESIRABLE = 1.0, 1.4


class PolicyAndReference(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=16,
            rotary_pct=0.5,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.policy = GPTNeoXForCausalLM(config)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False).eval()


def answer_logps(model, prompts, answers, mask):
    tokens = torch.cat([prompts, answers], dim=1)
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
    return (logps * mask).sum(-1)


def mean_over_ranks(value, group):
    """Accelerator.gather(value).mean()"""
    if group is None:
        return value.mean()
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value, group=group)
    return torch.cat(parts).mean()


def kto_loss(model, batch, group=None):
    policy, reference = model.policy, model.reference
    matched = batch["prompts"], batch["answers"], batch["mask"]
    mismatched = batch["prompts"], batch["other_answers"], batch["other_mask"]
    with torch.no_grad():
        ratios = answer_logps(policy, *mismatched) - answer_logps(reference, *mismatched)
        kl = mean_over_ranks(ratios, group).clamp(min=0)
        reference_logps = answer_logps(reference, *matched)
    logratios = answer_logps(policy, *matched) - reference_logps
    good, bad = logratios[batch["label"]], logratios[~batch["label"]]
    chosen = 1 - F.sigmoid(BETA * (good - kl))
    rejected = 1 - F.sigmoid(BETA * (kl - bad))
    return torch.cat([DESIRABLE * chosen, UNDESIRABLE * rejected]).nanmean()


def plain():
    return PolicyAndReference()


def parallel(mesh):
    model, group = PolicyAndReference(), mesh.get_group("dp")
    model.policy = DistributedDataParallel(model.policy, process_group=group)
    return model, group


def loss(model, batch):
    return kto_loss(model, batch)


def step(built, part):
    value = kto_loss(*built[:1], part, built[1])
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(1911)


def feedback(good):
    prompts = torch.randint(0, VOCAB, (ROWS, PROMPT), generator=generator)
    answers = torch.randint(0, VOCAB, (ROWS, ANSWER), generator=generator)
    lengths = torch.randint(2, ANSWER + 1, (ROWS, 1), generator=generator)
    mask = torch.arange(ANSWER) < lengths
    return {
        "prompts": prompts,
        "answers": answers,
        "mask": mask,
        "other_answers": answers.roll(-1, 0),
        "other_mask": mask.roll(-1, 0),
        "label": torch.arange(ROWS) < good,  # some ranks get answers of one kind
    }


batches = [feedback(good) for good in (6, 8, 3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
