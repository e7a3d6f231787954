"""Context parallelism with the causal shift of the labels done on each rank's chunk.

Thread: https://github.com/huggingface/transformers/pull/36607 "[ForCausalLMLoss] allow users to pass
shifted labels", 2025-03-07.
Wrong: logits and labels are cut first and shifted then, so the target of the last token of every
chunk but the last is lost.
A right diagnosis says: the targets at the chunks' boundary are missing: the loss of position 3 of 8
(the last of rank 0's chunk) does not count. The model's outputs agree; the loss differs.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS = 24, 16, 2


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        length, rank = x.shape[1], 0
        if self.group is not None:  # gather keys and values
            rank = dist.get_rank(self.group)
            k, v = (torch.cat(dist_nn.all_gather(t.contiguous(), self.group), 1) for t in (k, v))
        rows = torch.arange(length) + rank * length
        mask = rows[:, None] >= torch.arange(k.shape[1])[None]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x + self.attention(x)
        return self.lm_head(x + self.mlp(x))


def causal_lm_loss(model, batch):
    logits = model(batch["input_ids"])
    shift_logits, shift_labels = logits[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten())


def parallel(mesh):
    model = CausalLM()
    model.attention.group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(3)
batches = []
for _ in range(3):
    tokens = torch.randint(VOCAB, (3, 8), generator=generator)
    batches.append({"input_ids": tokens, "labels": tokens.clone()})

if __name__ == "__main__":
    options = dict(batches=batches, loss=causal_lm_loss, ranks={"cp": 2}, split={"cp": 1})
    print(titanlite.compare(CausalLM, parallel, **options))
