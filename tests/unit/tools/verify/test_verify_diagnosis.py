"""The sentences for patterns in a plan's numbers; no ranks."""

from __future__ import annotations

import math

import pytest

from titanlite.mesh.parallel_dims import AXES, ParallelDims
from titanlite.tools.verify.dataflow import explain_backward
from titanlite.tools.verify.diagnose import diagnose
from titanlite.tools.verify.differences import Disagreement
from titanlite.tools.verify.evidence import Evidence
from titanlite.tools.verify.inputs import explain_shards
from titanlite.tools.verify.matrix import OFF, features_of, name_of, plans_of
from titanlite.tools.verify.norms import explain_norm, true_norm
from titanlite.tools.verify.overview import DIFFERS, draw_overview
from titanlite.tools.verify.record import (
    Agreement,
    ModuleOutput,
    RankRun,
    RankStep,
    RankTrace,
    ReferenceTrace,
    harmless,
)
from titanlite.tools.verify.result import Result
from titanlite.tools.verify.shares import describe_shares
from titanlite.tools.verify.wording import (
    Explained,
    distinct_texts,
    listed,
    name_factor,
    name_parameters,
    name_ranks,
)

DIMS = ParallelDims(dp_replicate=3, cp=5)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (3.0, "the degree of dp_replicate"),
        (1 / 5, "1 over the degree of cp"),
        (15.0, "the degrees of dp_replicate and cp"),
        (25.0, "the square of the degree of cp"),
        (1 / 7, "1 over the number of microbatches"),
        (504.0, "the number of targets in the step"),
        (2.5, ""),
        (3.0001, ""),
        (math.nan, ""),
    ],
)
def test_factors(factor, words):
    found = name_factor(factor, DIMS, num_microbatches=7, num_targets=504, batch=8)
    assert found == words


def test_a_factor_of_several_meanings_has_them_all():
    dims = ParallelDims(dp_shard=2, tp=2)
    found = name_factor(0.5, dims, num_microbatches=2, num_targets=10, batch=8)
    assert (
        found == "1 over the degree of dp_shard or the degree of tp or the number of microbatches"
    )


def agreement(squares: float) -> Agreement:
    return Agreement(0.0, 1.0, squares, squares, squares, "d")


def runs_on(dims: ParallelDims, placed: dict[str, dict[str, str]]) -> list[RankRun]:
    """Ranks whose gradients have a sum of squares of 1 on rank 0, 2 on rank 1, ... by parameter."""
    runs = []
    for rank in range(dims.world_size):
        gradients = {}
        for number, (name, axes) in enumerate(placed.items(), start=1):
            place = dims.coordinates(rank)
            own = sum(10 * place[axis] + 1 for axis, how in axes.items() if how != "replicated")
            gradients[name] = agreement(float(number * (own or 1)))
        step = RankStep(gradients=gradients)
        runs.append(RankRun(rank, dims.coordinates(rank), placed, (), {}, [RankStep(), step]))
    return runs


PLACED = {
    "norm": {"dp_shard": "sharded", "tp": "replicated"},
    "wq": {"dp_shard": "strided", "tp": "sharded"},
}


def test_norms_are_explained_by_how_they_count():
    runs = runs_on(ParallelDims(dp_shard=2, tp=2), PLACED)
    norm, wq = 1 + 11, 2 * (2 + 12 + 12 + 22)
    assert true_norm(runs, 1) == math.sqrt(norm + wq)
    assert explain_norm(runs, 1, math.sqrt(norm + wq)) == ""
    assert "gradients replicated over tp are counted 2 times" in explain_norm(
        runs, 1, math.sqrt(2 * norm + wq)
    )
    only_first = 2 * (2 + 12)
    words = explain_norm(runs, 1, math.sqrt(norm + only_first))
    assert "that dp_shard shards along an already sharded dimension are counted as if they" in words
    assert explain_norm(runs, 1, 12345.0) == ""


