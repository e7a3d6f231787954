"""A pipeline with a ring of receive buffers, as many as 1F1B needs, under a schedule of all forward passes first.

Thread: https://github.com/deepspeedai/DeepSpeed/pull/2862 "Fix buffer size for pipeline parallel and communication
schedule", 2023-02-20 (and https://github.com/deepspeedai/DeepSpeed/issues/2800, comment of 2023-02-15: a received
activation overwrites a buffer that is still needed).
Wrong: the last stage has two buffers, but four microbatches wait for their backward passes. The activations of
microbatches 2 and 3 overwrite those of 0 and 1, which autograd has saved.
EXPECT: in the backward pass of stage 1 (rank 1), blocks.1.norm, which reads the received activation, is the first that
differs (the gradients of norm.weight and of its input): the input saved for backward was overwritten by a later
microbatch (its receive buffer was reused). The forward pass of step 1 agrees, and the gradients of head, blocks.1.up
and blocks.1.down. So the gradients of stage 0 are wrong, too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, MICROBATCHES, STAGES = 12, 8, 6, 4, 2


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, stages=(0, 1)):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if 0 in stages else None
        self.blocks = nn.ModuleDict({str(i): Mlp() for i in stages})
        self.head = nn.Linear(DIM, VOCAB) if 1 in stages else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_func(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return loss_func(model(batch["tokens"]), batch["labels"])


class PipelineEngine:
    def __init__(self, module, index, microbatch_shape):
        self.module, self.index = module, index
        shape = (*microbatch_shape, DIM)
        self.buffers = [torch.empty(shape) for _ in range(self.num_pipe_buffers())]
        self.grad_buffer = torch.empty(shape)

    def num_pipe_buffers(self):
        return max(2, min(STAGES - self.index, MICROBATCHES))

    def recv_activation(self, i):
        buffer = self.buffers[i % len(self.buffers)]
        dist.recv(buffer, self.index - 1)
        return buffer.detach().requires_grad_()

    def train_batch(self, tokens, labels):
        inputs, outputs, losses = [], [], []
        for i in range(MICROBATCHES):
            x = tokens[i] if self.index == 0 else self.recv_activation(i)
            out = self.module(x)
            if self.index == STAGES - 1:
                out = loss_func(out, labels[i]) / MICROBATCHES
                losses.append(out.detach())
            else:
                dist.send(out.detach(), self.index + 1)
            inputs.append(x)
            outputs.append(out)
        for x, out in zip(inputs, outputs):
            if self.index == STAGES - 1:
                out.backward()
            else:
                dist.recv(self.grad_buffer, self.index + 1)
                out.backward(self.grad_buffer)
            if self.index > 0:
                dist.send(x.grad, self.index - 1)
        return sum(losses) if losses else None


def parallel(mesh):
    whole, index = GPT(), mesh.get_local_rank("pp")
    part = GPT([index])
    part.load_state_dict({n: t for n, t in whole.state_dict().items() if n in part.state_dict()})
    return part, PipelineEngine(part, index, (2, SEQ))


def step(built, batch):
    return built[1].train_batch(*(batch[n].chunk(MICROBATCHES) for n in ("tokens", "labels")))


generator = torch.Generator().manual_seed(2862)
batches = [
    {n: torch.randint(VOCAB, (8, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
