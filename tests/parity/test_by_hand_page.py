"""docs/by_hand.md: its loop computes the same under every plan that it names."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.ranks.launch import spawn

PAGE = Path(__file__).parents[2] / "docs/by_hand.md"


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("page")
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    (folder / "by_hand_loop.py").write_text(code)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("by_hand_loop")
    sys.path.remove(str(folder))
    del sys.modules["by_hand_loop"]


def test_every_plan_of_the_page_trains_as_one_process(loop: Any) -> None:
    (alone,) = spawn(loop.main, 1, ParallelDims(), timeout_seconds=120)
    assert len(alone) == 3
    for dims in (ParallelDims(tp=2, dp_shard=2), ParallelDims(pp=2, cp=2)):
        for of_rank in spawn(loop.main, 4, dims, timeout_seconds=120):
            for own, expected in zip(of_rank, alone, strict=True):
                assert own == pytest.approx(expected, rel=1e-11), dims


def test_a_checkpoint_by_hand_goes_on_under_another_plan(loop: Any, tmp_path: Path) -> None:
    whole = spawn(loop.main, 1, ParallelDims(), timeout_seconds=120)[0]
    sharded = ParallelDims(tp=2, dp_shard=2)
    first = spawn(loop.main, 4, sharded, 1, tmp_path, timeout_seconds=120)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    staged = ParallelDims(pp=2, cp=2)
    rest = spawn(loop.main, 4, staged, 3, tmp_path, timeout_seconds=120)[0]
    assert len(rest) == 2
    for own, expected in zip([*first, *rest], whole, strict=True):
        assert own == pytest.approx(expected, rel=1e-11)
