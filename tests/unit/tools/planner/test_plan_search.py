"""The search walks all plans, keeps what is fixed, and drops what does not fit."""

import dataclasses
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite import cli
from titanlite.config import parse_args, resolve_job
from titanlite.config.load import override
from titanlite.tools.planner import evaluate, search_report
from titanlite.tools.planner.bounds import Floor, Frontier
from titanlite.tools.planner.cache import key_of
from titanlite.tools.planner.composition import TraceError, smaller
from titanlite.tools.planner.evaluate import (
    DOES_NOT_FIT,
    NOT_LEGAL,
    Evaluator,
    FailedPlan,
    FoundPlan,
    Result,
)
from titanlite.tools.planner.hardware import load_hardware
from titanlite.tools.planner.pieces import trace_pieces
from titanlite.tools.planner.planning import plan_job, plannable
from titanlite.tools.planner.scale import scaled
from titanlite.tools.planner.search import Round, SearchResult, search
from titanlite.tools.planner.search_report import show_search
from titanlite.tools.planner.space import (
    ASYNC_TP,
    CP,
    EP,
    FIRST_LESS,
    GLOBAL_BATCH,
    LAST_LESS,
    LOCAL_BATCH,
    MICROBATCH,
    MODE,
    OFFLOAD,
    ORDER,
    PP,
    RESHARD,
    ROTATION,
    SCHEDULE,
    SCHEDULES,
    SHARD,
    TP,
    WHOLE_LOSS,
    Changes,
    Space,
    degrees_of,
    describe,
    groups,
)
from titanlite.training import loss

JOB = Path(__file__).parents[4] / "configs" / "tp2_fsdp2.toml"
CONFIG = parse_args([f"--job.config_file={JOB}"])
H100 = load_hardware("h100")
ANY, ZB_H1 = {None, *(name for name, _ in SCHEDULES)}, {"ZB-H1"}


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


def test_plans_that_differ_in_the_split_of_blocks_alone_have_the_same_pieces() -> None:
    pipeline = override(CONFIG, {PP: 2, TP: 1, SHARD: 1, LOCAL_BATCH: 4, MICROBATCH: 1})
    splits = ({FIRST_LESS: first, LAST_LESS: last} for first, last in ((0, 0), (1, 1), (0, 2)))
    jobs = [resolve_job(override(pipeline, split)) for split in splits]
    assert len({key_of(smaller(job)) for job in jobs}) == 1


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
    assert isinstance(found, FoundPlan)
    plan = plan_job(resolve_job(override(config, changes)), H100, method="pieces", use_cache=False)
    assert plan.prediction is not None
    assert found.seconds == pytest.approx(plan.prediction.step.seconds, rel=0.01)
    assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    taken = found.peak_bytes + H100.memory.beside_bytes
    small = dataclasses.replace(H100, memory=dataclasses.replace(H100.memory, num_bytes=taken))
    # No room for the upper end of the range, or of a device without one, for the margin.
    for hardware in (small, dataclasses.replace(small, accuracy=None)):
        evaluated = Evaluator(config, hardware, is_compiled=False, use_cache=False)
        assert evaluated.evaluate(changes) == "does not fit in memory"
    assert evaluator.evaluate(changes | {TP: 3}) == "not legal"


@pytest.mark.slow
def test_the_peak_of_a_compiled_plan_that_is_evaluated_exactly_is_that_of_its_compiled_blocks() -> (
    None
):
    config = override(CONFIG, {"compile.enable": True})
    evaluator = Evaluator(config, H100, is_compiled=True, use_cache=False)
    changes = next(iter(space(4, **{TP: 2, CP: 1, PP: 1, SHARD: 2, MODE: "none"}).candidates()))
    found, exact = (evaluator.evaluate(changes, exactly=one) for one in (False, True))
    assert isinstance(found, FoundPlan)
    assert isinstance(exact, FoundPlan)
    resolved = resolve_job(override(config, changes))
    plan = plan_job(resolved, H100, is_compiled=True, method="pieces", use_cache=False)
    assert plan.prediction is not None
    assert exact.seconds == pytest.approx(plan.prediction.step.seconds, rel=0.001)
    assert exact.peak_bytes == plan.peak_bytes < found.peak_bytes


