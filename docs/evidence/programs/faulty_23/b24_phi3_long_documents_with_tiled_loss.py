"""Tuning of a Phi-3 on long documents under DDP, with logits and loss computed in tiles of the sequence.

Thread: deepspeedai/DeepSpeed pull request #8587 "Remove the older TiledLoss and UlyssesSPFwdLossBwdWithLogits" (2026):
TiledLoss returned "a loss whose gradient is not the derivative of that loss": the forward pass takes the average of
the shards' means weighted by tokens, the backward pass divides each shard's own mean by the number of shards.
Fault: TiledLoss.backward weights each tile's mean with 1 / tiles, though tiles hold different numbers of labels and
forward has weighted them with their counts; the reported loss is right, the gradient is not.
REPAIR: `weight = grad / ctx.tiles` -> `weight = grad * ctx.counts[i] / sum(ctx.counts)`
A right first sentence says: the custom backward pass of the tiled loss averages the tiles' mean losses with equal
weights while the forward pass weights them by valid tokens, so loss values agree but all gradients are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Phi3Config, Phi3ForCausalLM

import titanlite

VOCAB, LENGTH, ROWS, TILES, IGNORED = 28, 12, 4, 3, -100


def build_model():
    config = Phi3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        original_max_position_embeddings=32,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Phi3ForCausalLM(config)


def mean_loss(hidden, weight, labels):
    logits = hidden @ weight.T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class TiledLoss(torch.autograd.Function):
    """The mean cross-entropy; logits exist one tile at a time, in both passes."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, tiles):
        ctx.save_for_backward(hidden, weight, labels)
        ctx.tiles, ctx.counts, total = tiles, [], torch.zeros((), dtype=hidden.dtype)
        for part, targets in zip(hidden.chunk(tiles, dim=1), labels.chunk(tiles, dim=1)):
            ctx.counts.append(int((targets != IGNORED).sum()))
            if ctx.counts[-1] > 0:
                total += mean_loss(part, weight, targets) * ctx.counts[-1]
        return total / sum(ctx.counts)

    @staticmethod
    def backward(ctx, grad):
        hidden, head, labels = ctx.saved_tensors
        hidden_grads, head_grad = [], torch.zeros_like(head)
        parts = zip(hidden.chunk(ctx.tiles, dim=1), labels.chunk(ctx.tiles, dim=1))
        for i, (part, targets) in enumerate(parts):
            if ctx.counts[i] == 0:
                hidden_grads.append(torch.zeros_like(part))
                continue
            weight = grad / ctx.tiles
            with torch.enable_grad():
                part, leaf = part.detach().requires_grad_(), head.detach().requires_grad_()
                value = mean_loss(part, leaf, targets)
            part_grad, leaf_grad = torch.autograd.grad(value, (part, leaf), weight)
            hidden_grads.append(part_grad)
            head_grad += leaf_grad
        return torch.cat(hidden_grads, dim=1), head_grad, None, None


class LongContextTrainer:
    def __init__(self, model, mesh):
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.model = DistributedDataParallel(model, process_group=self.group)

    def training_step(self, batch):
        lm, labels = self.model.module, batch["labels"]
        own = (labels != IGNORED).sum()
        total = own.clone()
        dist.all_reduce(total, group=self.group)
        ids = batch["input_ids"]
        output = self.model(input_ids=ids, output_hidden_states=True, logits_to_keep=1)
        value = TiledLoss.apply(output.hidden_states[-1], lm.lm_head.weight, labels, TILES)
        value = value * own * self.ranks / total
        value.backward()
        reported = value.detach().clone()
        dist.all_reduce(reported, group=self.group)
        return reported / self.ranks


def plain():
    return build_model()


def parallel(mesh):
    trainer = LongContextTrainer(build_model(), mesh["dp"])
    return trainer.model, trainer


def loss(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(8587)


def documents():
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    share = torch.linspace(0.2, 0.9, LENGTH, dtype=torch.float64)
    answered = torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64) < share
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(~answered, IGNORED)}


batches = [documents() for _ in range(3)]

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
