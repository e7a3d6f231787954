"""`titanlite.compare` on what PyTorch allows beside plain modules, and on what functions return."""

from __future__ import annotations

import gc
from collections import UserDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.func import functional_call, hessian, jacrev, jvp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam

from titanlite.errors import ConfigError
from titanlite.ranks.threads import ThreadWorld
from titanlite.tools.verify import Comparer
from titanlite.tools.verify.result import Result

WIDTH = 4
BATCHES = [torch.linspace(-1, 2, 16).view(4, WIDTH), torch.linspace(2, -1, 16).view(4, WIDTH)]


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


class Net(nn.Module):
    def __init__(self, way: Any = None, wrong: float = 1.0) -> None:
        super().__init__()
        self.way, self.wrong = way, wrong
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def layers(self, x):
        return self.last(torch.tanh(self.first(x)) * self.wrong)

    def forward(self, x):
        return self.layers(x) if self.way is None else self.way(self, x)


def of_an_ensemble(net, x):
    weights = torch.stack([net.first.weight, 2 * net.first.weight])
    calls = vmap(lambda w: functional_call(net.first, {"weight": w}, (x,)))(weights)
    return net.last(calls.sum(0)) * net.wrong + net.layers(x)


def of_jagged_rows(net, x):
    rows = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return net.last(torch.cat(list(net.first(rows).unbind()))) * net.wrong


def of_script(net, x):
    if not hasattr(net, "script"):
        net.script = torch.jit.script(nn.Tanh())
    return net.layers(net.script(x))


WAYS = {
    "vmap": lambda net, x: vmap(lambda row: net.layers(row.cpu()))(x),
    "hessian": lambda net, x: vmap(hessian(net.layers))(x).sum((-1, -2)) + net.layers(x),
    "jacrev": lambda net, x: jacrev(net.layers)(x).sum((1, 2)) + net.layers(x),
    "jvp": lambda net, x: jvp(net.layers, (x,), (torch.ones_like(x),))[1] + net.layers(x),
    "an ensemble": of_an_ensemble,
    "jagged": of_jagged_rows,
    "TorchScript": of_script,
}


def loss(model, batch):
    return model(batch).square().mean()


def compare(comparer: Comparer, parallel: Any, reference: Any = Net, **options: Any) -> Result:
    given = {"batches": BATCHES, "loss": loss, "split": "dp", "ranks": {"dp": 2}}
    return comparer.compare(reference, parallel, **given | options)


@pytest.mark.parametrize("name", WAYS)
def test_layers_may_be_called_in_any_way(comparer, name):
    def model(wrong: float = 1.0) -> nn.Module:
        return Net(WAYS[name], wrong)

    compare(comparer, lambda: DistributedDataParallel(model()), model).check()
    found = compare(comparer, lambda: DistributedDataParallel(model(1.5)), model)
    assert not found.agrees
    assert found.cause


class Trainer:
    def __init__(self) -> None:
        self.model = DistributedDataParallel(Net())
        self.optimizer = SGD(self.model.parameters(), lr=0.1)


class Zero:
    """An optimizer that is none of torch's, around one."""

    def __init__(self, trainer: Trainer) -> None:
        self.inner = trainer.optimizer
        self.zero_grad, self.param_groups = self.inner.zero_grad, self.inner.param_groups
        self.state = self.inner.state

    def step(self):
        for group in self.param_groups:
            group["lr"] = 0.2
        self.inner.step()


def sgd(parameters):
    return SGD(parameters, lr=0.1)


def of_two(first, last):
    return [SGD(first, lr=0.1), Adam(last, lr=0.01)]


def with_two():
    model = DistributedDataParallel(Net())
    return model, *of_two(model.module.first.parameters(), model.module.last.parameters())


@pytest.mark.parametrize(
    ("parallel", "optimizer"),
    [
        (lambda: (t := Trainer()) and (t.model, t.optimizer), sgd),
        (lambda: vars(Trainer()), sgd),
        (Trainer, sgd),
        (lambda: (t := Trainer()) and (t.model, {"optimizer": t.optimizer}), sgd),
        (lambda: (t := Trainer()) and (t.model, SimpleNamespace(of=t.optimizer)), sgd),
        (lambda: (t := Trainer()) and (t.model, Zero(t)), lambda own: SGD(own, lr=0.2)),
        (with_two, lambda parameters: of_two(parameters[:2], parameters[2:])),
    ],
    ids=["pair", "dict", "object", "dict beside", "object beside", "wrapper", "two"],
)
def test_a_model_may_come_with_its_optimizers(comparer, parallel, optimizer):
    compare(comparer, parallel, optimizer=optimizer).check()


