"""Llama 3 and GPT-2: published sizes and initial values, rotary positions, causality, the cache."""

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanlite.config import parse_args, resolve_job
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.build import build_model, count_flops
from titanlite.models.gpt2.config import FLAVORS as GPT2_FLAVORS
from titanlite.models.llama3.config import FLAVORS as LLAMA3_FLAVORS
from titanlite.models.llama3.config import Llama3Config
from titanlite.models.llama3.model import RotaryEmbedding, rotary_frequencies
from titanlite.modules.batch import make_batch
from titanlite.modules.tied import find_tied
from titanlite.registry import MODELS
from titanlite.tools.sample.generate import generate, number_documents
from titanlite.training.initial_weights import generator_for, initialize

FLAVORS: dict[str, dict[str, Any]] = {"llama3": LLAMA3_FLAVORS, "gpt2": GPT2_FLAVORS}
NAMES = tuple(FLAVORS)
T = 24


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    with torch.device("meta"):
        sizes = replace(FLAVORS[name]["tiny"], n_layers=2, **changes)
        model = build_model(MODELS[name], sizes, dtype)
    initialize(model, seed, torch.device("cpu"))
    return model


def tokens_of(num_sequences: int = 2, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(272, (num_sequences, T), generator=generator)


PUBLISHED = {
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama3", "Mixtral-8x7B"): 46_702_792_704,
    ("gpt2", "124M"): 124_439_808,
    ("gpt2", "355M"): 354_823_168,
    ("gpt2", "774M"): 774_030_080,
    ("gpt2", "1.5B"): 1_557_611_200,
}


@pytest.mark.parametrize(
    ("name", "flavor"), [(name, flavor) for name in NAMES for flavor in FLAVORS[name]]
)
def test_parameters_are_counted(name: str, flavor: str) -> None:
    sizes = FLAVORS[name][flavor]
    with torch.device("meta"):
        model = build_model(MODELS[name], sizes, torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sizes.num_parameters == PUBLISHED.get((name, flavor), count)
    if flavor.startswith("megatron-"):
        billions = float(flavor.removeprefix("megatron-").removesuffix("B"))
        assert round(count / 1e9, 0 if billions > 1000 else 1) == billions
    others = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False))
    assert all(name.endswith(".moe.expert_bias") for name in others)


