"""calculate_per_token_loss over dp x pp: microbatches' losses are sums, divided once at the end.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/936 "[QUESTION] Calculations regarding
calculate_per_token_loss parameter", 2024-07-19.
Right: nothing is divided by num_microbatches. The number of tokens is broadcast from the last stage and
summed over dp; gradients are summed over dp and divided by it.
Must not be accused: gradients that are sums during the backward pass, microbatches and ranks with
different numbers of tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, VOCAB, SEQ, NUM_MICROBATCHES = 16, 20, 6, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        return x + self.fc2(silu(self.fc1(self.norm(x))))


class GPTModel(nn.Module):
    def __init__(self, pre_process=True, post_process=True):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({"0": Layer(), "1": Layer()})
        self.output_layer = nn.Linear(DIM, VOCAB)
        if not pre_process:
            del self.embedding, self.layers["0"]
        if not post_process:
            del self.output_layer, self.layers["1"]

    def forward(self, x):
        x = self.embedding(x) if self.pre_process else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output_layer(x) if self.post_process else x


def loss_func(logits, labels, loss_mask):
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * loss_mask.flatten()).sum(), loss_mask.sum()


def plain_loss(model, batch):
    total, num_tokens = loss_func(model(batch["tokens"]), batch["labels"], batch["loss_mask"])
    return total / num_tokens


def setup(mesh):
    first = mesh.get_local_rank("pp") == 0
    return GPTModel(pre_process=first, post_process=not first), mesh


def finalize_model_grads(model, num_tokens, mesh):
    last = dist.get_global_rank(mesh.get_group("pp"), 1)
    dist.broadcast(num_tokens, src=last, group=mesh.get_group("pp"))
    dist.all_reduce(num_tokens, group=mesh.get_group("dp"))
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= num_tokens
    return num_tokens


def forward_backward(built, batch):
    model, mesh = built
    peer = dist.get_global_rank(mesh.get_group("pp"), 1 - mesh.get_local_rank("pp"))
    total_num_tokens, total_loss = torch.zeros(()), torch.zeros(())
    chunks = [batch[name].chunk(NUM_MICROBATCHES) for name in ("tokens", "labels", "loss_mask")]
    for tokens, labels, loss_mask in zip(*chunks):
        if model.pre_process:
            output = model(tokens)
            dist.send(output.detach(), peer)
            output_grad = torch.empty_like(output)
            dist.recv(output_grad, peer)
            output.backward(output_grad)
        else:
            hidden = torch.empty(len(labels), SEQ, DIM)
            dist.recv(hidden, peer)
            hidden.requires_grad_()
            loss, num_tokens = loss_func(model(hidden), labels, loss_mask)
            loss.backward()
            total_num_tokens += num_tokens
            total_loss += loss.detach()
            dist.send(hidden.grad, peer)
    num_tokens = finalize_model_grads(model, total_num_tokens, mesh)
    return total_loss / num_tokens if model.post_process else None


def make_batch(generator):
    tokens, labels = (torch.randint(VOCAB, (8, SEQ), generator=generator) for _ in range(2))
    length = torch.tensor([6, 2, 5, 1, 3, 6, 4, 4])
    loss_mask = (torch.arange(SEQ) < length[:, None]).to(torch.float64)
    return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}


rng = torch.Generator().manual_seed(51)
batches = [make_batch(rng) for _ in range(3)]

if __name__ == "__main__":
    axes = {"dp": 2, "pp": 2}
    options = dict(batches=batches, loss=plain_loss, ranks=axes, split="dp", step=forward_backward)
    print(titanlite.compare(GPTModel, setup, **options))
