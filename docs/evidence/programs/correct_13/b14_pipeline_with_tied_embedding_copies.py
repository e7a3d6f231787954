"""A hand-written pipeline of three uneven stages whose first and last stage each hold a copy of the tied embedding.

Thread: NVIDIA/Megatron-LM issue #299 "[Question]: Anyone help explain what it's for _EMBEDDING_GROUP?" (2023): the last stage
needs the embedding to go back to the vocabulary, and the gradients of the two copies are all-reduced to keep them the same.
Correct: the last stage's copy starts as zeros and gets its values by a sum over the embedding group; after the backward pass
each copy holds the gradient of one use only (lookup or logits). finalize_model_grads sums the two, not averages, which is the
gradient of the tied weight. The stages have 1, 2 and 1 layers, and the middle one is in no embedding group.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, DIM, HEADS, SEQ = 22, 12, 3, 5
LAYERS_OF_STAGE = ((0,), (1, 2), (3,))
MICROBATCHES = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.dense = nn.Linear(DIM, DIM)
        self.h_to_4h, self.h4_to_h = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            t.view(b, s, HEADS, -1).transpose(1, 2)
            for t in self.qkv(self.input_norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dense(y.transpose(1, 2).reshape(b, s, DIM))
        return x + self.h4_to_h(F.gelu(self.h_to_4h(self.mlp_norm(x))))


class GPTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in sum(LAYERS_OF_STAGE, ())})
        self.final_norm = nn.LayerNorm(DIM)

    def forward(self, tokens):
        x = self.word_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return F.linear(self.final_norm(x), self.word_embeddings.weight)


class Stage(nn.Module):
    def __init__(self, model, index, count):
        super().__init__()
        self.pre_process, self.post_process = index == 0, index == count - 1
        if self.pre_process:
            self.word_embeddings = model.word_embeddings
        self.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in LAYERS_OF_STAGE[index]})
        if self.post_process:
            self.final_norm = model.final_norm
            self.output_embeddings = nn.Embedding(VOCAB, DIM)
            nn.init.zeros_(self.output_embeddings.weight)

    def shared_embedding_weight(self):
        if self.pre_process:
            return self.word_embeddings.weight
        return self.output_embeddings.weight if self.post_process else None

    def forward(self, x):
        if self.pre_process:
            x = self.word_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.post_process:
            x = F.linear(self.final_norm(x), self.output_embeddings.weight)
        return x


class Pipeline:
    """All forward passes, then all backward passes, in reverse order of the microbatches."""

    def __init__(self, stage, index, count):
        self.stage, self.index, self.count = stage, index, count
        self.embedding_group = dist.new_group([0, count - 1])
        shared = stage.shared_embedding_weight()
        if shared is not None:
            dist.all_reduce(shared.detach(), group=self.embedding_group)

    def forward_step(self, tokens, labels):
        x = tokens
        if not self.stage.pre_process:
            x = torch.empty(*tokens.shape, DIM)
            dist.recv(x, self.index - 1)
            x.requires_grad_()
        out = self.stage(x)
        if self.stage.post_process:
            out = F.cross_entropy(out.flatten(0, 1), labels.flatten()) / MICROBATCHES
        else:
            dist.send(out.detach(), self.index + 1)
        return x, out

    def backward_step(self, x, out):
        if self.stage.post_process:
            out.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, self.index + 1)
            out.backward(grad)
        if not self.stage.pre_process:
            dist.send(x.grad, self.index - 1)

    def finalize_model_grads(self):
        shared = self.stage.shared_embedding_weight()
        if shared is not None:
            dist.all_reduce(shared.grad, group=self.embedding_group)

    def train_step(self, batch):
        parts = zip(batch["tokens"].chunk(MICROBATCHES), batch["labels"].chunk(MICROBATCHES))
        kept = [self.forward_step(tokens, labels) for tokens, labels in parts]
        for x, out in reversed(kept):
            self.backward_step(x, out)
        self.finalize_model_grads()
        return sum(out.detach() for _, out in kept) if self.stage.post_process else None


def parallel(mesh):
    index, count = mesh.get_local_rank("pp"), mesh.size()
    stage = Stage(GPTModel(), index, count)
    return stage, Pipeline(stage, index, count)


def step(built, batch):
    return built[1].train_step(batch)


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(13)
    for _ in range(count):
        text = torch.randint(VOCAB, (rows, SEQ + 1), generator=generator)
        yield {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


arguments = GPTModel, parallel
options = dict(
    batches=list(make_batches(3, rows=8)),
    loss=loss,
    step=step,
    ranks={"pp": 3},
    microbatches=MICROBATCHES,
    rename={"output_embeddings.weight": "word_embeddings.weight"},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
