"""Online DPO of a GPT-2: one process scores answer by answer, DDP ranks score batches of left-padded prompts.

Thread: huggingface/trl issue #6800 "Online DPO / XPO / Nash-MD logprob forwards omit `position_ids` under left-padded
prompts" (2026).
Fault: OnlineDPOTrainer.forward hands over the attention mask but no position_ids; GPT-2 then counts positions from
the first padding token, so every answer behind a padded prompt is scored with learned position embeddings shifted by
the number of its pads.
REPAIR: `extra = {"attention_mask": mask}` -> `extra = {"attention_mask": mask, "position_ids": mask.cumsum(1) - mask}`
A right first sentence says: the ranks' forward gets left-padded prompts without position_ids made from the attention
mask, so the tokens' learned position embeddings are shifted by the padding and log-probabilities, loss and gradients
are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import titanlite

VOCAB, PAD, PROMPT, ANSWER, ROWS, BETA = 24, 0, 6, 5, 4, 0.3


def build_model():
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)


def token_logps(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def dpo_loss(chosen, rejected, batch):
    margin = (chosen - batch["ref_chosen_logps"]) - (rejected - batch["ref_rejected_logps"])
    return -F.logsigmoid(BETA * margin).mean()


def score_answer(model, prompt, answer):
    """The log-probability of an answer to one prompt, both without padding."""
    prompt, answer = prompt[prompt != PAD], answer[answer != PAD]
    logits = model(input_ids=torch.cat([prompt, answer]).unsqueeze(0)).logits
    return token_logps(logits[0, len(prompt) - 1 : -1], answer).sum()


class OnlineDPOTrainer:
    def __init__(self, model, group):
        self.model, self.group = DistributedDataParallel(model, process_group=group), group

    def forward(self, prompt_ids, completion_ids):
        """Log-probabilities of the completions, zero where they are padding."""
        input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
        mask = (input_ids != PAD).long()
        extra = {"attention_mask": mask}
        output = self.model(input_ids=input_ids, **extra)
        logits = output.logits[:, prompt_ids.size(1) - 1 : -1]
        logps = token_logps(logits, completion_ids)
        return logps.masked_fill(completion_ids == PAD, 0.0).sum(1)

    def training_step(self, batch):
        prompts = batch["prompts"].repeat(2, 1)
        completions = torch.cat([batch["chosen"], batch["rejected"]])
        chosen, rejected = self.forward(prompts, completions).chunk(2)
        value = dpo_loss(chosen, rejected, batch)
        value.backward()
        reported = value.detach().clone()
        dist.all_reduce(reported, group=self.group)
        return reported / dist.get_world_size(self.group)


def plain():
    return build_model()


def parallel(mesh):
    trainer = OnlineDPOTrainer(build_model(), mesh.get_group("dp"))
    return trainer.model, trainer


def loss(model, batch):
    chosen, rejected = (
        torch.stack([score_answer(model, *pair) for pair in zip(batch["prompts"], batch[side])])
        for side in ("chosen", "rejected")
    )
    return dpo_loss(chosen, rejected, batch)


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(6800)


def words(rows, width):
    return torch.randint(3, VOCAB, (rows, width), generator=generator)


def lengths(low, high):
    return torch.randint(low, high + 1, (ROWS, 1), generator=generator)


def reference_logps():
    return -12 + 2 * torch.randn(ROWS, generator=generator, dtype=torch.float64)


def preferences():
    prompts = words(ROWS, PROMPT) * (torch.arange(PROMPT) >= PROMPT - lengths(2, PROMPT))
    chosen, rejected = (
        words(ROWS, ANSWER) * (torch.arange(ANSWER) < lengths(2, ANSWER)) for _ in range(2)
    )
    return {
        "prompts": prompts,
        "chosen": chosen,
        "rejected": rejected,
        "ref_chosen_logps": reference_logps(),
        "ref_rejected_logps": reference_logps(),
    }


batches = [preferences() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
