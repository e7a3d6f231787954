"""Compiled blocks: one graph or an error, what they keep, and whose code a rank loads."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.compiler.config
from torch import Tensor, nn

from titanlite.parallelize import ParallelPlan, apply_ac, apply_compile
from titanlite.parallelize.compile.apply import keep_caches_apart

PLAN = ParallelPlan(blocks="blocks")


class Block(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x.exp().tanh())


class Model(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": block})

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks["0"](x)


@pytest.fixture(autouse=True)
def _settings_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a test sets."""
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(activation_memory_budget=1.0),
        torch.compiler.config.patch(cache_key_tag=""),
    ):
        yield
    torch._dynamo.reset()


def test_a_graph_break_is_an_error() -> None:
    x = torch.ones(2, 8)
    whole, broken = Model(Block()), Model(Block(breaks=True))
    expected = whole(x)
    for model in (whole, broken):
        apply_compile(model, backend="eager", plan=PLAN)
    assert torch.equal(whole(x), expected)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        broken(x)


def test_a_block_keeps_no_more_than_its_budget() -> None:
    def kept_bytes(budget: float) -> int:
        torch._dynamo.reset()
        model = Model(Block())
        apply_ac(model, "memory_budget", memory_budget=budget, plan=PLAN)
        apply_compile(model, backend="aot_eager", plan=PLAN)
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.ones(64, 8))
        return kept

    least, most = kept_bytes(0.0), kept_bytes(1.0)
    weights = 4 * (2 * 8 * 32 + 32 + 8)
    # With a budget of 0 only inputs are kept: the block's own and its weights.
    assert least <= weights + 4 * 64 * 8
    assert most >= least + 4 * 64 * 32


def test_ranks_of_tp_have_their_own_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "mine")

    def tag(group: str | None, rank: int = 0) -> Any:
        mesh: Any = SimpleNamespace(
            get_group=lambda: SimpleNamespace(group_name=group), get_local_rank=lambda: rank
        )
        keep_caches_apart(None if group is None else mesh)
        return torch.compiler.config.cache_key_tag

    tags = [tag("1", 0), tag("1", 1), tag("2", 0), tag(None)]
    assert len(set(tags)) == 4
    assert all(one.startswith("mine") for one in tags)
