"""A small GPT on packed documents in a pipeline of three stages, with a GPipe schedule written by hand and a document mask.

Thread: pytorch/torchtitan issue #1723 "PP microbatching + block-causal FlexAttention composability issue" (2025): the block mask
was made from the whole batch before the pipeline cut it into microbatches, so that all microbatches but the first got the
document borders of the first rows of the batch.
Fault: step makes the mask from the tokens of the whole batch; the rows of each microbatch count from 0, so mask_mod looks up the
documents of microbatch 0 for all of them.
REPAIR: `mask_mod = document_causal(batch["tokens"])` -> `mask_mod = document_causal(parts["tokens"][i])`
A right first sentence says: the attention of every microbatch but the first is wrong in the forward pass, because the document
mask comes from the whole batch and is not cut into microbatches, so that they use the mask of the first microbatch's rows.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCABULARY, EOS, WIDTH, HEADS, LENGTH = 11, 0, 16, 2, 10
STAGES, MICROBATCHES = 3, 3


def document_causal(tokens):
    ends = (tokens == EOS).long()
    document = ends.cumsum(1) - ends

    def mask_mod(b, q, k):
        return (q >= k) & (document[b, q] == document[b, k])

    return mask_mod


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask_mod):
        row, place = torch.arange(x.size(0)).view(-1, 1, 1), torch.arange(x.size(1))
        allowed = mask_mod(row, place[:, None], place[None])
        y = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = (y[:, :, i].transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask_mod):
        x = x + self.attention(self.norm1(x), mask_mod)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(STAGES)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, mask_mod):
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks.values():
            x = block(x, mask_mod)
        return self.head(self.norm(x))


class Stage(nn.Module):
    def __init__(self, model, index):
        super().__init__()
        self.index, self.first, self.last = index, index == 0, index == STAGES - 1
        if self.first:
            self.embed, self.position = model.embed, model.position
        self.blocks = nn.ModuleDict({str(index): model.blocks[str(index)]})
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x, mask_mod):
        if self.first:
            x = self.embed(x) + self.position.weight
        for block in self.blocks.values():
            x = block(x, mask_mod)
        return self.head(self.norm(x)) if self.last else x

    def receive(self, rows, source):
        buffer = torch.empty(rows, LENGTH, WIDTH)
        dist.recv(buffer, source)
        return buffer


def plain():
    return GPT()


def parallel(mesh):
    return Stage(GPT(), mesh.get_local_rank("pp"))


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return token_loss(model(batch["tokens"], document_causal(batch["tokens"])), batch["targets"])


def step(stage, batch):
    parts = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
    rows = parts["tokens"][0].size(0)
    inputs, outputs = [], []
    for i in range(MICROBATCHES):
        if stage.first:
            x = parts["tokens"][i]
        else:
            x = stage.receive(rows, stage.index - 1).requires_grad_()
        mask_mod = document_causal(batch["tokens"])
        y = stage(x, mask_mod)
        if stage.last:
            y = token_loss(y, parts["targets"][i]) / MICROBATCHES
        else:
            dist.send(y.detach(), stage.index + 1)
        inputs.append(x)
        outputs.append(y)
    for x, y in zip(inputs, outputs):
        if stage.last:
            y.backward()
        else:
            y.backward(stage.receive(rows, stage.index + 1))
        if not stage.first:
            dist.send(x.grad, stage.index - 1)
    return sum(y.detach() for y in outputs) if stage.last else None


generator = torch.Generator().manual_seed(1723)


def draw():
    stream = torch.randint(0, VOCABULARY, (6, LENGTH + 1), generator=generator)
    border = torch.randint(2, LENGTH - 2, (6, 1), generator=generator)
    stream.scatter_(1, border, EOS)
    return {"tokens": stream[:, :-1].clone(), "targets": stream[:, 1:].clone()}


batches = [draw() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": STAGES})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