def test_small_flavors_are_small() -> None:
    for name in NAMES:
        assert FLAVORS[name]["tiny"].num_parameters < 1e6
        assert FLAVORS[name]["small"].num_parameters == pytest.approx(5e6, rel=0.05)
    # 3.2's 1B is tied: https://huggingface.co/meta-llama/Llama-3.2-1B
    one = Llama3Config(
        dim=2048, n_layers=16, n_kv_heads=8, ffn_dim_multiplier=1.5, tie_embeddings=True
    )
    assert one.num_parameters == 1_235_814_400


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_those_of_the_products(name: str) -> None:
    """Of the matrix products, norms and biases count in 6 N but do nearly nothing."""
    sizes = FLAVORS[name]["tiny"]
    with torch.device("meta"):
        model = build_model(MODELS[name], sizes, torch.float32)
        counted = count_flops(model, make_batch(torch.zeros(2, 64, dtype=torch.int64)))
    assert counted == pytest.approx(2 * 64 * sizes.flops_per_token(64), rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_no_position_sees_a_later_one(name: str) -> None:
    model, tokens = build(name), tokens_of()
    changed = tokens.clone()
    changed[:, 15] = (tokens[:, 15] + 1) % 272
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_gives_the_logits_of_the_whole_sequence(name: str) -> None:
    model, tokens = build(name), tokens_of(3)
    cache = model.make_cache(T)
    with torch.inference_mode():
        # A prompt at once, then some tokens at once, then one by one.
        parts = [tokens[:, :7], tokens[:, 7:10], *tokens[:, 10:20].split(1, dim=1)]
        steps = [model(part, cache=cache) for part in parts]
        torch.testing.assert_close(torch.cat(steps, dim=1), model(tokens[:, :20]))
        cache.keep_first(2)
        last = model(tokens[:2, 20:], cache=cache)
        torch.testing.assert_close(last, model(tokens[:2])[:, 20:])


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_keeps_documents_apart(name: str) -> None:
    model, tokens = build(name), tokens_of(3)
    # Ends before, between and within the parts below, at other places in each row.
    tokens.remainder_(256)
    for row, ends in enumerate(([0, 6, 12], [8], [9, 10, 19])):
        tokens[row, ends] = 256
    fields = number_documents(tokens, 256)
    assert fields["documents"][0].tolist() == [0] + [1] * 6 + [2] * 6 + [3] * (T - 13)
    assert fields["positions"][1].tolist() == [*range(9), *range(T - 9)]
    cache = model.make_cache(T)
    steps = []
    with torch.inference_mode():
        for part in torch.arange(T).split([7, 3] + [1] * (T - 10)):
            new = {key: field[:, part] for key, field in fields.items()}
            steps.append(model(tokens[:, part], **new, cache=cache))
        whole = model(tokens, **fields)
        torch.testing.assert_close(torch.cat(steps, dim=1), whole)
        assert not torch.allclose(whole, model(tokens), atol=1e-3)
        alone = model(tokens[1:2, 9:])
    torch.testing.assert_close(whole[1:2, 9:], alone)


class WithoutCache(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor
    ) -> torch.Tensor:
        return self.model(tokens, positions, documents)


@pytest.mark.parametrize("name", NAMES)
def test_sampling_starts_a_document_after_an_end_of_text(name: str) -> None:
    model, prompt = build(name), tokens_of(2)[:, :5] % 256
    prompt[:, 0] = 256
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.mul_(5)  # at its initial values the context hardly matters
    options = {"end_token": 256, "separates_documents": True}

    def sample(model: torch.nn.Module, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
        generators = [generator_for(0, f"sample {index}") for index in range(len(prompt))]
        return generate(model, prompt, prompt.size(1) + 10, generators, **options)

    found = sample(model, prompt, **options)
    assert torch.equal(found, sample(WithoutCache(model), prompt, **options))
    # The document begins after the end of the one before.
    assert torch.equal(found[:, 1:], sample(model, prompt[:, 1:], end_token=256))
    assert not torch.equal(found, sample(model, prompt, end_token=256))


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_read_as_if_it_were_alone(name: str) -> None:
    model, tokens = build(name), tokens_of()
    lengths = ([5, 1, 12, 6], [20, 4])
    documents = torch.stack(
        [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths]
    )
    positions = torch.stack([torch.cat([torch.arange(i) for i in n]) for n in lengths])
    found = model(tokens, positions, documents)
    for row, row_lengths in enumerate(lengths):
        alone = [model(part[None]) for part in tokens[row].split(row_lengths)]
        torch.testing.assert_close(found[row], torch.cat(alone, dim=1)[0])
    assert not torch.allclose(found, model(tokens, positions))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    config = replace(LLAMA3_FLAVORS["tiny"], dim=64, n_heads=4, rope_theta=100.0)
    rotary = RotaryEmbedding(config).double()
    rotary.init_buffers()
    q, k = torch.randn(2, 1, 4, 8, 16, dtype=torch.float64)
    positions = torch.arange(8)

    def scores(positions: Tensor) -> Tensor:
        rotated_q, rotated_k = rotary(q, k, positions)
        return rotated_q @ rotated_k.mT

    torch.testing.assert_close(scores(positions), scores(positions + 1000))
    torch.testing.assert_close(scores(positions), scores(positions[None] + 7))
    assert not torch.allclose(scores(positions), scores(2 * positions))
    # Features 2i and 2i + 1 as a complex number are multiplied by exp(i angle).
    turned = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    turned = turned * torch.exp(1j * positions[:, None] * rotary_frequencies(config))
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(rotary(q, k, positions)[0], expected)


def test_rotary_frequencies_are_llama_31s() -> None:
    """Against the three cases of arXiv 2407.21783's reference code, wavelength by wavelength."""
    config = LLAMA3_FLAVORS["8B"]
    found = rotary_frequencies(config)
    for index, frequency in enumerate(found.tolist()):
        plain = 500000.0 ** (-2 * index / 128)
        wavelength = 2 * math.pi / plain
        expected = plain
        if wavelength > 8192 / 1:
            expected = plain / 8
        elif wavelength >= 8192 / 4:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert frequency == pytest.approx(expected, rel=1e-14)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(500000.0 ** (-126 / 128) / 8)
    unscaled = rotary_frequencies(replace(config, rope_scaling_factor=1.0))
    torch.testing.assert_close(unscaled, 500000.0 ** (-torch.arange(64, dtype=torch.float64) / 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotary_angles_keep_their_precision(dtype: torch.dtype) -> None:
    """In bfloat16 the position 8191 would be 8192, and its angle off by more than a turn."""
    model = build("llama3", dtype=dtype)
    rotary = model.layers["0"].attention.rotary
    exact = rotary_frequencies(model.config)
    kept = torch.promote_types(dtype, torch.float32)
    assert torch.equal(rotary.frequencies, exact.to(kept))
    q = torch.zeros(1, 1, 1, 16, dtype=dtype)
    q[..., ::2] = 1
    found, _ = rotary(q, q, torch.tensor([8191]))
    expected = torch.stack([(8191 * exact).cos(), (8191 * exact).sin()], -1).flatten()
    assert (found.flatten() - expected).abs().max() < {torch.bfloat16: 5e-3}.get(dtype, 1e-3)
    assert found.dtype == dtype


def test_initial_values_are_torchtitans() -> None:
    """std of each weight; depth-dependent for what adds to the residual stream."""
    model = build("llama3", dim=256, dtype=torch.float32)

    def std(name: str) -> float:
        return model.get_parameter(name).std().item()

    assert std("tok_embeddings.weight") == pytest.approx(1.0, rel=0.05)
    # The standard deviation of a normal cut at three of its own is 0.987 of it.
    assert std("output.weight") == pytest.approx(0.9867 * 256**-0.5, rel=0.02)
    assert model.output.weight.abs().max().item() <= 3 * 256**-0.5
    for index in range(2):
        depth = 0.02 / math.sqrt(2 * (index + 1))
        stds = {"attention.wq": 0.02, "attention.wk": 0.02, "attention.wv": 0.02}
        stds |= {"feed_forward.w1": 0.02}
        stds |= dict.fromkeys(("attention.wo", "feed_forward.w2", "feed_forward.w3"), depth)
        for layer, expected in stds.items():
            assert std(f"layers.{index}.{layer}.weight") == pytest.approx(expected, rel=0.03)
        assert (model.layers[str(index)].ffn_norm.weight == 1).all()
    even = build("llama3", depth_init=False, dtype=torch.float32)
    for index in range(2):
        wo = even.layers[str(index)].attention.wo.weight
        assert wo.std().item() == pytest.approx(0.01, rel=0.05)


def test_a_tied_table_starts_as_the_output_layer() -> None:
    model = build("llama3", tie_embeddings=True, dtype=torch.float32)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.output.weight.std().item() == pytest.approx(0.9867 * 128**-0.5, rel=0.02)
    with torch.no_grad():
        assert model(tokens_of()).std().item() == pytest.approx(1.0, abs=0.2)


def test_gpt2_starts_as_published() -> None:
    model = build("gpt2", dtype=torch.float32)
    assert find_tied(model) == {"output.weight": "tok_embeddings.weight"}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            std = {"pos_embeddings.weight": 0.01}.get(name, 0.02)
            std = 0.01 if name.endswith(("wo.weight", "w2.weight")) else std  # 0.02 / sqrt(2 * 2)
            assert parameter.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_initial_values_depend_on_seed_and_name_alone(name: str) -> None:
    one, same, other = build(name, 1), build(name, 1), build(name, 2)
    for key, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(key))
        drawn = torch.empty(parameter.shape)
        one.init_parameter(key, drawn, generator_for(1, key))
        assert torch.equal(parameter, drawn.to(parameter.dtype))
    key = "layers.1.attention.wq.weight"
    assert not torch.equal(one.get_parameter(key), other.get_parameter(key))


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_runs_without_what_others_hold(name: str) -> None:
    whole, first, second = (build(name) for _ in range(3))
    tokens = tokens_of()
    first.norm = first.output = None
    del first.layers["1"], second.layers["0"]
    second.tok_embeddings = None
    if name == "gpt2":
        second.pos_embeddings = None
    between = first(tokens)
    assert between.shape == (T, 2, 128)
    torch.testing.assert_close(second(between, torch.arange(T)), whole(tokens))


LLAMA3_8B = LLAMA3_FLAVORS["8B"]
PROBLEMS: list[tuple[Any, dict[str, int], int, list[tuple[str, str]]]] = [
    (LLAMA3_8B, {"tp": 8}, 8192, []),
    (
        LLAMA3_8B,
        {"tp": 16},
        8192,
        [("parallelism.tensor_parallel_degree", "16 does not divide model.n_kv_heads 8; give 8")],
    ),
    (
        replace(LLAMA3_8B, n_heads=5),
        {},
        8192,
        [
            ("model.n_heads", "5 does not divide model.dim 4096; give 4 or 8"),
            ("model.n_kv_heads", "8 does not divide model.n_heads 5; give 5"),
        ],
    ),
    (
        replace(LLAMA3_8B, n_heads=4096, n_kv_heads=None),
        {},
        8192,
        [
            (
                "model.n_heads",
                "4096 gives heads of an odd width, 1, which rotary embeddings cannot pair; give a "
                "number of heads that divides model.dim / 2",
            )
        ],
    ),
    (
        replace(LLAMA3_8B, rope_scaling_low_freq_factor=4.0),
        {},
        8192,
        [
            (
                "model.rope_scaling_low_freq_factor",
                "4 is not below rope_scaling_high_freq_factor 4; give less",
            )
        ],
    ),
    (
        GPT2_FLAVORS["1.5B"],
        {"tp": 2},
        2048,
        [
            ("parallelism.tensor_parallel_degree", "2 does not divide model.n_heads 25; give 1"),
            (
                "training.seq_len",
                "2048 is more than the 1024 positions of model.max_seq_len; give at most that many "
                "tokens, or raise model.max_seq_len",
            ),
        ],
    ),
]


@pytest.mark.parametrize(("sizes", "degrees", "seq_len", "problems"), PROBLEMS)
def test_problems_name_key_and_cure(sizes, degrees, seq_len, problems) -> None:
    assert sizes.problems(ParallelDims(**degrees), seq_len) == problems


def test_a_torchtitan_job_names_the_model_and_its_flavor() -> None:
    job = resolve_job(
        parse_args(
            [
                *("--model.name=llama3", "--model.flavor=debugmodel", "--training.seq_len=128"),
                *("--training.dataset=synthetic", "--model.n_kv_heads=4"),
            ]
        )
    )
    assert (job.model.n_kv_heads, job.model.vocab_size, job.seq_len) == (4, 2048, 128)
    with pytest.raises(ConfigError, match=r"did you mean model\.n_layers"):
        resolve_job(parse_args(["--model.name=llama3", "--model.num_layers=3"]))


def test_the_default_flavor_is_torchtitans() -> None:
    assert next(iter(LLAMA3_FLAVORS)) == "debugmodel"
    assert isinstance(build("llama3").output, nn.Linear)


def test_the_folder_is_no_second_package():
    with pytest.raises(ImportError, match=r"models: import titanlite\.models instead"):
        importlib.import_module("models")