def test_no_larger_microbatch_is_tried_of_a_plan_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    kept = {TP: 2, CP: 1, PP: 1, SHARD: 2, MODE: "none", ASYNC_TP: False}

    def evaluate(_: Evaluator, changes: Changes, **__: object) -> str:
        tried.append(changes)
        return DOES_NOT_FIT if changes[RESHARD] == "never" else "not legal"

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    plans = list(space(4, **kept).candidates())
    evaluator = Evaluator(CONFIG, H100, is_compiled=False, use_cache=False)
    rows = list(evaluator.evaluate_all(plans))
    never = [plan for plan in plans if plan[RESHARD] == "never"]
    others = [plan for plan in plans if plan[RESHARD] != "never"]
    assert len(never) == len(others) > 1
    assert tried == [plan for plan in plans if plan is never[0] or plan in others]
    assert rows.count(DOES_NOT_FIT) == len(never)


@pytest.mark.parametrize("is_legal", [False, True])
def test_of_each_set_of_degrees_the_first_that_is_legal_and_can_be_traced_is_tried(
    monkeypatch: pytest.MonkeyPatch, is_legal: bool
) -> None:
    def evaluate(_: Evaluator, changes: Changes, **__: object) -> str:
        if changes.get(ASYNC_TP) and not is_legal:
            return NOT_LEGAL
        return "cannot be traced: why" if changes[MODE] == "full" else DOES_NOT_FIT

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    (plans,) = groups(list(space(4, **{TP: 2, CP: 1}).candidates()), by_choices=False)
    evaluator = Evaluator(CONFIG, H100, is_compiled=False, use_cache=False)
    rows = evaluator.evaluate_all(plans, one_of_each_set=True)
    tried = [plan for plan, row in zip(plans, rows, strict=True) if row == DOES_NOT_FIT]
    sets = {degrees_of(plan) for plan in plans}
    assert len(tried) == (1 + is_legal) * len(sets)
    assert len({(degrees_of(plan), plan.get(ASYNC_TP)) for plan in tried}) == len(tried) > 2
    for plan in tried:
        assert (plan[MODE], plan.get(SCHEDULE, "1F1B")) == ("selective", "1F1B")
        assert 1 in (plan[LOCAL_BATCH], plan.get(MICROBATCH))
        assert plan.get(RESHARD, "default") == "default"


