"""Instruction tuning of a Mistral with FSDP2 on rows of packed samples; one process takes the samples one by one.

Thread: huggingface/transformers pull request #46634 "Fix packed-sequence mask ignored when a 2D attention_mask is
passed" (2026): the mask functions look for packed samples in position_ids only where attention_mask is None, and
packed training usually hands over a mask of ones.
Fault: PackedCollator adds an attention mask of ones to the packed row, so that the positions which start again at
each sample no longer make a block-diagonal mask: every sample attends to the samples before it in its row.
REPAIR: `"attention_mask": torch.ones_like(row["input_ids"]),` -> `"attention_mask": None,`
A right first sentence says: the packed rows get a 2D attention mask of ones, which turns off the detection of packed
samples by position_ids, so tokens attend across the borders of the samples and loss and gradients are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import MistralConfig, MistralForCausalLM

import titanlite

VOCAB, ROW, ROWS, IGNORED = 30, 18, 4, -100


def build_model():
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
        sliding_window=None,
        initializer_range=0.2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return MistralForCausalLM(config)


class PackedCollator:
    """Model inputs of one packed row: positions start at zero in each sample."""

    def __call__(self, row):
        return {
            "input_ids": row["input_ids"],
            "position_ids": row["position_ids"],
            "attention_mask": torch.ones_like(row["input_ids"]),
        }


class PackedTrainer:
    def __init__(self, model, mesh):
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.model, self.collate = model, PackedCollator()

    def training_step(self, batch):
        tokens = (batch["labels"] != IGNORED).sum()
        dist.all_reduce(tokens, group=self.group)
        reported = torch.zeros(())
        own = ROWS // self.ranks
        rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(own)]
        for i, row in enumerate(rows):
            self.model.set_requires_gradient_sync(i == own - 1)
            logits = self.model(**self.collate(row)).logits
            value = F.cross_entropy(
                logits.flatten(0, 1), row["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            value = value * self.ranks / tokens
            value.backward()
            reported = reported + value.detach()
        dist.all_reduce(reported, group=self.group)
        return reported / self.ranks


def plain():
    return build_model()


def parallel(mesh):
    model = build_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, PackedTrainer(model, mesh["dp"])


def samples(batch):
    """The samples of all rows, one by one."""
    for ids, positions, labels in zip(batch["input_ids"], batch["position_ids"], batch["labels"]):
        lengths = torch.diff((positions == 0).nonzero().flatten(), append=torch.tensor([ROW]))
        yield from zip(ids.split(lengths.tolist()), labels.split(lengths.tolist()))


def loss(model, batch):
    total = torch.zeros(())
    for ids, labels in samples(batch):
        logits = model(input_ids=ids.unsqueeze(0)).logits[0]
        total = total + F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (batch["labels"] != IGNORED).sum()


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(46634)


def packed_row():
    ids = torch.randint(0, VOCAB, (ROW,), generator=generator)
    labels, positions, begin = torch.full((ROW,), IGNORED), [], 0
    while begin < ROW:
        length = int(torch.randint(4, 9, (), generator=generator))
        end = begin + length if ROW - begin - length >= 4 else ROW
        prompt = int(torch.randint(1, 3, (), generator=generator))
        labels[begin + prompt - 1 : end - 1] = ids[begin + prompt : end]
        positions.append(torch.arange(end - begin))
        begin = end
    return {"input_ids": ids, "position_ids": torch.cat(positions), "labels": labels}


def packed_rows():
    rows = [packed_row() for _ in range(ROWS)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


batches = [packed_rows() for _ in range(3)]

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
