"""SigLIP on 4 ranks: texts go round in both directions, and one exchange is left over.

Thread: https://github.com/mlfoundations/open_clip/pull/634 "SigLIP impl", 2023-09-15.
Right: 3 exchanges are one in both directions and one to the right. The backward pass sends the
gradients back. Each rank's loss is its images against all texts, over its own rows.
Must not be accused: that no tensor is gathered, or that the last exchange has one direction only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid, normalize
from torch.nn.parallel import DistributedDataParallel

import titanlite


def p2p(sends):
    """Sends each tensor to a rank and receives its counterpart from another."""
    received = [torch.empty_like(tensor) for tensor, _, _ in sends]
    ops = []
    for i, ((tensor, to, source), buffer) in enumerate(zip(sends, received)):
        ops.append(dist.P2POp(dist.isend, tensor.contiguous(), to, tag=i))
        ops.append(dist.P2POp(dist.irecv, buffer, source, tag=i))
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    return received


class NeighbourExchangeBidir(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, to_left, to_right):
        ctx.left, ctx.right = left, right
        from_right, from_left = p2p([(to_left, left, right), (to_right, right, left)])
        return from_right, from_left

    @staticmethod
    def backward(ctx, grad_from_right, grad_from_left):
        back = [(grad_from_right, ctx.right, ctx.left), (grad_from_left, ctx.left, ctx.right)]
        return None, None, *p2p(back)


class NeighbourExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source, to, tensor):
        ctx.source, ctx.to = source, to
        return p2p([(tensor, to, source)])[0]

    @staticmethod
    def backward(ctx, grad):
        return None, None, p2p([(grad, ctx.source, ctx.to)])[0]


class Siglip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(10, 8), nn.EmbeddingBag(16, 8)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, pixels, tokens):
        image, text = normalize(self.image(pixels), dim=1), normalize(self.text(tokens), dim=1)
        return image, text, self.scale.exp(), self.bias


def pair_loss(image, text, scale, bias, negative_only=False):
    labels = -torch.ones(len(image), len(text))
    if not negative_only:
        labels = 2 * torch.eye(len(image)) + labels
    return -logsigmoid(labels * (scale * image @ text.t() + bias)).sum() / len(image)


def loss(model, batch):
    return pair_loss(*model(batch["pixels"], batch["tokens"]))


def ring_loss(model, batch):
    image, text, scale, bias = model(batch["pixels"], batch["tokens"])
    rank, world = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world, (rank + 1) % world
    value = pair_loss(image, text, scale, bias)
    to_left = to_right = text
    num_bidir, remainder = divmod(world - 1, 2)
    for _ in range(num_bidir):
        to_left, to_right = NeighbourExchangeBidir.apply(left, right, to_left, to_right)
        for received in (to_left, to_right):
            value = value + pair_loss(image, received, scale, bias, negative_only=True)
    if remainder:
        received = NeighbourExchange.apply(left, right, to_right)
        value = value + pair_loss(image, received, scale, bias, negative_only=True)
    return value


def build():
    return DistributedDataParallel(Siglip())


generator = torch.Generator().manual_seed(634)
batches = [
    {
        "pixels": torch.randn(8, 10, generator=generator),
        "tokens": torch.randint(16, (8, 5), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, parallel_loss=ring_loss, ranks={"dp": 4}, split="dp")
    print(titanlite.compare(Siglip, build, **options))