@pytest.mark.usefixtures("search_in_this_process")
@pytest.mark.parametrize(
    "of", [(30, ANY, 0, 0), (99, ANY, 0, 0), (40, ZB_H1, 0, 0), (99, ANY, 0.2, 0), (99, ANY, 0, 1)]
)
def test_a_search_finds_the_best_of_all_plans_with_few_of_them(
    monkeypatch: pytest.MonkeyPatch, of: tuple[int, set[str | None], float, float]
) -> None:
    room, fitting, gathers, calls = of

    def evaluate(_: Evaluator, plan: Changes, **__: object) -> Result:
        tried.append(plan)
        size = plan[LOCAL_BATCH] if plan[PP] == 1 else plan[MICROBATCH]
        recomputed = ("none", "selective", "full").index(plan[MODE])
        moves = plan.get(ASYNC_TP, False)
        memory = (40 - 12 * recomputed - 5 * moves) * size / plan[TP] + 160 / plan[SHARD]
        if memory > room or plan.get(SCHEDULE) not in fitting:
            return DOES_NOT_FIT
        seconds = 5 + recomputed + 2 / size + 0.3 * plan[TP] * (1 - 0.4 * moves) + plan[CP]
        if plan[PP] > 1:
            seconds += 4 / plan[PP] - 0.2 * (plan[SCHEDULE] == "ZBVZeroBubble")
        # With many sequences at once, what is slow with one is the fastest.
        seconds += gathers * plan[SHARD] * (1.5 / size - 1)
        seconds -= 0.1 * bool(plan.get(WHOLE_LOSS)) + 0.2 * (plan.get(FIRST_LESS, 0) == 1)
        least = seconds - 2 / size - calls * plan[TP]
        seconds += calls * plan[TP] * (8 / size**2 - 1)
        return FoundPlan(dict(plan), int(memory), seconds, 1 / seconds, None, 0.0, "", 0, least)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    rounds: list[tuple[SearchResult, Round]] = []
    counts, best = [], []
    for every in (False, True):
        tried: list[Changes] = []
        told = lambda *now: rounds.append(now)
        result = search(space(32), H100, exhaustive=every, on_progress=told)
        assert result.is_complete
        assert len(result.found) + sum(result.dropped.values()) == result.num_candidates
        assert rounds[-1][1].done in (0, rounds[-1][1].total)
        best.append(result.best[0])
        counts.append(len({frozenset(plan.items()) for plan in tried}))
    assert best[0].changes == best[1].changes
    # If nothing fits that should take the least memory, all is tried.
    assert counts[0] < 0.3 * counts[1] or fitting == ZB_H1


def test_a_bound_is_below_what_the_plan_takes() -> None:
    floors: list[Floor] = []

    class Watching(Frontier):
        def excludes(self, floor: Floor) -> bool:
            floors.append(floor)
            return False

    changes = {"training.mixed_precision_param": "bfloat16", "job.device": "cuda"}
    config = override(CONFIG, changes)
    evaluator = Evaluator(config, H100, is_compiled=False, use_cache=False)
    kept = {TP: 2, CP: 1, MODE: "none", LOCAL_BATCH: 16, MICROBATCH: 1, ASYNC_TP: False}
    own = dataclasses.replace(space(8, **kept), config=config, has_host=True)
    timed = set()
    for plan in own.candidates():
        if plan[PP] == 1 and plan[RESHARD] != "default":
            continue
        of_plan: list[FoundPlan] = []
        for one in (plan, *own.offloaded(plan)):
            floors.clear()
            found = evaluator.evaluate(one, known=Watching(10))
            if found == "not legal":
                continue
            assert isinstance(found, FoundPlan)
            first, last = floors
            assert first.seconds == last.seconds <= found.seconds
            assert 0 < first.num_bytes <= last.num_bytes == found.peak_bytes
            # A bound of nothing would do no good.
            assert first.seconds > 0.05 * found.seconds
            of_work: Any = evaluator.evaluate(one, known=Watching(10), in_any_size=True)
            assert 0 < of_work.least_seconds < first.seconds < of_work.seconds == found.seconds
            of_plan.append(found)
        if of_plan:
            without, offloaded = of_plan
            # So offload is tried only where memory is short.
            assert offloaded.seconds >= without.seconds
            assert without.host_bytes == 0 < offloaded.host_bytes
            timed.add((plan[PP], plan.get(SCHEDULE)))
    assert {pp for pp, _ in timed} == {1, 2, 4}
    assert len(timed) > 10


def test_offload_is_tried_where_it_can_be_planned() -> None:
    plan = next(space(8).candidates())
    on_gpus = dataclasses.replace(
        space(8), config=override(CONFIG, {"job.device": "cuda"}), has_host=True
    )
    assert list(on_gpus.offloaded(plan)) == [{**plan, OFFLOAD: True}]
    assert {**plan, OFFLOAD: True} in list(on_gpus.neighbours(plan))
    assert list(on_gpus.offloaded({**plan, OFFLOAD: True})) == []
    assert list(dataclasses.replace(on_gpus, has_host=False).offloaded(plan)) == []
    assert list(dataclasses.replace(on_gpus, kept={OFFLOAD: False}).offloaded(plan)) == []
    assert list(space(8).offloaded(plan)) == [], "all memory of a CPU's job is one"


