"""A PPO actor update of a Qwen2 with FSDP2: padding is removed, a rank's sequences form a single row of tokens.

Thread: verl-project/verl issue #6475 "[Bug][P0] Cross-sequence `torch.roll` corrupts log_prob at batch boundaries in
`log_probs_from_logits_response_rmpad`" (2026): the labels of the flat row come from torch.roll, so that the last token
of each sequence gets the first token of the next one as its label.
Correct: those log-probabilities are computed, but nobody uses them. Put back into rows, the last real token stands
either in the last column, which the slice of the responses leaves out, or before a padded place of its response, which
the mask takes out; its gradient is zero. The entropy needs no labels. The row has no attention mask: Qwen2 finds the
borders by the positions, which start again at each sequence. The terms are sums over unequally many tokens, divided by
the count of all ranks and multiplied by their number, as FSDP2 averages.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

import titanlite

VOCAB, PAD, PROMPT, ANSWER, ROWS = 28, 0, 5, 7, 6
CLIP, KL_WEIGHT, ENTROPY_WEIGHT, TEMPERATURE = 0.2, 0.05, 0.01, 0.8


def build_model():
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def token_logps(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits):
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def actor_terms(logps, entropy, old_logps, ref_logps, advantages):
    ratio = (logps - old_logps).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    difference = ref_logps - logps
    kl = difference.exp() - difference - 1
    return policy + KL_WEIGHT * kl - ENTROPY_WEIGHT * entropy


class Actor:
    def __init__(self, module, mesh):
        self.module, self.group, self.ranks = module, mesh.get_group(), mesh.size()

    def forward_without_padding(self, input_ids):
        """Log-probabilities and entropies of the responses, as rows."""
        mask = input_ids != PAD
        position_ids = (mask.cumsum(1) - 1)[mask].unsqueeze(0)
        tokens = input_ids[mask]
        logits = self.module(input_ids=tokens.unsqueeze(0), position_ids=position_ids).logits[0]
        logits = logits / TEMPERATURE
        labels = torch.roll(tokens, shifts=-1, dims=0)
        values = token_logps(logits, labels), entropy_from_logits(logits)
        rows = (value.new_zeros(mask.shape).masked_scatter(mask, value) for value in values)
        return [value[:, -ANSWER - 1 : -1] for value in rows]

    def update_policy(self, batch):
        responses = batch["responses"]
        response_mask = responses != PAD
        count = response_mask.sum()
        dist.all_reduce(count, group=self.group)
        logps, entropy = self.forward_without_padding(torch.cat([batch["prompts"], responses], 1))
        terms = actor_terms(
            logps, entropy, batch["old_logps"], batch["ref_logps"], batch["advantages"]
        )
        value = terms[response_mask].sum() * self.ranks / count
        value.backward()
        reported = value.detach().clone()
        dist.all_reduce(reported, group=self.group)
        return reported / self.ranks


def plain():
    return build_model()


def parallel(mesh):
    module = build_model()
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return module, Actor(module, mesh["dp"])


def loss(model, batch):
    """Sequence by sequence."""
    total = count = 0
    for i, (prompt, response) in enumerate(zip(batch["prompts"], batch["responses"])):
        prompt, response = prompt[prompt != PAD], response[response != PAD]
        logits = model(input_ids=torch.cat([prompt, response]).unsqueeze(0)).logits[0]
        logits = logits[len(prompt) - 1 : -1] / TEMPERATURE
        given = (batch[key][i, : len(response)] for key in ("old_logps", "ref_logps", "advantages"))
        terms = actor_terms(token_logps(logits, response), entropy_from_logits(logits), *given)
        total, count = total + terms.sum(), count + len(response)
    return total / count


def step(built, batch):
    return built[1].update_policy(batch)


generator = torch.Generator().manual_seed(6475)


def words(width):
    return torch.randint(1, VOCAB, (ROWS, width), generator=generator)


def lengths(low, high):
    return torch.randint(low, high + 1, (ROWS, 1), generator=generator)


def noise():
    return torch.randn(ROWS, ANSWER, generator=generator, dtype=torch.float64)


def rollouts():
    return {
        "prompts": words(PROMPT) * (torch.arange(PROMPT) >= PROMPT - lengths(2, PROMPT)),
        "responses": words(ANSWER) * (torch.arange(ANSWER) < lengths(2, ANSWER)),
        "old_logps": -3.5 + 0.3 * noise(),
        "ref_logps": -3.5 + 0.3 * noise(),
        "advantages": noise(),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
