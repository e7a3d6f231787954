"""ZeRO-3 by hand: hooks gather a layer's parameters before it runs and cut them after its gradient is there.

Thread: https://github.com/pytorch/pytorch/pull/118004 "[FSDP2] Added pre/post-backward", 2024-01-22.
Right: between the forward pass of a layer and the accumulation of its gradient, `p.data` is the whole
parameter; then it is the rank's rows again, and the gradient the mean of the ranks' gradients of them.
Must not be accused: parameters whose shape changes during a step, a gradient that is replaced in a hook.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

IMAGE, WIDTH, CLASSES = 10, 24, 6


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc_out(torch.nn.functional.elu(self.fc_in(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mixers = nn.Linear(IMAGE, WIDTH), nn.ModuleList(Mixer() for _ in range(2))
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for mixer in self.mixers:
            x = mixer(x)
        return self.fc(x)


class ShardedParameters:
    def __init__(self, module):
        self.shards = {}
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(self.gather)
                for p in layer.parameters():
                    p.data = p.data.chunk(dist.get_world_size())[dist.get_rank()].clone()
                    p.register_post_accumulate_grad_hook(self.reduce_and_cut)

    @torch.no_grad()
    def gather(self, layer, inputs):
        for p in layer.parameters():
            self.shards[p] = p.data
            parts = [torch.empty_like(p.data) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, p.data)
            p.data = torch.cat(parts)

    @torch.no_grad()
    def reduce_and_cut(self, p):
        whole, p.grad = p.grad, None
        dist.all_reduce(whole)
        p.data = self.shards.pop(p)
        own = whole.chunk(dist.get_world_size())[dist.get_rank()]
        p.grad = own / dist.get_world_size()


def wrap():
    model = Classifier()
    return model, ShardedParameters(model)


def loss(model, batch):
    return cross_entropy(model(batch["images"]), batch["labels"])


def train_step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


def draw(generator):
    images = torch.randn(8, IMAGE, generator=generator)
    return {"images": images, "labels": torch.randint(CLASSES, (8,), generator=generator)}


generator = torch.Generator().manual_seed(118004)
batches = [draw(generator) for _ in range(3)]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train_step)
    print(titanlite.compare(Classifier, wrap, shard=lambda name: (0, "dp"), **options))