def test_a_bound_excludes_what_is_neither_fast_nor_small() -> None:
    found = [("a", 1.0, 50), ("b", 2.0, 20)]
    known = Frontier(2, found)
    assert known.excludes(Floor(2.1, 20))
    assert known.excludes(Floor(2.1, 60))
    assert not known.excludes(Floor(2.1, 19)), "nothing found is as small"
    assert not known.excludes(Floor(2.01, 60)), "times are known within 2%"
    assert not Frontier(3, found).excludes(Floor(9.0, 60)), "there is room"
    known.add("a", 1.5, 45)
    assert not known.excludes(Floor(1.6, 60)), "it differs from one of the fastest in layouts alone"
    known.add("c", 1.5, 40)
    assert known.excludes(Floor(1.6, 40))
    assert not known.excludes(Floor(1.6, 39))


def test_neighbours_differ_in_one_layout() -> None:
    plans = space(8, **{MODE: "none", TP: 2}).candidates()
    plan = next(plan for plan in plans if plan[PP] == 2 and plan[CP] == 2)
    found = list(space(8).neighbours(plan))
    layouts = (WHOLE_LOSS, ORDER, ROTATION)
    changed = [{key for key in (*layouts, FIRST_LESS) if key in one} for one in found]
    assert all(len(keys) == 1 for keys in changed)
    assert set.union(*changed) == {*layouts, FIRST_LESS}
    for one in found:
        # Each is legal, and back again is the plan itself.
        resolve_job(override(CONFIG, one))
        assert plan in list(space(8).neighbours(one))
    splits = [
        tuple(len(names) for names in pipeline.stages)
        for one in [plan, *(one for one in found if FIRST_LESS in one)]
        if (pipeline := resolve_job(override(CONFIG, one)).pipeline)
    ]
    assert len(splits) == len(set(splits)) > 2
    fixed = space(8, **{WHOLE_LOSS: False, ORDER: "headtail", LAST_LESS: 1})
    assert [key for one in fixed.neighbours(plan) for key in one.keys() - plan.keys()] == [ROTATION]


def test_the_layouts_of_a_plan_are_tried_with_others() -> None:
    plans = list(space(8, **{MODE: "none", TP: 2, CP: 1}).candidates())
    plan, other = (
        next(one for one in plans if one[PP] == 2 and one[SCHEDULE] == name)
        for name in ("Interleaved1F1B", "ZBVZeroBubble")
    )
    model = {**plan, WHOLE_LOSS: True, FIRST_LESS: 0, LAST_LESS: 1}
    new = space(8).with_layouts_of(other, model)
    assert new[SCHEDULE] == "ZBVZeroBubble"
    assert (new[WHOLE_LOSS], new[FIRST_LESS], new[LAST_LESS]) == (True, 0, 1)
    resolve_job(override(CONFIG, new))
    assert OFFLOAD not in new
    assert space(8).with_layouts_of(other, {**model, OFFLOAD: True}) == {**new, OFFLOAD: True}
    short = next(one for one in plans if one[PP] == 2 and one[SCHEDULE] == "1F1B")
    assert FIRST_LESS not in space(8).with_layouts_of(short, model), "it has fewer stages"


