"""The account of tensors and the fingerprints of copies, without ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from titanlite.errors import TitanliteError
from titanlite.modules.names import canonical_name, unwrapped_name
from titanlite.parallelize.tensor_account import (
    BUFFER,
    PARAMETER,
    TensorAccount,
    merged,
    require_whole,
    tensors_of,
)
from titanlite.self_check import _bits, _norms
from titanlite.tools.planner.tensors import describe


class Wrapper(nn.Module):
    """A user's own wrapper, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.zeros(3), persistent=False)


def test_an_attribute_called_module_keeps_its_name() -> None:
    model = nn.Sequential(Wrapper())
    names = {
        "0.weight": (PARAMETER, (2,)),
        "0.module.weight": (PARAMETER, (2, 2)),
        "0.count": (BUFFER, ()),
    }
    assert tensors_of(model, {}) == names
    assert canonical_name("0._orig_mod._checkpoint_wrapped_module.module.weight") == (
        "0.module.weight"
    )
    parallel = nn.DataParallel(model)
    assert unwrapped_name(parallel, "module.0.module.weight") == "0.module.weight"
    assert tensors_of(parallel, {}) == names


def test_two_tensors_of_one_name_are_an_error() -> None:
    model = nn.Linear(2, 2)
    model.add_module("_orig_mod", nn.Linear(2, 2))
    with pytest.raises(TitanliteError, match=r"^_orig_mod\.weight: two parameters of Linear have "):
        tensors_of(model, {})
    model = Wrapper()
    model.add_module("_orig_mod", Wrapper())
    del model._orig_mod.module, model._orig_mod.weight
    with pytest.raises(TitanliteError, match=r"^_orig_mod\.count: two buffers of Wrapper have the"):
        tensors_of(model, {})


def test_a_lazy_parameter_is_an_error() -> None:
    with pytest.raises(TitanliteError, match=r"^0\.weight: a lazy parameter has no shape before "):
        tensors_of(nn.Sequential(nn.LazyLinear(2)), {})


ONE = TensorAccount("w", PARAMETER, (4, 2), True, (0,), {"tp": "replicated"}, {"tp": "DTensor"})


@pytest.mark.parametrize(
    ("account", "line"),
    [
        (None, "w: no rank holds this parameter; "),
        (replace(ONE, shape=(4, 1)), r"w: it is \[4, 2\] in the plain model, but \[4, 1\] after "),
        (replace(ONE, name="v"), "w: no rank holds this parameter; "),
        (
            replace(ONE, completed={"dp_shard": ""}),
            "w: it is replicated over dp_shard, and nothing",
        ),
    ],
)
def test_a_tensor_without_an_answer_is_an_error(account: TensorAccount | None, line: str) -> None:
    plain = {"w": (PARAMETER, (4, 2))}
    require_whole({"w": ONE}, plain)
    with pytest.raises(TitanliteError, match=f"^{line}"):
        require_whole({} if account is None else {account.name: account}, plain)
    with pytest.raises(TitanliteError, match=r"^v: the plain model has no such parameter; "):
        require_whole({"w": ONE, "v": replace(ONE, name="v")}, plain)


def test_stages_that_share_a_parameter_are_merged() -> None:
    alone = replace(ONE, name="alone", stages=(1,))
    (shared, other) = merged(
        [{"w": ONE}, {"w": replace(ONE, stages=(1,)), "alone": alone}]
    ).values()
    assert shared.stages == (0, 1)
    assert shared.copied_over == ("pp", "tp")
    assert other.copied_over == ("tp",)
    lines = describe({"w": shared, "alone": other}, 100)
    assert lines[1].split("  ")[-1] == "the step, over stages: pp; DTensor: tp"
    assert "each of 0-1" in lines[1]
    local = replace(ONE, kind=BUFFER, stages=(0, 1), layout={"tp": "local"})
    assert local.copied_over == ()


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        *(torch.int64, torch.uint8, torch.complex64, torch.bool),
    ],
)
def test_every_bit_changes_a_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, 3).to(dtype)
    whole, seen = _bits([tensor, torch.zeros(2)]), set()
    raw = tensor.view(torch.uint8).reshape(-1)
    for place in range(raw.numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[place] ^= 1 << bit
            seen.add(int(_bits([tensor, torch.zeros(2)])))
            raw[place] ^= 1 << bit
    assert torch.equal(_bits([tensor, torch.zeros(2)]), whole)
    assert int(whole) not in seen


def test_a_fingerprint_depends_on_the_place_of_a_value_and_not_on_strides() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert int(_bits([tensor])) != int(_bits([tensor.flip(0)]))
    assert int(_bits([tensor])) == int(_bits([tensor.T.contiguous().T]))
    assert float(_norms([tensor])[1]) != float(_norms([tensor.flip(0)])[1])
    assert torch.allclose(_norms([tensor]), _norms([tensor * (1 + 1e-12)]), rtol=1e-9)
