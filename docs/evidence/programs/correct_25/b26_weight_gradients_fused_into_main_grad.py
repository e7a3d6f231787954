"""Linear layers that add their weights' gradients to a flat main_grad buffer themselves and hand autograd a dummy.

Thread: NVIDIA/TransformerEngine issue #287 "'Parameter' object has no attribute 'main_grad'" (2023), on
fuse_wgrad_accumulation; as in Megatron-LM's megatron/core/tensor_parallel/layers.py and its DistributedDataParallel.
Correct: the gradient that a fused layer returns is an uninitialized tensor, there only so that the parameter's hook
runs; the hook sees the flag grad_added_to_main_grad and throws it away, and other parameters' gradients are added to
the buffer by the hook. The embedding is also the head: as the engine adds up its two uses before the hook, the head
returns zeros for it (zero_out_wgrad), and the sum, that of the lookup alone, is added too. The losses are divided by
microbatches and ranks before their backward passes, the buffer is summed over the ranks once, and its views become the
gradients that the optimizer reads.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, ROWS, MICROBATCHES = 33, 16, 2, 2, 9, 12, 3


class LinearWithFusedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameter itself, which carries main_grad
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        main_grad, flat = ctx.weight.main_grad, grad.flatten(0, -2)
        torch.addmm(main_grad, flat.T, x.flatten(0, -2), out=main_grad)
        if getattr(ctx.weight, "zero_out_wgrad", False):
            grad_weight = torch.zeros_like(main_grad)
        else:
            grad_weight = torch.empty_like(main_grad)
        ctx.weight.grad_added_to_main_grad = True
        return grad_x, grad_weight


def linear(x, weight):
    if hasattr(weight, "main_grad"):
        return LinearWithFusedGradient.apply(x, weight)
    return F.linear(x, weight)


class Linear(nn.Linear):
    def forward(self, x):
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = Linear(WIDTH, 40, bias=False), Linear(40, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.words.weight, std=0.3)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return linear(self.final_norm(x), self.words.weight)


class DistributedDataParallel(nn.Module):
    """One buffer for all gradients, whose views are the parameters' main_grad."""

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group
        parameters = list(module.parameters())
        self.grad_data = torch.zeros(sum(p.numel() for p in parameters))
        end = len(self.grad_data)
        for parameter in parameters:  # from the end, in the order of the backward pass
            start = end - parameter.numel()
            parameter.main_grad = self.grad_data[start:end].view(parameter.shape)
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(self.collect)
            end = start
        module.words.weight.zero_out_wgrad = True

    @staticmethod
    def collect(parameter):
        added = parameter.grad_added_to_main_grad
        if not added or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def zero_grad_buffer(self):
        self.grad_data.zero_()
        for parameter in self.parameters():
            parameter.grad_added_to_main_grad = False

    def finish_grad_sync(self):
        dist.all_reduce(self.grad_data, group=self.group)
        for parameter in self.parameters():
            parameter.grad = parameter.main_grad

    def forward(self, *inputs):
        return self.module(*inputs)


def plain():
    return GPT()


def parallel(mesh):
    return DistributedDataParallel(GPT(), mesh.get_group("dp")), mesh.size()


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def step(built, part):
    model, ranks = built
    model.zero_grad_buffer()
    reported = 0
    for microbatch in zip(*(x.chunk(MICROBATCHES) for x in part)):
        value = loss(model, microbatch) / MICROBATCHES
        (value / ranks).backward()
        reported += value.detach()
    model.finish_grad_sync()
    return reported


generator = torch.Generator().manual_seed(287)


def texts():
    words = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


batches = [texts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
