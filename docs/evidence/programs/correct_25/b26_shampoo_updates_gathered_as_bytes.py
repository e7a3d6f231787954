"""A byte model trained with Shampoo under DDP: each rank preconditions its own blocks and gathers the updates as bytes.

Thread: facebookresearch/optimizers pull request #149 "Fix the bug skipping step if no gradients" (2025). The
distributor there deals blocks of parameters to the ranks by size, gives each block a piece of one int8 buffer, and
gathers the buffer in place; a rank whose blocks have no gradients must join the gather all the same.
Correct: the pieces of the buffer are viewed in the type of the parameters, so the bytes are the numbers and are
gathered without rounding. DDP has averaged the gradients, so an owner's preconditioners, momentum and grafting are
those of one process; others keep no state. The third layer is skipped in every second step: its gradients are None on
all ranks, and the updates of its blocks stay out, whatever the buffer still holds of them.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

BYTES, WIDTH, LENGTH, ROWS, BLOCK = 48, 16, 7, 12, 16


class ByteModel(nn.Module):
    """A mixing network over the last bytes, with a residual layer that can be skipped."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(BYTES, WIDTH)
        self.mix = nn.Linear(LENGTH * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens, depth):
        x = self.mix(self.words(tokens).flatten(1))
        for layer in self.layers[:depth]:
            x = x + torch.tanh(layer(F.layer_norm(x, (WIDTH,))))
        return self.head(x)


def inverse_root(matrix, root):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-6).pow(-1 / root) @ vectors.T


class Shampoo(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.004, beta=0.9, epsilon=1e-3, every=2, group=None):
        super().__init__(parameters, dict(lr=lr, beta=beta, epsilon=epsilon, every=every))
        self.steps, self.group = 0, group
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self.blocks = [
            (p, index)
            for p in self.param_groups[0]["params"]
            for index in self.block_indices(p.detach())
        ]
        loads, self.owner, offset = [0] * size, {}, {}
        order = sorted(range(len(self.blocks)), key=lambda i: -self.block(i).numel())
        for i in order:
            owner = loads.index(min(loads))
            self.owner[i], offset[i] = owner, loads[owner]
            nbytes = self.block(i).numel() * self.block(i).element_size()
            loads[owner] += -(-nbytes // 64) * 64
        owners = torch.zeros(size, max(loads), dtype=torch.int8)
        self.buffer, self.local_buffer, self.rank = owners.view(-1), owners[rank], rank
        self.updates = []
        for i in range(len(self.blocks)):
            block = self.block(i)
            place = owners[self.owner[i]].narrow(0, offset[i], block.numel() * block.element_size())
            self.updates.append(place.view(block.dtype).view(block.shape))

    @staticmethod
    def block_indices(p):
        rows = [slice(i, i + BLOCK) for i in range(0, len(p), BLOCK)]
        if p.dim() == 1:
            return [(row,) for row in rows]
        columns = [slice(i, i + BLOCK) for i in range(0, p.shape[1], BLOCK)]
        return [(row, column) for row in rows for column in columns]

    def block(self, i, of_gradient=False):
        p, index = self.blocks[i]
        return (p.grad if of_gradient else p.detach())[index]

    def write_update(self, i, group):
        """Kronecker factors of the block, the direction of Shampoo, the length of Adagrad."""
        grad, state = self.block(i, of_gradient=True), self.state.setdefault(i, {})
        if not state:
            state["factors"] = [group["epsilon"] * torch.eye(n) for n in grad.shape]
            state["sum"], state["momentum"] = torch.zeros_like(grad), torch.zeros_like(grad)
        direction = grad
        for dim, factor in enumerate(state["factors"]):
            other = [d for d in range(grad.dim()) if d != dim]
            factor += torch.tensordot(grad, grad, dims=(other, other))
        if "roots" not in state or self.steps % group["every"] == 0:
            state["roots"] = [inverse_root(f, 2 * grad.dim()) for f in state["factors"]]
        for root in state["roots"]:
            direction = torch.tensordot(direction, root, dims=([0], [0]))
        state["sum"].addcmul_(grad, grad)
        graft = grad / (state["sum"].sqrt() + 1e-6)
        direction *= graft.norm() / direction.norm().clamp(min=1e-12)
        state["momentum"].mul_(group["beta"]).add_(direction)
        self.updates[i].copy_(state["momentum"])

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        self.steps += 1
        present = [i for i, (p, _) in enumerate(self.blocks) if p.grad is not None]
        for i in present:
            if self.owner[i] == self.rank:
                self.write_update(i, group)
        if self.group:
            dist.all_gather_into_tensor(self.buffer, self.local_buffer, group=self.group)
        torch._foreach_add_(
            [self.block(i) for i in present], [self.updates[i] for i in present], alpha=-group["lr"]
        )


def plain():
    return ByteModel()


def parallel(mesh):
    group = mesh.get_group("dp")
    model = ByteModel()
    model = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    return model, Shampoo(model.parameters(), group=group)


def loss(model, batch):
    return F.cross_entropy(model(batch["bytes"], int(batch["depth"][0])), batch["next"])


generator = torch.Generator().manual_seed(149)


def windows(depth):
    words = torch.randint(0, BYTES, (ROWS, LENGTH + 1), generator=generator)
    return {"bytes": words[:, :-1], "next": words[:, -1], "depth": torch.full((ROWS,), depth)}


batches = [windows(depth) for depth in (3, 2, 3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, split="dp", ranks={"dp": 3}, optimizer=lambda p: Shampoo(p)
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
