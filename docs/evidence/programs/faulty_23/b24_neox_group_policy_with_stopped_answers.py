"""GRPO of a GPT-NeoX with DDP; answers end with EOS or are cut off by a stop rule, and are padded to one width.

Thread: verl-project/verl issue #3805 "[Bug] Padding tokens incorrectly included in response mask when EOS is absent"
(2025): get_response_mask looks for EOS only; a response without one gets a mask of all ones, and its padding enters
the policy loss and the mean over tokens.
Fault: response_mask keeps all positions up to the first EOS, and an answer which a stop rule cut off before its EOS is
kept to the full width, so the log-probabilities of its padding are trained and counted as tokens.
REPAIR: `return (eos.cumsum(1) - eos).eq(0)` -> `return (eos.cumsum(1) - eos).eq(0) & (responses != PAD)`
A right first sentence says: the response mask is made from the position of EOS alone, so answers without EOS have their
padding in the loss and in the number of tokens; loss and gradients differ from those over the real tokens.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import titanlite

VOCAB, PAD, EOS, PROMPT, ANSWER, GROUP, PROMPTS = 26, 0, 1, 4, 8, 4, 4
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def build_model():
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        rotary_pct=0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        initializer_range=0.2,
        bos_token_id=2,
        eos_token_id=EOS,
        pad_token_id=PAD,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return GPTNeoXForCausalLM(config)


def group_advantages(rewards):
    rewards = rewards.view(-1, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def policy_terms(logps, old_logps, advantages):
    ratio = (logps - old_logps).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def token_logps(logits, targets):
    return logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def response_mask(responses):
    """True up to and including the end of each response."""
    eos = (responses == EOS).int()
    return (eos.cumsum(1) - eos).eq(0)


class ActorWorker:
    def __init__(self, model, mesh):
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.actor = DistributedDataParallel(model, process_group=self.group)

    def update_policy(self, batch):
        responses = batch["responses"]
        mask = response_mask(responses)
        tokens = mask.sum()
        dist.all_reduce(tokens, group=self.group)
        input_ids = torch.cat([batch["prompts"], responses], dim=1)
        attention_mask = (input_ids != PAD).long()
        output = self.actor(input_ids=input_ids, attention_mask=attention_mask)
        logps = token_logps(output.logits[:, PROMPT - 1 : -1], responses)
        advantages = group_advantages(batch["rewards"]).unsqueeze(1)
        terms = policy_terms(logps, batch["old_logps"], advantages)
        value = (terms * mask).sum() * self.ranks / tokens
        value.backward()
        reported = value.detach().clone()
        dist.all_reduce(reported, group=self.group)
        return reported / self.ranks


def plain():
    return build_model()


def parallel(mesh):
    worker = ActorWorker(build_model(), mesh["dp"])
    return worker.actor, worker


def loss(model, batch):
    """Answer by answer, without padding."""
    advantages = group_advantages(batch["rewards"])
    total = count = 0
    rows = zip(batch["prompts"], batch["responses"], batch["old_logps"], advantages)
    for prompt, response, old_logps, advantage in rows:
        response = response[response != PAD]
        logits = model(input_ids=torch.cat([prompt, response]).unsqueeze(0)).logits
        logps = token_logps(logits[0, PROMPT - 1 : -1], response)
        total = total + policy_terms(logps, old_logps[: len(response)], advantage).sum()
        count = count + len(response)
    return total / count


def step(built, batch):
    return built[1].update_policy(batch)


generator = torch.Generator().manual_seed(3805)


def answers(rows):
    tokens = torch.randint(2, VOCAB, (rows, ANSWER), generator=generator)
    lengths = torch.randint(2, ANSWER + 1, (rows, 1), generator=generator)
    finished = torch.rand(rows, 1, generator=generator) < 0.6
    place = torch.arange(ANSWER)
    tokens = tokens.masked_fill((place == lengths - 1) & finished, EOS)
    return tokens.masked_fill(place >= lengths, PAD)


def rollouts():
    rows = PROMPTS * GROUP
    prompts = torch.randint(2, VOCAB, (PROMPTS, PROMPT), generator=generator)
    noise = torch.randn(rows, ANSWER, generator=generator, dtype=torch.float64)
    return {
        "prompts": prompts.repeat_interleave(GROUP, dim=0),
        "responses": answers(rows),
        "old_logps": -3.5 + 0.3 * noise,
        "rewards": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
