"""Drawing images: with a cache as without, and within a time limit."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titanlite.config import JobConfig
from titanlite.data.spec import DatasetSpec
from titanlite.errors import TitanliteError
from titanlite.models.image_transformer.config import FLAVORS
from titanlite.models.image_transformer.model import ImageTransformer
from titanlite.tools.sample import command
from titanlite.tools.sample import generate as sample
from titanlite.tools.sample.generate import Choice, Pace, generate, sample_sequences
from titanlite.training.initial_weights import generator_for

NUM_TOKENS = 3 * 16 * 8


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # One pixel at a time is too little work to share out.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> ImageTransformer:
    sizes = {"image_height": 16, "image_width": 8, "image_channels": 3, "zero_init_output": False}
    torch.manual_seed(0)
    return ImageTransformer(dataclasses.replace(FLAVORS["debug"], **sizes))


class WithoutCache(torch.nn.Module):
    def __init__(self, model: ImageTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(tokens_BT, positions)


class Clock:
    """Time that goes on by `seconds` at each look."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_options_replace_what_the_job_says_about_sampling(monkeypatch, tmp_path):
    """`titanlite sample`, up to the start of its ranks."""
    asked: list[JobConfig] = []

    def start(config: JobConfig, **_: object) -> None:
        asked.append(config)
        raise TitanliteError("no rank starts here")

    stored = {
        "model": {"name": "llama3", "flavor": "tiny"},
        "training": {"dataset": "pydoc"},
        "sampling": {"num_samples": 3, "temperature": 0.5},
        "debug": {"seed": 4},
    }
    monkeypatch.setattr(command, "_open", lambda path: (path, None, stored))
    monkeypatch.setattr(command, "_stored_bytes", lambda *_: 0)
    monkeypatch.setattr(command, "check_start", start)
    options = {"--prompt": "ab", "--num-tokens": 7, "--top-k": 2, "--top-p": 0.5, "--seed": 9}
    words = [str(word) for option in options.items() for word in option]
    for given in ([], [*words, "--temperature", "0"]):
        with pytest.raises(TitanliteError, match="no rank starts here"):
            command.main([str(tmp_path), *given])
    before, after = (config.sampling for config in asked)
    assert (before.num_samples, before.prompt, before.temperature) == (3, "", 0.5)
    assert (after.num_samples, after.prompt, after.temperature) == (1, "ab", 0)
    assert (after.num_tokens, after.top_k, after.top_p) == (7, 2, 0.5)
    assert [config.debug.seed for config in asked] == [4, 9]


def draw(model: torch.nn.Module, num_tokens: int, pace: Pace | None = None, **options):
    generators = [generator_for(0, f"sample {index}") for index in range(8)]
    start = torch.arange(8)[:, None]
    return generate(model, start, num_tokens, generators, pace=pace, **options)


def test_a_model_without_a_cache_draws_the_same_images(model):
    assert torch.equal(draw(model, 40), draw(WithoutCache(model), 40))


def test_images_are_given_up_where_time_is_short_and_the_others_are_the_same(model):
    seen: list[int] = []
    all_images = draw(model, NUM_TOKENS, on_tokens=seen.append)
    assert seen == [128, 256]
    assert all_images.shape == (8, NUM_TOKENS)
    # Two looks, 10 s after 128 pixels and 20 s after 256: 30 s in all.
    assert torch.equal(draw(model, NUM_TOKENS, Pace(30, Clock(10))), all_images)
    assert torch.equal(draw(model, NUM_TOKENS, Pace(29, Clock(10))), all_images[:2])


def test_a_pixel_that_costs_more_the_later_it_comes_is_foreseen():
    """1, 2, 3 and 4 s a look: at the fourth the ten left are known to take 90 s, not 40."""

    def is_kept(limit_seconds: float) -> list[bool]:
        times = iter([0, 1, 3, 6, 10])
        pace = Pace(limit_seconds, lambda: next(times))
        return [pace.keeps(128, 128 * left) for left in (13, 12, 11, 10)]

    assert is_kept(101) == [True] * 4
    assert is_kept(99) == [True] * 3 + [False]


def test_one_image_is_drawn_however_long_it_takes(model):
    start = torch.zeros(1, 1, dtype=torch.long)
    image = generate(model, start, NUM_TOKENS, [generator_for(0, "x")], pace=Pace(1, Clock(10)))
    assert image.shape == (1, NUM_TOKENS)