def test_no_world_is_left_in_memory(comparer):
    def sharded(mesh):
        return fully_shard(Net(), mesh=mesh["dp"])

    def left():
        gc.collect()
        kinds = (ThreadWorld, nn.Parameter, DeviceMesh, DTensorSpec)
        return [sum(type(one) is kind for one in gc.get_objects()) for kind in kinds]

    compare(comparer, sharded).check()
    before = left()
    compare(comparer, sharded).check()
    assert left() == before


@pytest.mark.parametrize("ways", [(5, 3, "chunk"), (5, 3, "tensor_split"), (6, 4, "chunk")])
@pytest.mark.parametrize("declared", [False, True])
def test_chunks_need_not_be_equal(comparer, ways, declared):
    rows, ranks, cut = ways

    def parallel():
        table = nn.Embedding(rows, WIDTH)
        own = [*getattr(table.weight.detach(), cut)(ranks), table.weight.detach()[:0]]
        table.weight = nn.Parameter(own[min(dist.get_rank(), len(own) - 1)].clone())
        return table

    def of_rows(table, batch):
        return table.weight.square().sum() + 0 * batch.sum()

    shard = {"shard": lambda name: (0, "dp")} if declared else {}
    options = {"ranks": {"dp": ranks}, "split": None, "loss": of_rows, **shard}
    found = compare(comparer, parallel, lambda: nn.Embedding(rows, WIDTH), **options)
    assert not any(failure.kind in ("start", "gradient") for failure in found.failures)


def step_that_steps(built, part):
    model, optimizer = built
    value = loss(model, part)
    value.backward()
    optimizer.step()
    return value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda model: 0.0}, r"loss: takes \(model\); give a function that takes \(mode"),
        ({"clip": lambda: 0.0}, r"clip: takes \(\); give a function that takes \(model\)"),
        ({"split": lambda batch: batch}, r"split: takes \(batch\); give a function that takes"),
        ({"parallel": lambda mesh, more: Net()}, r"parallel: takes \(mesh, more\); give"),
        ({"optimizer": lambda parameters: None}, "optimizer: returned a NoneType; return an op"),
        ({"optimizer": LBFGS}, "optimizer: LBFGS needs a closure for its step; take another"),
        ({"batches": [UserDict(x=BATCHES[0])]}, "batches: no tensors are seen in a UserDict; give"),
        ({"batches": [BATCHES[0].numpy()]}, "batches: no tensors are seen in a ndarray; give"),
        ({"batches": [{"graph": iter(BATCHES)}]}, "batches: no tensors are seen in a list_iterat"),
        (
            {"parallel": lambda: (dist.init_process_group("gloo"), Net())[1]},
            "parallel: calls init_process_group, but the ranks have a group already; leave it out",
        ),
        (
            {"parallel": lambda: (t := Trainer()) and (t.model, t.optimizer)}
            | {"optimizer": sgd, "step": step_that_steps},
            r"step: calls the optimizer's step\(\), which compare calls after it; leave that out",
        ),
        ({"parallel": lambda: (Net(), Net())}, "step: is needed, since `parallel` returned 2 mod"),
    ],
)
def test_a_mistake_is_one_line(comparer, options, message):
    given = {"parallel": lambda: DistributedDataParallel(Net()), **options}
    with pytest.raises(ConfigError, match=f"^{message}") as raised:
        compare(comparer, **given)
    assert len(str(raised.value).splitlines()) == 1


def test_losses_may_be_added_over_one_axis_and_averaged_over_another(comparer):
    def parallel(mesh):
        net = Net()
        group = mesh.get_group("rows")

        def average(parameter):
            dist.all_reduce(parameter.grad, group=group)
            dist.all_reduce(parameter.grad.div_(2), group=mesh.get_group("jobs"))

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(average)
        return net

    def of_jobs(model, batch):
        return model(batch).square().mean(1).sum()

    batches = [torch.stack([batch, 3 * batch]) for batch in BATCHES]
    options = {"ranks": {"jobs": 2, "rows": 2}, "split": {"jobs": 0, "rows": 1}}
    found = compare(comparer, parallel, batches=batches, loss=of_jobs, **options).check()
    assert "loss       the sum, divided by 2, over the parts of the batch" in str(found)


class Shifted(Net):
    """A shift of all logits has no gradient but rounding error."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.last((self.first(x) + self.shift).log_softmax(-1))


def test_what_is_zero_on_one_process_has_no_relative_difference(comparer):
    def step(model, part):
        value = loss(model, part)
        (value + model.module.shift).backward()
        return value

    found = compare(comparer, lambda: DistributedDataParallel(Shifted()), Shifted, step=step)
    assert "not 0 ! (1 of 5) shift" in str(found)
