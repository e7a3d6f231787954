"""Experts: routing, products, dispatch, and both kinds of balancing, in one process."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titanlite.config import JobConfig, resolve_job
from titanlite.errors import ConfigError, collecting
from titanlite.models.build import build_model
from titanlite.models.llama3.config import FLAVORS
from titanlite.models.llama3.hf import FORMAT
from titanlite.modules.experts import Balancer, ExpertLayer, Router, expert_layers
from titanlite.modules.experts.balance import sequence_loss
from titanlite.modules.experts.products import prefers_grouped, swiglu
from titanlite.parallelize import apply_float8, find_plan
from titanlite.registry import MODELS
from titanlite.training.initial_weights import initialize

T, B, D, H, E, K = 12, 3, 16, 24, 6, 2


def make_layer(dtype: torch.dtype = torch.float64, **options: Any) -> ExpertLayer:
    torch.manual_seed(0)
    layer = ExpertLayer(D, H, E, K, **options).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return layer


def make_input(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(T, B, D, dtype=dtype, generator=torch.Generator().manual_seed(1))


def one_by_one(layer: ExpertLayer, x: Tensor) -> Tensor:
    """The layer as its papers write it: a sum over experts for one token after another."""
    out = torch.zeros_like(x)
    gate, experts = layer.router.gate.weight, layer.experts
    for t in range(x.size(0)):
        for b in range(x.size(1)):
            token = x[t, b]
            logits = gate @ token
            scores = logits.softmax(0) if layer.router.score_func == "softmax" else logits.sigmoid()
            ranked = scores if layer.expert_bias is None else scores + layer.expert_bias
            chosen = ranked.topk(K).indices
            weights = scores[chosen]
            if layer.router.normalize:
                weights = weights / weights.sum()
            for e, weight in zip(chosen.tolist(), weights * layer.router.scale, strict=True):
                into = token * weight if layer.score_first else token
                h = F.silu(experts.w1[e] @ into) * (experts.w3[e] @ into)
                y = experts.w2[e] @ h
                out[t, b] += y if layer.score_first else y * weight
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"score_func": "softmax", "normalize": True},
        {"score_func": "sigmoid", "normalize": True, "scale": 2.5, "bias_step": 1e-3},
        {"score_func": "sigmoid", "score_first": True},
    ],
    ids=["Mixtral", "DeepSeek-V3", "Llama 4"],
)
def test_a_layer_is_what_its_papers_write(options: dict[str, Any]) -> None:
    layer, x = make_layer(**options), make_input().requires_grad_()
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(torch.linspace(-0.5, 0.5, E))
    out = layer(x, torch.arange(T))
    wanted = one_by_one(layer, x)
    torch.testing.assert_close(out, wanted)
    direction = torch.randn_like(out)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(out, inputs, direction, retain_graph=True)
    expected = torch.autograd.grad(wanted, inputs, direction)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("score_first", [False, True])
def test_slots_beyond_the_capacity_are_dropped(score_first: bool) -> None:
    options: dict[str, Any] = {"score_first": score_first, "bias_step": 1e-3}
    layer = make_layer(capacity_factor=0.6, **options)
    x, positions = make_input().requires_grad_(), torch.arange(T)
    out = layer(x, positions)
    weights, chosen, _ = layer.router(x, layer.expert_bias)
    # Each sequence on its own, one token after another: an expert takes the first 3 of T K slots.
    places = math.ceil(0.6 * K * T / E)
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for b in range(B):
        taken = dict.fromkeys(range(E), 0)
        for t, k in itertools.product(range(T), range(K)):
            expert = int(chosen[t, b, k])
            kept[t, b, k] = taken[expert] < places
            taken[expert] += 1
    assert 0 < kept.sum() < kept.numel()
    wanted = torch.zeros_like(x)
    for t, b, k in kept.nonzero().tolist():
        expert, weight = int(chosen[t, b, k]), weights[t, b, k]
        into = x[t, b] * weight if score_first else x[t, b]
        w1, w2, w3 = (w[expert] for w in (layer.experts.w1, layer.experts.w2, layer.experts.w3))
        y = w2 @ (F.silu(w1 @ into) * (w3 @ into))
        wanted[t, b] += y if score_first else y * weight
    torch.testing.assert_close(out, wanted)
    direction = torch.randn_like(out)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(out, inputs, direction)
    expected = torch.autograd.grad(wanted, inputs, direction)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # The drops are counted, and the balancing bias still sees every slot.
    assert layer.tally.dropped is not None
    assert layer.tally.counts is not None
    assert int(layer.tally.dropped) == int((~kept).sum())
    assert int(layer.tally.counts.sum()) == T * B * K
    # Nothing is dropped in validation, or with places for all.
    dropless = make_layer(**options)(x, positions)
    assert torch.equal(make_layer(capacity_factor=float(E), **options)(x, positions), dropless)
    assert torch.equal(layer.eval()(x, positions), dropless)


def test_shared_experts_are_added_for_every_token() -> None:
    shared = torch.nn.Linear(D, D, bias=False)
    layer, x = make_layer(shared_experts=shared), make_input()
    routed = one_by_one(layer, x)
    torch.testing.assert_close(layer(x, torch.arange(T)), routed + shared(x))


def test_equal_scores_are_chosen_by_expert_number() -> None:
    router = Router(D, 64, 5)
    torch.nn.init.zeros_(router.gate.weight)
    _, chosen, _ = router(make_input(torch.float32))
    assert (chosen == torch.arange(5)).all()
    bias = torch.zeros(64)
    bias[[40, 7, 22]] = 1.0
    _, chosen, _ = router(make_input(torch.float32), bias)
    assert (chosen == torch.tensor([7, 22, 40, 0, 1])).all()


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    layer, x = make_layer(bias_step=1.0), make_input()
    assert layer.expert_bias is not None
    plain = layer.router(x)
    layer.expert_bias[3] = 100.0
    biased = layer.router(x, layer.expert_bias)
    assert (biased.chosen[..., 0] == 3).all()
    torch.testing.assert_close(biased.weights, plain.scores.gather(-1, biased.chosen))


def test_the_router_computes_in_at_least_float32() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        layer = make_layer(dtype)
        routing = layer.router(make_input(dtype))
        assert routing.weights.dtype == routing.scores.dtype == wide
        assert layer(make_input(dtype), torch.arange(T)).dtype == dtype


@pytest.mark.parametrize("sizes", [[5, 0, 3, 8, 0, 4], [0, 0, 0, 20, 0, 0], [1, 2, 3, 4, 5, 5]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_are_those_of_the_loop(sizes: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, D, dtype=dtype, requires_grad=True)
    weights = [
        torch.randn(shape, dtype=dtype, requires_grad=True) / 4
        for shape in ((E, H, D), (E, D, H), (E, H, D))
    ]
    # The last four rows are dropped.
    whole, counts = torch.cat([x, x[:4]]), torch.tensor(sizes)
    loop = F.pad(swiglu(whole, *weights, counts, grouped=False), (0, 0, 0, 4))
    outputs = [swiglu(whole, *weights, counts, grouped=True, drops=True), loop]
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*outputs, **tolerance)
    gradients = [torch.autograd.grad(out.sum(), [x, *weights]) for out in outputs]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_grouped_products_are_chosen_where_they_work() -> None:
    def prefers(dtype: torch.dtype, hidden: int) -> bool:
        return prefers_grouped(torch.zeros(4, D, dtype=dtype), torch.zeros(E, hidden, D).to(dtype))

    assert prefers(torch.bfloat16, 24)
    # 20 elements of 2 bytes are not a multiple of 16 bytes.
    assert not prefers(torch.bfloat16, 20)
    assert not prefers(torch.float32, 24)
    assert not prefers(torch.float64, 24)


def backward(layer: ExpertLayer, x: Tensor, *, recompute: bool = False) -> None:
    positions = torch.arange(T)
    if recompute:
        out = checkpoint(layer, x, positions, use_reentrant=False)
    else:
        out = layer(x, positions)
    out.sum().backward()


def counts_of(layer: ExpertLayer) -> list[int]:
    return [] if layer.tally.counts is None else layer.tally.counts.tolist()


def test_slots_are_counted_once_a_microbatch() -> None:
    layer, x = make_layer(), make_input().requires_grad_()
    chosen = layer.router(x).chosen
    once = chosen.flatten().bincount(minlength=E).tolist()
    for recompute in (False, True):
        layer.tally.reset()
        backward(layer, x, recompute=recompute)
        assert counts_of(layer) == once
    backward(layer, x)
    assert counts_of(layer) == [2 * count for count in once]
    with torch.no_grad():
        layer(x, torch.arange(T))
    layer.eval()
    layer(x, torch.arange(T)).sum().backward()
    assert counts_of(layer) == [2 * count for count in once]


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_the_bias_rises_for_experts_below_the_mean(one_rank: None) -> None:
    layer = make_layer(bias_step=0.25)
    balancer = Balancer({"moe": layer}, {"moe": E}, torch.device("cpu"))
    balancer.start(B)
    layer.tally.add(torch.tensor([1, 4, 4, 9, 4, 2]), None)
    balancer.finish()
    assert balancer.read(torch.tensor([0.5]).double()) == [0.5]
    assert balancer.counts == {"moe": [1, 4, 4, 9, 4, 2]}
    balancer.update()
    # The mean is 4; the changes 1, 0, 0, -1, 0, 1 have a mean of 1 / 6.
    wanted = 0.25 * (torch.tensor([1.0, 0, 0, -1, 0, 1]) - 1 / 6)
    assert layer.expert_bias is not None
    torch.testing.assert_close(layer.expert_bias, wanted.double())
    balancer.start(B)
    assert layer.tally.counts is None


def test_the_sequence_loss_is_deepseeks() -> None:
    layer, x = make_layer(loss_factor=0.3), make_input()
    routing = layer.router(x)
    found = sequence_loss(routing.scores, routing.chosen, (), 0.3)
    wanted = 0.0
    for b in range(B):
        for e in range(E):
            fraction = E / (K * T) * (routing.chosen[:, b] == e).sum()
            shares = routing.scores[:, b] / routing.scores[:, b].sum(-1, keepdim=True)
            wanted += 0.3 * fraction * shares[:, e].mean()
    assert found is not None
    torch.testing.assert_close(found, wanted)
    assert sequence_loss(routing.scores, routing.chosen, (), 0.0) is None


def test_the_gradient_of_the_sequence_loss_enters_apart_from_the_loss() -> None:
    layer, plain, x = make_layer(loss_factor=0.3), make_layer(), make_input()
    layer.tally.num_sequences = 10
    for one in (layer, plain):
        backward(one, x)
    routing = plain.router(x)
    loss = sequence_loss(routing.scores, routing.chosen, (), 0.3)
    assert loss is not None
    gate = plain.router.gate.weight
    assert gate.grad is not None
    (of_loss,) = torch.autograd.grad(loss / 10, gate)
    assert layer.router.gate.weight.grad is not None
    torch.testing.assert_close(layer.router.gate.weight.grad, gate.grad + of_loss)
    torch.testing.assert_close(layer.tally.loss, loss.detach())
    assert torch.equal(layer(x, torch.arange(T)), plain(x, torch.arange(T)))


def test_forced_balance_takes_the_experts_in_turn() -> None:
    layer, x = make_layer(), make_input()
    layer.force_balance = True
    backward(layer, x)
    assert counts_of(layer) == [T * B * K // E] * E
    # A rank that holds the second half of the tokens routes them as the whole does.
    whole = layer._slots(x, torch.arange(T))
    layer.token_shard = 1, 2
    assert torch.equal(layer._slots(x[: T // 2], torch.arange(T)), whole[T // 2 :])


def build(flavor: str, **changes: Any) -> Any:
    sizes = replace(FLAVORS[flavor], **changes)
    with torch.device("meta"):
        model = build_model(MODELS["llama3"], sizes, torch.float32)
    initialize(model, 0, torch.device("cpu"))
    return model


def test_dense_and_expert_blocks_alternate() -> None:
    def expert_blocks(**changes: int) -> list[int]:
        sizes = replace(FLAVORS["moe_debug"], n_layers=6, **changes)
        return [index for index in range(6) if sizes.has_experts(index)]

    assert expert_blocks(moe_n_dense_layers=0) == [0, 1, 2, 3, 4, 5]
    assert expert_blocks(moe_n_dense_layers=2) == [2, 3, 4, 5]
    assert expert_blocks(moe_n_dense_layers=0, moe_interleave_layer_step=2) == [1, 3, 5]
    model = build("moe_debug")
    assert list(expert_layers([model])) == ["layers.1.moe", "layers.2.moe"]
    assert list(find_plan(model).tensor_parallel) == [
        *("tok_embeddings", "layers.*.attention_norm", "layers.*.attention"),
        *("layers.*.attention.wo", "layers.*.ffn_norm"),
        *("layers.*.feed_forward", "layers.*.feed_forward.w2"),
        *("layers.*.moe.router.gate", "layers.*.moe.shared_experts"),
        *("layers.*.moe.shared_experts.w2", "norm", "output"),
    ]


def test_routers_are_not_converted_to_float8() -> None:
    pytest.importorskip("torchao")
    model = build("moe_debug", moe_num_experts=16)
    report = apply_float8(model, emulate=True)
    assert "layers.1.moe.shared_experts.w1" in report.converted
    assert report.skipped["layers.1.moe.router.gate"] == "is a Gate"


def problems_of(parallelism: dict[str, int], **model: Any) -> list[str]:
    config = {
        "model": {"name": "llama3", "flavor": "moe_debug", **model},
        "training": {"dataset": "synthetic", "seq_len": 32},
        "parallelism": {"data_parallel_shard_degree": 1, **parallelism},
    }
    with pytest.raises(ConfigError) as caught:
        resolve_job(JobConfig.from_dict(config))
    return caught.value.problems


EP, TP, SHARD = ("expert_parallel_degree", "tensor_parallel_degree", "data_parallel_shard_degree")


@pytest.mark.parametrize(
    ("parallelism", "model", "problem"),
    [
        (
            {EP: 4, TP: 2},
            {},
            "parallelism.expert_parallel_degree: 4 does not divide data_parallel_shard_degree 1 x "
            "context_parallel_degree 1 x tensor_parallel_degree 2 = 2; give 2",
        ),
        (
            {EP: 4, SHARD: 4},
            {"moe_num_experts": 6},
            "parallelism.expert_parallel_degree: 4 does not divide the 6 experts of a block; "
            "give 2",
        ),
        (
            {EP: 2, SHARD: 2},
            {"moe_num_experts": 0},
            "parallelism.expert_parallel_degree: 2, but the model has no experts; remove this key",
        ),
        (
            {EP: 2, SHARD: 6},
            {"moe_num_experts": 4, "moe_hidden_dim": 40},
            "parallelism.expert_parallel_degree: 2 leaves 2 experts on a rank, which 3 ranks "
            "(efsdp) cannot share, because 3 does not divide the widths 40 and 64 either; give a "
            "larger degree",
        ),
        (
            {},
            {"moe_top_k": 9},
            "model.moe_top_k: 9 is more than model.moe_num_experts 8; give at most that",
        ),
        (
            {},
            {"moe_n_dense_layers": 3},
            "model.moe_n_dense_layers: 3 dense blocks and a step of 1 leave none of the 3 blocks "
            "with experts; give fewer, or a smaller model.moe_interleave_layer_step",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    parallelism: dict[str, int], model: dict[str, Any], problem: str
) -> None:
    assert problem in problems_of(parallelism, **model)


def test_balance_cannot_be_forced_without_experts() -> None:
    with pytest.raises(ConfigError, match="the model has no router of titanlite; remove this"):
        resolve_job(JobConfig.from_dict({"debug": {"moe_force_load_balance": True}}))


MIXTRAL = "the Hugging Face format of Mixtral"
DEEPSEEK = "the Hugging Face format of experts with a bias or shared experts (DeepSeek-V3's)"


@pytest.mark.parametrize(
    ("model", "problems"),
    [
        ({"flavor": "moe_debug"}, []),
        (
            {"flavor": "moe_debug", "moe_score_func": "softmax", "moe_interleave_layer_step": 2},
            [
                f'model.moe_score_func: softmax does not fit {DEEPSEEK}; give "sigmoid"',
                f"model.moe_interleave_layer_step: 2 does not fit {DEEPSEEK}; give 1",
            ],
        ),
        (
            {"flavor": "moe_debug", "moe_num_shared_experts": 0},
            [
                f"model.moe_num_shared_experts: {DEEPSEEK} has shared experts, and this model none;"
                " give 1 or more"
            ],
        ),
        ({"flavor": "Mixtral-8x7B"}, []),
        (
            {"flavor": "Mixtral-8x7B", "moe_route_norm": False, "moe_n_dense_layers": 1},
            [
                f"model.moe_route_norm: false does not fit {MIXTRAL}; give true",
                f"model.moe_n_dense_layers: 1 does not fit {MIXTRAL}; give 0",
            ],
        ),
    ],
)
def test_what_hugging_face_folders_cannot_hold_is_refused(
    model: dict[str, Any], problems: list[str]
) -> None:
    config = {
        "model": {"name": "llama3", **model},
        "training": {"dataset": "synthetic", "seq_len": 32},
        "checkpoint": {"enable": True, "last_save_in_hf": True, "last_save_model_only": True},
    }
    with collecting(found := []):
        resolve_job(JobConfig.from_dict(config))
    assert found == [f"{line}, or write titanlite's own checkpoint" for line in problems]


def test_folders_of_other_experts_are_refused() -> None:
    mixtral, debug = FLAVORS["Mixtral-8x7B"], FLAVORS["moe_debug"]
    for sizes in (mixtral, debug, FLAVORS["8B"]):
        assert FORMAT.differences(sizes, FORMAT.config(sizes)) == []
    glm = FORMAT.config(debug)
    for sizes, found, said in (
        (debug, {**glm, "model_type": "deepseek_v3"}, "whose attention (MLA) this model lacks"),
        (debug, {**glm, "n_group": 2}, "has n_group 2, and this model 1"),
        (debug, {**glm, "use_qk_norm": True}, "has use_qk_norm True, and this model False"),
        (
            debug,
            {**glm, "partial_rotary_factor": 0.5},
            "has partial_rotary_factor 0.5, and this model 1.0",
        ),
        (debug, {**glm, "n_routed_experts": 4}, "has moe_num_experts 4, and the [model] 8"),
        (
            replace(debug, moe_load_balance_coeff=None),
            glm,
            "has expert_bias True, and the [model] False",
        ),
        (
            mixtral,
            {**FORMAT.config(mixtral), "sliding_window": 4096},
            "has sliding_window 4096, and this model None",
        ),
        (mixtral, FORMAT.config(FLAVORS["8B"]), "has moe_num_experts 0, and the [model] 8"),
    ):
        assert any(said in line for line in FORMAT.differences(sizes, found)), said


def test_loads_are_drawn(tmp_path: Any) -> None:
    from titanlite.observe.metrics import StepRecord
    from titanlite.tools.gallery.pictures import save_expert_loads

    counts = [{"layers.0.moe": [8, 0, 4, 4], "layers.1.moe": [4, 4, 4, 4]}] * 3
    records = [
        StepRecord(step, 1.0, 1.0, 0.1, seconds=1.0, memory_bytes=1, expert_counts=of_step)
        for step, of_step in enumerate(counts, start=1)
    ]
    save_expert_loads(tmp_path / "loads.png", records)
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no counts"):
        save_expert_loads(tmp_path / "none.png", [replace(records[0], expert_counts={})])