def test_parameters_and_ranks_are_named_by_what_they_have_in_common():
    runs = runs_on(ParallelDims(dp_shard=2, tp=2), PLACED)
    assert name_parameters(["norm", "wq"], runs, "gradient") == "all 2 gradients"
    assert name_ranks([1, 3], runs, range(4)) == "on the ranks with tp 1"
    assert name_ranks([2], runs, range(4)) == "on rank 2 only (dp_shard 1, tp 0)"
    assert name_ranks([0, 3], runs, range(4)) == "on ranks 0 and 3"
    assert name_ranks(range(4), runs, range(4)) == "on every rank"
    assert listed([1, 2, 3]) == "1, 2 and 3"
    replicated, sharded = {"tp": "replicated"}, {"tp": "sharded"}
    runs = runs_on(ParallelDims(tp=2), {"norm": replicated, "scale": replicated, "wq": sharded})
    shown = name_parameters(["norm", "scale"], runs, "gradient")
    assert shown == "2 of 3 gradients (norm and scale; exactly those replicated over tp)"


@pytest.mark.parametrize("order", [("0", "1"), ("1", "0"), ("2", "3")])
def test_shards_on_the_wrong_rank_are_told_from_wrong_values(order: tuple[str, str]) -> None:
    dims, placed = ParallelDims(tp=2), {"w": {"tp": "sharded"}}
    runs = [
        RankRun(
            rank,
            {"tp": rank},
            placed,
            (),
            {"w": str(rank)},
            [RankStep(weights={"w": Agreement(1.0, 1.0, 1.0, 1.0, 1.0, own)})],
        )
        for rank, own in enumerate(order)
    ]
    found = Result(failures=[Disagreement(0, "start", "w", 1.0, 0.0)])
    words = "".join(explain_shards(Evidence(dims, [], runs, found)))
    assert words.startswith("ranks hold each other's shards of all 1 parameters") == (
        order == ("1", "0")
    )


def test_what_explains_few_gradients_does_not_hide_the_others():
    placed = {name: {"tp": "replicated"} for name in ("a.weight", "b.weight", "c.weight")}
    runs = runs_on(ParallelDims(tp=2), placed)
    failed = [Disagreement(1, "gradient", name, 1.0, 0.0) for name in placed]
    evidence = Evidence(ParallelDims(tp=2), [], runs, Result(failures=failed))

    def of(*names: str) -> list[str]:
        few = Explained("a factor", names)
        return diagnose(evidence, [lambda e: [few, Explained("a part of it", names[:1])]])

    (first,) = of("a.weight", "b.weight")
    assert first == "a factor. This does not explain the gradient of c.weight, which differs too"
    first, second = of("a.weight")
    assert "2 of 3 gradients (b.weight and c.weight" in first
    assert second == "a factor"
    assert of(*placed) == ["a factor"]


def test_outputs_inside_a_right_one_are_not_to_blame():
    order = ("block.up", "block.down", "block", "head", "")
    right, wrong = dict.fromkeys(order, True), dict.fromkeys(order, False)
    inside = right | {"block.down": False}
    assert harmless(ReferenceTrace(order), [inside, right]) == set(order)
    differs = [inside | {"head": False, "": False}, right]
    assert harmless(ReferenceTrace(order), differs) == {*order} - {"head", ""}
    assert harmless(ReferenceTrace(order), [right, wrong]) == set()
    flow = {"block.down": ("block.up",)}  # "block.up" is right on one rank.
    assert harmless(ReferenceTrace(order, flow=flow), [inside, wrong]) == {"block.down"}


def test_what_is_right_one_step_later_is_no_cause():
    flow = {"up": ("up <- x",), "down <- x": ("up",), "down": ("down <- x",)}
    reference = ReferenceTrace(("up <- x", "up", "down <- x", "down"), flow=flow)
    assert "up" in harmless(reference, [{"up": False, "down <- x": True, "down": True}])
    assert "up" not in harmless(reference, [{"up": False, "down <- x": False, "down": False}])
    residual = ReferenceTrace((*reference.events, "block"), flow=flow | {"block": ("up", "down")})
    states = {"up": False, "down <- x": True, "down": False, "block": False}
    assert "up" in harmless(residual, [states])
    assert "up" not in harmless(residual, [states | {"down <- x": False}])