def test_an_error_names_its_plan_and_the_search_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no such\nthing")

    monkeypatch.setattr(evaluate, "compose", broken)
    monkeypatch.setattr(Evaluator, "_load", lambda *_, **__: None)
    evaluator = Evaluator(CONFIG, H100, is_compiled=False, use_cache=False)
    plan = next(space(8, **{TP: 2, CP: 1, PP: 1, MODE: "full"}).candidates())
    rows: list[Result] = list(evaluator.evaluate_all([plan, plan | {TP: 3}]))
    assert isinstance(rows[0], FailedPlan)
    assert rows[0].changes == plan
    assert rows[0].error.startswith("ZeroDivisionError: no such thing (")
    assert rows[1] == "not legal"
    good = FoundPlan(plan, 10**9, 0.5, 200.0, 0.4, 0.1, "why")
    result = SearchResult(2, [good], failures=[rows[0]], is_complete=True)
    shown = show_search(result, H100)
    assert (
        "error in dp 2 x fsdp 2 x tp 2, local batch 1" in shown or "error in fsdp 4 x tp 2" in shown
    )
    assert len([line for line in shown.splitlines() if "ZeroDivisionError" in line]) == 1
    monkeypatch.setattr("titanlite.tools.planner.search_report.run_search", lambda *_, **__: result)
    assert cli.main(["plan", str(JOB), "--search", "--hardware=h100", "--ranks=8"]) == 1
    assert "the fastest" in capsys.readouterr().out


def test_a_search_says_how_far_it_is_and_what_no_plan_exceeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = next(space(8, **{TP: 2, CP: 1, PP: 1}).candidates())
    good = FoundPlan(plan, 10**9, 0.5, 2e6, 0.4, 0.1, "why")

    def started(*_: object, on_progress: Callable[..., None], **__: object) -> SearchResult:
        result = SearchResult(4, [good], is_complete=True)
        on_progress(result, Round(2, 1, 4))
        return result

    monkeypatch.setattr(search_report, "search", started)
    monkeypatch.setattr(search_report, "SHOWN_EVERY_SECONDS", -1)
    found = search_report.run_search(space(8), H100)
    most = found.most_tokens_per_second
    # 67 TFLOP/s in float32, of which products reach 59%.
    assert most == 67e12 * 0.589 / resolve_job(CONFIG, None).model.flops_per_token(0)
    gain = f"{most / 2e6 - 1:.0%}"
    told = rf"round 2, .* left, 1 fit, best 2M tokens/s/rank, {gain} more at most; 1 of 4 plans"
    assert re.search(told, capsys.readouterr().err)
    assert f"tokens/s/rank, {gain} more than the fastest" in show_search(found, H100)


def test_after_two_interrupts_the_best_plan_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = next(space(8, **{TP: 2, CP: 1, PP: 1}).candidates())
    good = FoundPlan(plan, 10**9, 0.5, 200.0, 0.4, 0.1, "why")

    def interrupted(*_: object, **__: object) -> SearchResult:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return SearchResult(2, [good])

    monkeypatch.setattr("titanlite.tools.planner.search_report.run_search", interrupted)
    assert cli.main(["plan", str(JOB), "--search", "--hardware=h100", "--ranks=8"]) == 0
    assert "interrupted: 1 of 2 plans were timed" in (shown := capsys.readouterr().out)
    for module in ("observe.terminal", "tools.planner.search_report"):
        monkeypatch.setattr(f"titanlite.{module}.terminal_width", lambda *_: 60)
    folded = show_search(SearchResult(2, [good]), H100)
    assert f"\n    {describe(plan)}" in folded
    assert max(map(len, folded.splitlines())) <= 60 < max(map(len, shown.splitlines()))


def test_only_a_plan_that_cannot_be_traced_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(space(8, **{TP: 2, CP: 1, PP: 1, MODE: "full"}).candidates())
    evaluator = Evaluator(CONFIG, H100, is_compiled=False, use_cache=False)

    def failing(error: Exception) -> Result:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(evaluate, "load_pieces", fail)
        return evaluator.evaluate(plan)

    assert failing(TraceError("model.name: no\nfake")) == "cannot be traced: model.name: no fake"
    assert isinstance(failing(KeyError("a mistake of the planner")), FailedPlan)


