"""save_checkpoint and load_checkpoint on one process: what comes back, and what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from titanlite import TitanliteError, load_checkpoint, save_checkpoint
from titanlite.tools.convert.command import to_safetensors
from titanlite.training import build_optimizer, build_scheduler


@dataclass
class Loop:
    parts: list[nn.Module]
    optimizer: torch.optim.Optimizer
    scheduler: Any


def make_loop(width: int = 4, optimizer: str = "AdamW", seed: int = 0) -> Loop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    chosen = build_optimizer(model.parameters(), name=optimizer, lr=0.1)
    schedule = build_scheduler(chosen, warmup_steps=4, decay_steps=0, total_steps=9)
    return Loop([model], chosen, schedule)


def train(loop: Loop, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        loop.parts[0](x).square().sum().backward()
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()


def test_everything_comes_back(tmp_path: Path) -> None:
    loop, again = make_loop(), make_loop(seed=1)
    train(loop, 2)
    path = save_checkpoint(tmp_path / "run", 2, loop, samples_read=10)
    assert path == tmp_path / "run/step-2"
    loaded = load_checkpoint(tmp_path / "run", again)
    assert loaded is not None
    assert (loaded.step, loaded.samples_read) == (2, 10)
    assert again.scheduler.get_last_lr() == loop.scheduler.get_last_lr()
    for own, there in zip(
        again.parts[0].state_dict().values(), loop.parts[0].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(own, there, rtol=0, atol=0)
    train(loop, 3)
    train(again, 3)
    for own, there in zip(again.parts[0].parameters(), loop.parts[0].parameters(), strict=True):
        torch.testing.assert_close(own, there, rtol=0, atol=0)


def test_the_newest_valid_one_is_loaded(tmp_path: Path) -> None:
    loop = make_loop()
    assert load_checkpoint(tmp_path, loop) is None
    for step in (1, 2, 3):
        train(loop, 1)
        save_checkpoint(tmp_path, step, loop, keep_latest=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    tensors = next((tmp_path / "step-3").glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    loaded = load_checkpoint(tmp_path, loop)
    assert loaded is not None
    assert loaded.step == 2
    with pytest.raises(TitanliteError, match=r"step-3 cannot be used: .* bytes"):
        load_checkpoint(tmp_path, loop, step=3)
    with pytest.raises(TitanliteError, match="there is no step-9 in"):
        load_checkpoint(tmp_path, loop, step=9)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    loop = make_loop()
    train(loop, 1)
    save_checkpoint(tmp_path, 1, loop)
    with pytest.raises(TitanliteError, match=r"model: 0.bias is \[4\] there and \[5\]"):
        load_checkpoint(tmp_path, make_loop(width=5))
    with pytest.raises(TitanliteError, match="has the state of AdamW"):
        load_checkpoint(tmp_path, make_loop(optimizer="SGD"))
    wrong = make_loop()
    wrong.scheduler = StepLR(wrong.optimizer, 1)
    with pytest.raises(TitanliteError, match="must be a LambdaLR, not a StepLR"):
        save_checkpoint(tmp_path, 2, wrong)
    assert isinstance(loop.scheduler, LambdaLR)


def test_convert_reads_it(tmp_path: Path) -> None:
    loop = make_loop()
    train(loop, 1)
    save_checkpoint(tmp_path / "run", 1, loop)
    count = to_safetensors(tmp_path / "run", tmp_path / "weights.safetensors")
    assert count == sum(tensor.numel() for tensor in loop.parts[0].state_dict().values())
