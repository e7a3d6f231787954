"""A user's own model under plans: lists of blocks, tuples between stages, no plan, a wrong plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import PrepareModuleInput

import titanlite
from titanlite.config.load import read_any
from titanlite.errors import TitanliteError
from titanlite.parallelize import ParallelPlan
from titanlite.tools.verify.verify import Verifier


@dataclass(frozen=True)
class Sizes:
    dim: int = 8


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks in a ModuleList. Stages pass the activation, its first value and a number."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Linear(4, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes.dim) for _ in range(4))
        self.head = nn.Linear(sizes.dim, 3)

    def forward(self, x: Tensor, first: Tensor | None = None, number: Tensor | None = None) -> Any:
        if self.embed is not None:
            x = self.embed(x)
            first = x[:, :1]
            number = torch.full((len(x), 1), 3, device=x.device)
        for block in self.blocks:
            x = block(x)
        return (x, first, number) if self.head is None else self.head(x + first) * number


class Whole(Net):
    """A forward that takes no account of stages."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Unused(Net):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.unused = nn.Linear(2, 2)


class Data:
    num_samples = 12

    def __init__(self, **_: Any) -> None:
        pass

    def sample(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % 12)
        label = torch.randint(3, (), generator=generator)
        return {"x": torch.randn(4, generator=generator), "targets": label}


PLAN = ParallelPlan(blocks="blocks", embeddings=("embed",), head=("head",), sequence_dim=None)


PP2 = {"pipeline_parallel_degree": 2}
needs_numbers = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="its stages cannot pass integers"
)


def job(build: type = Net, plan: ParallelPlan | None = PLAN, **sections: Any) -> dict[str, Any]:
    name = f"own_{build.__name__}_{plan is None}_{len(plan.tensor_parallel) if plan else 0}"
    titanlite.register_model(name, build, Sizes, plan=plan)
    titanlite.register_dataset(name, Data, has_tokens=False, fields={"x": None, "targets": None})
    training = {"dataset": name, "steps": 2, "global_batch_size": 4, "local_batch_size": 2}
    return {"model": {"name": name}, "job": {"device": "cpu"}, "training": training, **sections}


@pytest.mark.parametrize(
    ("plan", "parallelism"),
    [
        (None, {"data_parallel_shard_degree": 2}),
        (None, {"data_parallel_replicate_degree": 2}),
        pytest.param(PLAN, PP2, marks=needs_numbers),
        pytest.param(
            PLAN, PP2 | {"pipeline_parallel_schedule": "ZBVZeroBubble"}, marks=needs_numbers
        ),
    ],
    ids=[
        *("FSDP without a plan", "DDP without a plan"),
        *("a list and tuples", "a list and tuples in a V"),
    ],
)
def test_an_own_model_agrees_with_one_process(
    verifier: Verifier, plan: ParallelPlan | None, parallelism: dict[str, Any]
) -> None:
    found = verifier.verify(read_any(job(plan=plan, parallelism=parallelism)).config, steps=2)
    assert found.agrees, found


TWICE = (Replicate(), Replicate())


@pytest.mark.parametrize(
    ("build", "entries", "axis", "line"),
    [
        (
            Net,
            {"blocks.*": PrepareModuleInput(input_layouts=TWICE, desired_input_layouts=TWICE)},
            "tensor_parallel",
            'blocks.0 (tensor-parallel plan: "blocks.*": PrepareModuleInput(input_layouts='
            "(Replicate(), Replicate()))) receives [2, 8] float32 and fails with ValueError: "
            "module inputs and input_layouts should have same length! (test_own_model_plans.py, ",
        ),
        (
            Unused,
            {},
            "data_parallel_replicate",
            "the loss does not depend on unused.weight, unused.bias, and DDP waits for the "
            "gradient of every trained parameter; set requires_grad of these to False, or shard",
        ),
        (
            Whole,
            {},
            "pipeline_parallel",
            "model.name: stage 0 of Whole fails in forward (test_own_model_plans.py, ",
        ),
    ],
)
def test_a_plan_that_fails_is_one_line(
    tmp_path: Path, build: type, entries: dict[str, Any], axis: str, line: str
) -> None:
    plan = ParallelPlan(
        entries, blocks="blocks", embeddings=("embed",), head=("head",), sequence_dim=None
    )
    sections = job(build, plan, parallelism={f"{axis}_degree": 2})
    sections["job"]["dump_folder"] = str(tmp_path)
    sections["training"]["local_batch_size"] = 2
    with pytest.raises(TitanliteError) as caught:
        titanlite.train(sections)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
