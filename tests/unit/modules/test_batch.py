"""The fields of a batch: cut by rows and by tokens, given to the modules that take them."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titanlite.errors import TitanliteError
from titanlite.modules.attention import make_layout
from titanlite.modules.batch import (
    IGNORE_INDEX,
    Batch,
    FieldDims,
    asked_for,
    call_model,
    check_forward,
    join,
    make_batch,
    takes,
)


class Blind(nn.Module):
    def forward(self, tokens, cache=None):
        return tokens, cache


class Seeing(nn.Module):
    def forward(self, tokens, positions):
        return tokens + positions


class Open(nn.Module):
    def forward(self, tokens, **fields):
        return sorted(fields)


class Odd(nn.Module):
    def forward(self, tokens, positions_T):
        return tokens


def wide_batch():
    """Two sequences of 8 tokens, with a mask [B, T], a label [B] and a scale that all share."""
    tokens = torch.arange(16).reshape(2, 8)
    more = {
        "mask": (tokens % 2 == 0, FieldDims(0, 1)),
        "label": (torch.tensor([3, 4]), FieldDims(0, None)),
        "scale": (torch.tensor([0.5]), FieldDims(None, None)),
    }
    return make_batch(tokens, more=more)


def test_targets_are_the_next_tokens_and_positions_count_from_zero():
    batch = make_batch(torch.tensor([[3, 1, 4], [1, 5, 9]]))
    assert batch.targets.tolist() == [[1, 4, IGNORE_INDEX], [5, 9, IGNORE_INDEX]]
    assert batch.positions.tolist() == [0, 1, 2]
    assert batch.dims["positions"] == (None, 0)
    assert (batch.num_sequences, int(batch.count_targets())) == (2, 4)
    own = make_batch(batch.tokens, batch.tokens, torch.ones(2, 3))
    assert own.targets is own.tokens
    assert own.dims["positions"] == (0, 1)


def test_each_field_is_cut_along_its_own_dimensions():
    batch = wide_batch()
    second = batch.rows(1, 2)
    assert second.tokens.tolist() == [list(range(8, 16))]
    assert (second["label"].tolist(), second["scale"].tolist()) == ([4], [0.5])
    assert second.positions.tolist() == list(range(8))
    layout = make_layout("headtail", 2)
    part = batch.shard(layout, 1)
    assert part.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    # Targets are made before the cut: the last of a rank's is held by the other.
    assert part.targets.tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]
    assert part.positions.tolist() == [2, 3, 4, 5]
    assert part["mask"].shape == (2, 4)
    assert part["label"].tolist() == [3, 4]
    assert batch.tokens_to(3)["mask"].shape == (2, 3)
    both = join([batch.rows(0, 1), second])
    assert all(torch.equal(both[name], batch[name]) for name in batch.fields)


def test_targets_can_be_left_out():
    left = wide_batch().leave_out(torch.tensor([[True], [False]]))
    assert int(left.count_targets()) == 7
    assert left.targets[0].tolist() == [IGNORE_INDEX] * 8
    images = Batch({"targets": torch.ones(2, 3, 4, 5)}, {"targets": FieldDims(0, None)})
    left = images.leave_out(torch.arange(8) < torch.tensor([[0], [1]]))
    assert left.targets[:, 0, 0, 0].tolist() == [1, IGNORE_INDEX]


def test_a_module_gets_the_fields_that_it_takes_by_name():
    batch = wide_batch()
    assert list(asked_for(Seeing(), batch)) == ["positions"]
    assert takes(Seeing(), "positions")
    assert not takes(Blind(), "positions")
    assert asked_for(Blind(), batch) == {}
    assert torch.equal(call_model(Seeing(), batch), batch.tokens + batch.positions)
    assert call_model(Blind(), batch) == (batch.tokens, None)
    assert call_model(Open(), batch) == ["label", "mask", "positions", "scale"]
    x = torch.ones(2, 8)
    assert torch.equal(call_model(Seeing(), batch, x), x + batch.positions)


def test_a_forward_that_needs_something_else_is_refused():
    for module in (Blind(), Seeing(), Open()):
        check_forward(module, ["positions"])
    message = (
        "forward of Odd needs `positions_T`, but besides tokens a batch has only `positions` and "
        "`mask`; rename or remove the argument"
    )
    with pytest.raises(TitanliteError, match=message):
        check_forward(Odd(), ["positions", "mask"])


class Moves(TorchFunctionMode):
    """Notes which copies do not wait: those of `Tensor.to` with its third argument."""

    def __init__(self) -> None:
        super().__init__()
        self.asynchronous: list[bool] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to:
            self.asynchronous.append(bool({**dict(enumerate(args)), **(kwargs or {})}.get(3)))
        return function(*args, **(kwargs or {}))


def test_only_a_copy_to_a_gpu_does_not_wait():
    """The CPU would read what a GPU has not yet sent."""
    for device, expected in (("cpu", False), ("meta", True)):
        with Moves() as moves:
            Batch({"x": torch.ones(2)}, {}).to(torch.device(device))
        assert moves.asynchronous == [expected]
