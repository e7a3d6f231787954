"""TokenDropout: how much it drops, what its masks depend on, and what they do not."""

import pytest
import torch

from titanlite.errors import TitanliteError
from titanlite.modules.dropout import TokenDropout

NUMBERS = torch.arange(64)[:, None] * 128 + torch.arange(128)


def make(p: float = 0.25, *, seed: int = 0, name: str = "layers.0.dropout") -> TokenDropout:
    dropout = TokenDropout(p)
    dropout.set_key(seed, name)
    return dropout


def mask(dropout: TokenDropout, numbers: torch.Tensor = NUMBERS, dim: int = 96) -> torch.Tensor:
    return dropout(torch.ones(*numbers.shape, dim), numbers) == 0


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_share_that_is_dropped_is_p_along_every_dimension(p):
    dropped = mask(make(p)).double()
    count = dropped.numel()
    for dims in [(1, 2), (0, 2), (0, 1)]:
        means = dropped.mean(dims)
        deviation = (p * (1 - p) / (count / means.numel())) ** 0.5
        assert (means - p).abs().max() < 5 * deviation


def test_masks_of_tokens_features_modules_and_seeds_are_independent():
    one = mask(make(0.5))
    others = {
        "another module": mask(make(0.5, name="layers.1.dropout")),
        "another seed": mask(make(0.5, seed=1)),
        "the next epoch": mask(make(0.5), NUMBERS + NUMBERS.numel()),
        "a run's end": mask(make(0.5), NUMBERS + 2**40),
        "the next token": one.roll(1, 1),
        "the next sequence": one.roll(1, 0),
        "the next feature": one.roll(1, 2),
    }
    for name, other in others.items():
        alike = (one == other).double().mean()
        assert abs(alike - 0.5) < 5 * 0.5 / one.numel() ** 0.5, name


def test_what_is_kept_is_scaled_and_its_gradient_too():
    x = torch.randn(4, 128, 96, dtype=torch.float64, requires_grad=True)
    dropout = make(0.2)
    y = dropout(x, NUMBERS[:4])
    kept = ~mask(dropout, NUMBERS[:4])
    assert torch.equal(y, torch.where(kept, x / 0.8, 0.0))
    y.sum().backward()
    assert torch.equal(x.grad, kept / torch.tensor(0.8, dtype=torch.float64))


def test_a_part_of_the_tokens_or_features_has_its_part_of_the_mask():
    dropout = make()
    whole = mask(dropout)
    assert torch.equal(mask(dropout, NUMBERS[3:7, 32:64]), whole[3:7, 32:64])
    last = dropout(torch.ones(64, 128, 32), NUMBERS, first_feature=64) == 0
    assert torch.equal(last, whole[..., 64:])


def test_evaluation_and_zero_drop_nothing():
    x = torch.randn(2, 3)
    assert make().eval()(x) is x
    assert make(0.0)(x) is x


def test_misuse_is_one_line():
    with pytest.raises(TitanliteError, match="needs token_numbers in training"):
        make()(torch.ones(2, 3))
    with pytest.raises(TitanliteError, match="at least 0 and below 1, not 1"):
        TokenDropout(1.0)