def test_a_rank_that_is_asked_to_stop_leaves_off(model, monkeypatch):
    monkeypatch.setattr(sample, "_fits", lambda job: True)
    monkeypatch.setattr(sample, "whole_model", lambda job: model)
    monkeypatch.setattr(sample.dist, "all_reduce", lambda images: None)
    job: Any = SimpleNamespace(
        world=SimpleNamespace(
            rank=0, size=1, device=torch.device("cpu"), set_timeout=lambda *limit: None
        ),
        resolved=SimpleNamespace(seq_len=NUM_TOKENS),
        data=DatasetSpec("own", "", build="none"),
        config=SimpleNamespace(debug=SimpleNamespace(seed=0), sampling=JobConfig().sampling),
        dataset=SimpleNamespace(sample=lambda index: torch.zeros(NUM_TOKENS, dtype=torch.long)),
    )
    monkeypatch.setattr(sample, "TOKENS_AT_ONCE", NUM_TOKENS)
    seen: list[int] = []

    def draw_until(looks: int) -> int:
        seen.clear()
        images = sample_sequences(
            job, 3, on_tokens=seen.append, is_stopped=lambda: len(seen) >= looks
        )
        return len(images)

    assert draw_until(9) == 3
    # Half of the second one is drawn.
    assert draw_until(3) == 1
    assert seen == [128, 256, 128]
    assert draw_until(0) == 0


def test_another_batch_is_begun_only_while_half_the_time_is_left():
    assert Pace(100, Clock(10)).allows_another()
    assert not Pace(10, Clock(10)).allows_another()


LOGITS = torch.tensor([[3.0, 1.0, 2.0, 2.5, -torch.inf, 9.0]])


def kept(**options: Any) -> list[int]:
    """The tokens that may be sampled; the last logit is padding of the vocabulary."""
    logits = Choice(vocab_size=5, **options).keep(LOGITS)
    return logits[0].isfinite().nonzero().flatten().tolist()


def test_tokens_that_may_be_sampled():
    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 3]
    assert kept(top_k=9) == [0, 1, 2, 3]
    # Probabilities of 0, 3, 2 and 1: 0.474, 0.287, 0.174, 0.064.
    assert kept(top_p=0.4) == [0]
    assert kept(top_p=0.5) == [0, 3]
    assert kept(top_p=0.8) == [0, 2, 3]
    assert kept(top_p=0.8, top_k=2) == [0, 3]
    # Nothing is so unlikely that nothing is left.
    assert kept(top_p=1e-9) == [0]
    # A higher temperature makes the others likelier.
    assert kept(top_p=0.5, temperature=9.0) == [0, 3]
    assert kept(top_p=0.6, temperature=9.0) == [0, 2, 3]


def test_tokens_are_sampled_as_often_as_they_are_likely():
    choice, count = Choice(temperature=0.5, top_k=3, vocab_size=5), 4000
    generators = [torch.Generator().manual_seed(0)] * count
    drawn = torch.bincount(choice(LOGITS.expand(count, -1), generators).flatten(), minlength=6)
    expected = choice.keep(LOGITS).softmax(-1)[0]
    assert drawn[expected == 0].sum() == 0
    # Four standard deviations.
    assert ((drawn / count - expected).abs() <= 4 * (expected / count).sqrt()).all()


def test_at_temperature_0_the_likeliest_token_is_taken_and_no_random_number():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert Choice(0, vocab_size=5)(LOGITS, [generator]).tolist() == [[0]]
    assert Choice(0)(LOGITS, [generator]).tolist() == [[5]]
    assert torch.equal(generator.get_state(), before)


class Counting(torch.nn.Module):
    """The next token is one more; row i of the prompt begins with i."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((tokens_BT + 1) % 8, 8).float()


def test_a_sample_ends_with_its_end_token_and_sampling_with_the_last_row():
    start = torch.tensor([[3], [5]])
    generators = [generator_for(0, "x")] * 2
    seen: list[list[int]] = []
    tokens = generate(
        Counting(),
        start,
        9,
        generators,
        Choice(0),
        end_token=6,
        on_new=lambda new: seen.append(new.flatten().tolist()),
    )
    assert tokens.tolist() == [[3, 4, 5, 6, 6, 6, 6, 6, 6], [5, 6, 6, 6, 6, 6, 6, 6, 6]]
    assert seen == [[4, 6], [5, 6], [6, 6]]
