"""The sampler: the global batch of a step does not depend on the plan."""

import pytest
import torch

from titanlite.data.images.digits import build_digits
from titanlite.data.sampler import GlobalBatchSampler, iterate_once
from titanlite.data.spec import Dataset
from titanlite.modules.batch import IGNORE_INDEX, join, make_targets


class Numbered:
    """Sample i is [i, i], so a batch shows which samples it holds."""

    def __init__(self, num_samples: int | None = None) -> None:
        self.num_samples = num_samples

    def sample(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index])


def plans(global_batch_size: int) -> list[tuple[int, int]]:
    return [
        (dp_degree, local)
        for dp_degree in range(1, global_batch_size + 1)
        for local in range(1, global_batch_size + 1)
        if global_batch_size % (dp_degree * local) == 0
    ]


@pytest.mark.parametrize(("dp_degree", "local_batch_size"), plans(24))
def test_the_union_over_ranks_is_the_next_global_batch(
    dp_degree: int, local_batch_size: int
) -> None:
    samplers = [
        GlobalBatchSampler(Numbered(), dp_degree, rank, local_batch_size)
        for rank in range(dp_degree)
    ]
    for step in range(3):
        batches = [sampler.draw(24) for sampler in samplers]
        assert {len(own) for own in batches} == {24 // (dp_degree * local_batch_size)}
        assert {tuple(b.tokens.shape) for own in batches for b in own} == {(local_batch_size, 2)}
        drawn = torch.cat([batch.tokens[:, 0] for own in batches for batch in own])
        assert sorted(drawn.tolist()) == list(range(24 * step, 24 * (step + 1)))
        assert {sampler.state for sampler in samplers} == {24 * (step + 1)}


def test_real_data_come_alike_under_every_plan() -> None:
    digits = build_digits("train", seed=5, channels=1, vocab_size=17)
    reference = global_batches(digits, 1, 12)
    for dp_degree, local_batch_size in plans(12):
        assert torch.equal(global_batches(digits, dp_degree, local_batch_size), reference)


def global_batches(dataset: Dataset, dp_degree: int, local_batch_size: int) -> torch.Tensor:
    """The steps around the end of the first epoch, [step, 12, T], in rank order."""
    parts = []
    for rank in range(dp_degree):
        sampler = GlobalBatchSampler(dataset, dp_degree, rank, local_batch_size)
        sampler.state = 1480
        parts.append(torch.stack([join(sampler.draw(12)).tokens for _ in range(3)]))
    return torch.cat(parts, dim=1)


def test_state_is_all_there_is_to_resume() -> None:
    straight = GlobalBatchSampler(Numbered(), 2, 1, 2)
    for _ in range(5):
        straight.draw(8)
    resumed = GlobalBatchSampler(Numbered(), 2, 1, 2)
    resumed.state = straight.state
    assert [b.tokens.tolist() for b in resumed.draw(8)] == [
        b.tokens.tolist() for b in straight.draw(8)
    ]


@pytest.mark.parametrize("dp_degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("local_batch_size", [1, 2, 5])
@pytest.mark.parametrize("num_samples", [None, 1, 6, 13])
def test_validation_reads_the_same_samples_once_under_every_plan(
    dp_degree: int, local_batch_size: int, num_samples: int | None
) -> None:
    seen: list[int] = []
    lengths = set()
    for rank in range(dp_degree):
        batches = list(
            iterate_once(
                Numbered(11),
                local_batch_size=local_batch_size,
                dp_degree=dp_degree,
                dp_rank=rank,
                num_samples=num_samples,
            )
        )
        lengths.add(len(batches))
        for batch in batches:
            assert batch.tokens.shape == (local_batch_size, 2)
            assert batch.tokens.max() < 11
            counts = (batch.targets != IGNORE_INDEX).any(dim=1)
            # One target in each sequence of two tokens; padding rows are at the end.
            assert batch.count_targets() == counts.sum()
            assert counts.tolist() == sorted(counts.tolist(), reverse=True)
            seen += batch.tokens[counts, 0].tolist()
    # A rank with fewer batches than the others would make them hang in a collective.
    assert len(lengths) == 1
    assert sorted(seen) == list(range(min(num_samples or 11, 11)))


def test_an_endless_set_is_validated_only_up_to_a_number() -> None:
    endless = Numbered(None)
    with pytest.raises(ValueError, match="give the number of samples"):
        next(iterate_once(endless, local_batch_size=2, dp_degree=1, dp_rank=0))
    batches = list(iterate_once(endless, local_batch_size=2, dp_degree=1, dp_rank=0, num_samples=4))
    assert [int(batch.count_targets()) for batch in batches] == [2, 2]


def test_targets_are_the_next_token_and_the_last_position_has_none() -> None:
    tokens = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    assert make_targets(tokens).tolist() == [[1, 4, 1, -100], [9, 2, 6, -100]]
    assert tokens.tolist() == [[3, 1, 4, 1], [5, 9, 2, 6]]
    # cross_entropy ignores IGNORE_INDEX by default.
    logits = torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(0))
    whole = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), make_targets(tokens).flatten(), reduction="sum"
    )
    by_hand = -sum(
        logits[b, t].log_softmax(-1)[tokens[b, t + 1]] for b in range(2) for t in range(3)
    )
    assert torch.allclose(whole, torch.as_tensor(by_hand))
