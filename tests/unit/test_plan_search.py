"""The search walks all plans, keeps what is fixed, and drops what does not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from titanlite import cli
from titanlite.config import load_config, resolve_job
from titanlite.config.load import override
from titanlite.plan.hardware import load_hardware
from titanlite.plan.pieces import trace_pieces
from titanlite.plan.planning import plan_job
from titanlite.plan.scale import scaled
from titanlite.plan.search import (
    CP,
    DOES_NOT_FIT,
    EP,
    LOCAL_BATCH,
    MODE,
    PP,
    RESHARD,
    SCHEDULE,
    SHARD,
    TP,
    Changes,
    Evaluator,
    Found,
    SearchResult,
    Space,
)

JOB = Path(__file__).parents[2] / "configs" / "tp2_fsdp2.toml"
CONFIG = load_config([f"--job.config_file={JOB}"])
H100 = load_hardware("h100")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def space(num_ranks: int, **kept: object) -> Space:
    return Space(CONFIG, num_ranks, ranks_per_node=8, num_blocks=4, kept=kept)


def test_every_plan_uses_all_ranks_and_keeps_what_is_fixed() -> None:
    plans = list(space(8, **{TP: 2, MODE: "full"}).candidates())
    assert plans
    for plan in plans:
        degrees = [plan[key] for key in (TP, PP, CP, SHARD)]
        degrees.append(plan["parallelism.data_parallel_replicate_degree"])
        product = 1
        for degree in degrees:
            product *= degree
        assert product == 8
        assert plan[TP] == 2
        assert MODE not in plan
    assert {plan[PP] for plan in plans} == {1, 2, 4}
    assert {plan.get(SCHEDULE) for plan in plans} > {None, "1F1B"}


def test_tensor_parallelism_stays_in_a_node() -> None:
    assert max(plan[TP] for plan in space(32).candidates()) == 8


def test_expert_parallelism_divides_its_ranks_and_the_experts() -> None:
    experts = dataclasses.replace(space(8), num_experts=4)
    plans = list(experts.candidates())
    assert {plan[EP] for plan in plans} == {1, 2, 4}
    for plan in plans:
        assert plan[SHARD] * plan[CP] * plan[TP] % plan[EP] == 0
    fixed = dataclasses.replace(experts, kept={EP: 2})
    assert {plan[EP] for plan in fixed.candidates()} == {2}
    assert not any(EP in plan for plan in space(8).candidates())


def test_an_evaluated_plan_is_that_of_plan_job() -> None:
    # So many equal blocks that the time of a batch follows from fewer.
    config = override(CONFIG, {"model.num_layers": 12})
    evaluator = Evaluator(config, H100, is_compiled=False, use_cache=False)
    changes = next(
        plan
        for plan in space(4, **{TP: 2, CP: 1, PP: 1}).candidates()
        if plan[SHARD] == 2 and plan[LOCAL_BATCH] == 8 and plan[RESHARD] == "never"
    )
    found = evaluator.evaluate(changes)
    assert isinstance(found, Found)
    plan = plan_job(resolve_job(override(config, changes)), H100, method="pieces", use_cache=False)
    assert plan.prediction is not None
    assert found.seconds == pytest.approx(plan.prediction.step.seconds, rel=0.01)
    assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    small = dataclasses.replace(
        H100, memory=dataclasses.replace(H100.memory, num_bytes=found.peak_bytes)
    )
    # No room for the margin.
    assert Evaluator(config, small, is_compiled=False, use_cache=False).evaluate(changes) == (
        "does not fit in memory"
    )
    assert evaluator.evaluate(changes | {TP: 3}) == "not legal"


def test_no_larger_microbatch_is_tried_of_a_plan_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def evaluate(_: Evaluator, changes: Changes) -> str:
        tried.append(changes)
        return DOES_NOT_FIT if changes[RESHARD] == "never" else "not legal"

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    plans = list(space(4, **{TP: 2, CP: 1, PP: 1, SHARD: 2, MODE: "none"}).candidates())
    evaluator = Evaluator(CONFIG, H100, is_compiled=False, use_cache=False)
    rows = evaluator.evaluate_all(plans)
    never = [plan for plan in plans if plan[RESHARD] == "never"]
    others = [plan for plan in plans if plan[RESHARD] != "never"]
    assert len(never) == len(others) > 1
    assert tried == [plan for plan in plans if plan is never[0] or plan in others]
    assert rows.count(DOES_NOT_FIT) == len(never)


def test_large_microbatches_follow_from_smaller_ones() -> None:
    def pieces(size: int):
        changes = {LOCAL_BATCH: size, "training.global_batch_size": 4 * size}
        return trace_pieces(resolve_job(override(CONFIG, changes)))

    derived = scaled(pieces(2), pieces(4), 4)
    traced = pieces(8)
    assert derived is not None
    for mine, true in ((derived.blocks[0], traced.blocks[0]), (derived.after, traced.after)):
        assert mine.forward.events == true.forward.events
        assert mine.backward.events == true.backward.events
        assert mine.forward.net == true.forward.net


def test_the_front_has_no_plan_that_another_beats() -> None:
    def plan(seconds: float, num_bytes: int) -> Found:
        return Found({}, num_bytes, seconds, 1.0, 0.5, 0.0, "")

    plans = [plan(1.0, 9), plan(2.0, 5), plan(2.5, 7), plan(3.0, 4), plan(4.0, 4)]
    result = SearchResult(found=plans[::-1])
    assert result.front == [plans[0], plans[1], plans[3]]
    assert result.best == plans


def test_mistakes_of_a_search_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--search"], "--search: plans have no times without --hardware"),
        (["--best", "best.toml"], "--best: only a search has it"),
        (["--search", "--hardware=h100", "--svg=a.svg"], "--svg: a search has many plans"),
        (
            ["--search", "--hardware=h100", "--ranks=8", "--parallelism.tensor_parallel_degree=3"],
            "--ranks: no plan has 8 ranks",
        ),
        (
            ["--search", "--hardware=h100", "--training.global_batch_size=-1"],
            "training.global_batch_size: -1 follows from the plan",
        ),
    ):
        assert cli.main(["plan", str(JOB), *options]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_plan_is_the_best_of_all_and_verify_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, figures, page = (tmp_path / name for name in ("best.toml", "search.json", "page.html"))
    options = ["--search", "--hardware=h100", "--ranks=8", "--exhaustive"]
    files = ["--best", str(best), "--json", str(figures), "--html", str(page)]
    fixed = ["--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=none"]
    assert cli.main(["plan", str(JOB), *options, *files, *fixed]) == 0
    shown = capsys.readouterr().out
    assert "the fastest for their memory" in shown
    found = json.loads(figures.read_text())
    assert found["is_complete"]
    plans = found["plans"]
    assert len(plans) + sum(found["dropped"].values()) == found["num_candidates"] > 50
    # Every plan, timed in full.
    evaluator = Evaluator(CONFIG, H100, is_compiled=False, use_cache=True)
    exact = [evaluator.evaluate(plan["changes"], exactly=True) for plan in plans]
    fastest = min(one.seconds for one in exact if isinstance(one, Found))
    assert plans[0]["seconds"] == pytest.approx(fastest)
    assert '"tokens_per_second"' in page.read_text()
    assert cli.main(["verify", str(best), "--shrink"]) == 0
    assert "AGREES" in capsys.readouterr().out