@pytest.mark.parametrize("is_reduced", [True, False])
def test_a_partial_gradient_where_the_loss_cuts_the_graph(is_reduced):
    right, half = Agreement(0.0, 1.0, 1.0, 1.0, 1.0, ""), Agreement(0.5, 1.0, 0.25, 0.5, 1.0, "")
    gradients = {"norm <- x": right if is_reduced else half, "head <- x": half}
    outputs = {n: ModuleOutput(right, 1, (), gradient=one) for n, one in gradients.items()}
    sums = {name: {"tp": right} for name in gradients}
    traces = [RankTrace(rank, {}, outputs, {}, {}, summed_backward=sums) for rank in (0, 1)]
    failed = Result(failures=[Disagreement(1, "gradient", "norm.weight", 1.0, 0.0)])
    dims = ParallelDims(tp=2)
    runs = runs_on(dims, {"norm.weight": {"tp": "replicated"}})
    evidence = Evidence(dims, [], runs, failed, ReferenceTrace(tuple(gradients)), traces)
    assert bool(list(explain_backward(evidence))) != is_reduced


def test_numbers_that_differ_look_different():
    assert distinct_texts(0.1234567891, 0.1234567899) == ["0.123456789", "0.12345679"]
    assert distinct_texts(2.0, 1.0) == ["2", "1"]
    assert distinct_texts(0.5, 0.5) == ["0.5", "0.5"]


def shares_of(weights: list[float], targets: list[int], cells: list) -> str:
    reference = ReferenceTrace((), tuple(cells), tuple(targets))
    runs = runs_on(ParallelDims(dp_shard=2), {"w": {"dp_shard": "sharded"}})
    traces = [
        RankTrace(r, runs[r].coordinates, {}, {}, {}, {"w": (tuple(weights), 1e-9)}, (), {})
        for r in (0, 1)
    ]
    return "".join(describe_shares(reference, traces, runs, ["w"], num_microbatches=2))


def test_shares_of_the_batch_are_told_from_each_other():
    cells = [(data, microbatch, 0) for data in (0, 1) for microbatch in (0, 1)]
    targets = [10, 20, 30, 40]
    assert shares_of([1.0, 1.0, 1.0, 1.0], targets, cells) == ""
    per_rank = [100 / (2 * 30)] * 2 + [100 / (2 * 70)] * 2
    assert "a mean of means. The mean is taken over each data-parallel rank" in shares_of(
        per_rank, targets, cells
    )
    each = [100 / (4 * count) for count in targets]
    assert "a mean of means. The mean is taken over each microbatch" in shares_of(
        each, targets, cells
    )
    assert (
        "the contribution of microbatch 1 of 2 (counted from 0, the last) is missing"
        in shares_of([1.0, 0.0, 1.0, 0.0], targets, cells)
    )
    assert "the contribution of data-parallel rank 0 of 2 (counted from 0) is missing" in shares_of(
        [0, 0, 1, 1], targets, cells
    )
    assert "data-parallel rank 1 of 2 (counted from 0, the last) counts 3 times" in shares_of(
        [1, 1, 3, 3], targets, cells
    )
    assert "the coefficients are 0.5 for (dp 0, microbatch 0, cp 0)" in shares_of(
        [0.5, 0.7, 0.2, 3.0], targets, cells
    )
    assert (
        "the coefficients are 1/2^2 for data-parallel rank 0 of 2 (counted from 0) and 1/2 for "
        "data-parallel rank 1 of 2 (counted from 0, the last), and 2 is the number of microbatches"
    ) in shares_of([0.25, 0.25, 0.5, 0.5], targets, cells)


def test_the_overview_shows_every_plan_and_what_differs():
    plans = plans_of(2)[:3]
    results = [
        {"choice": plan, "agrees": index != 1, "seconds": 1.0, "cause": "<a sum>"}
        | ({"largest": 1e-15, "margin": 10.0**4, "of": "w"} if index != 1 else {})
        for index, plan in enumerate(plans)
    ]
    page = draw_overview(results, features_of(2), 2, plans)
    assert page.count("<tr data-plan") == 3
    assert "&lt;a sum&gt;" in page
    assert "<a sum>" not in page
    picture = page.split("<svg")[1].split("</svg>")[0]
    assert DIFFERS in picture
    assert "not run yet" not in picture
    assert DIFFERS not in draw_overview(results[:1], features_of(2), 2, plans).split("<svg")[1]


def test_a_plan_is_named_by_what_is_on():
    choice = dict.fromkeys(features_of(2), OFF) | dict.fromkeys(AXES, 1)
    choice |= {"cp": 2, "layout": "striped", "clipping": "off"}
    assert name_of(choice) == "cp 2, layout striped"