def test_a_job_that_no_plan_could_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--search", "--hardware=h100", "--ranks=8", "--lr_scheduler.total_steps=1"]
    assert cli.main(["plan", str(JOB), *options]) == 2
    assert "lr_scheduler.total_steps: 1 is less" in capsys.readouterr().err


@pytest.mark.parametrize("largest_chunk", [loss.LARGEST_CHUNK, 576])
def test_large_microbatches_follow_from_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, largest_chunk: int
) -> None:
    # Of small chunks, the loss has more for a larger microbatch.
    monkeypatch.setattr(loss, "LARGEST_CHUNK", largest_chunk)

    def pieces(size: int):
        changes = {LOCAL_BATCH: size, GLOBAL_BATCH: 4 * size, "job.device": "cuda"}
        return trace_pieces(resolve_job(override(CONFIG, changes)))

    derived = scaled(pieces(2), pieces(4), 4)
    traced = pieces(8)
    assert derived is not None
    assert len(traced.after.forward.events) > 100 or largest_chunk > 576
    for mine, true in ((derived.blocks[0], traced.blocks[0]), (derived.after, traced.after)):
        assert mine.forward.events == true.forward.events
        assert mine.backward.events == true.backward.events
        assert mine.forward.net == true.forward.net


def test_the_front_has_no_plan_that_another_beats() -> None:
    def plan(seconds: float, num_bytes: int) -> FoundPlan:
        return FoundPlan({TP: seconds}, num_bytes, seconds, 1.0, 0.5, 0.0, "")

    plans = [plan(1.0, 9), plan(2.0, 5), plan(2.5, 7), plan(3.0, 4), plan(4.0, 4)]
    result = SearchResult(found=plans[::-1])
    assert result.front == [plans[0], plans[1], plans[3]]
    assert result.best == plans
    # Of plans that differ in layouts alone, the fastest is among the best.
    faster = dataclasses.replace(plans[2], changes={TP: 2.5, ASYNC_TP: True}, seconds=1.5)
    result.found.append(faster)
    assert result.best == [plans[0], faster, plans[1], *plans[3:]]


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
    # Every plan, timed in full, on a GPU as the command plans it.
    evaluator = Evaluator(
        plannable(CONFIG, hardware=H100)[0], H100, is_compiled=False, use_cache=True
    )
    exact = [evaluator.evaluate(plan["changes"], exactly=True) for plan in plans]
    fastest = min(one.seconds for one in exact if isinstance(one, FoundPlan))
    assert plans[0]["seconds"] == pytest.approx(fastest)
    assert '"tokens_per_second"' in page.read_text()
    assert cli.main(["verify", str(best), "--shrink"]) == 0
    assert "AGREES" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kept", [{CP: 1}, {PP: 1, LOCAL_BATCH: 4}], ids=["pipelines", "rings"])
def test_the_best_found_is_the_best_of_all_layouts(kept: dict[str, int]) -> None:
    every = space(8, **{TP: 2, MODE: "none", **kept})
    result = search(every, H100, num_workers=2, exhaustive=True)
    assert result.is_complete
    assert not result.failures
    plans = {frozenset(plan.items()): plan for plan in every.candidates()}
    left = list(plans.values())
    while left:
        for plan in every.neighbours(left.pop()):
            key = frozenset(plan.items())
            if key not in plans:
                plans[key] = plan
                left.append(plan)
    # Every plan with every layout, timed in full.
    evaluator = Evaluator(CONFIG, H100, is_compiled=False, use_cache=True)
    rows = [evaluator.evaluate(plan, exactly=True) for plan in plans.values()]
    fastest = min(row.seconds for row in rows if isinstance(row, FoundPlan))
    assert len(plans) > 2 * sum(1 for _ in every.candidates()) > 16
    assert result.best[0].seconds == pytest.approx(fastest, rel=1e-9)
    assert search(every, H100).best[0].seconds == pytest.approx(fastest, rel=0.01)
