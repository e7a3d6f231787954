"""The fields of a batch go to the modules that take them, and to no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.batch import asked_for, call_model, check_forward, dims_of
from titanlite.errors import TitanliteError


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


def test_a_module_gets_the_fields_that_it_takes_by_name():
    tokens, positions = torch.zeros(2, 3), torch.arange(3)
    assert list(asked_for(Seeing(), positions=positions)) == ["positions"]
    assert asked_for(Blind(), positions=positions) == {}
    assert torch.equal(call_model(Seeing(), tokens, positions=positions), tokens + positions)
    assert call_model(Blind(), tokens, positions=positions) == (tokens, None)
    assert call_model(Open(), tokens, positions=positions) == ["positions"]


def test_a_forward_that_needs_something_else_is_refused():
    for module in (Blind(), Seeing(), Open()):
        check_forward(module)
    message = "forward of Odd needs `positions_T`, and beside the tokens a batch has `positions`"
    with pytest.raises(TitanliteError, match=message):
        check_forward(Odd())


def test_positions_are_alike_for_all_sequences_or_of_each():
    assert (
        dims_of("positions", torch.arange(4)).batch,
        dims_of("positions", torch.arange(4)).sequence,
    ) == (None, 0)
    by_sequence = dims_of("positions", torch.zeros(2, 4))
    assert (by_sequence.batch, by_sequence.sequence) == (0, 1)
