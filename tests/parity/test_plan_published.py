"""Published runs beside their plans, by the command: configs/plan/published/rows.toml."""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import make_pictures
import pytest

from titanlite.errors import ConfigError
from titanlite.tools.planner.command import PUBLISHED, main
from titanlite.tools.planner.events import Communication, Event, Site, Wait
from titanlite.tools.planner.hardware import load_hardware
from titanlite.tools.planner.planning import resolve
from titanlite.tools.planner.published import Planned, plan_row, read_rows, show
from titanlite.tools.planner.software import with_ring_of_torch_2_6
from titanlite.tools.simulate.network import bytes_sent

ROOT = Path(__file__).parents[2]
ROWS = read_rows(ROOT / PUBLISHED)
PAGE = ROOT / "docs/plan_published.md"


@pytest.fixture(autouse=True)
def its_own_loss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module that registers it is imported anew: each test has a registry of its own."""
    monkeypatch.chdir(ROOT)
    yield
    sys.modules.pop("configs.plan.published.loss_2024", None)


def test_every_row_is_a_legal_job_on_its_hardware() -> None:
    assert len({(row.source, row.name) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        device = load_hardware(row.hardware)
        for keys in row.tried:
            job, _, *further = row.command(keys)
            resolve([job, *further], device)
    fitted = {load_hardware(row.hardware).name for row in ROWS if row.fitted}
    assert fitted == {load_hardware(name).name for name in ("a100", "h100_96gb")}
    assert len(load_hardware("a100").fitted) + len(load_hardware("h100_96gb").fitted) == 5


def test_a_cheap_row_is_planned_as_the_page_says() -> None:
    name = "175B, 64 GPUs, selective"
    row = next(row for row in ROWS if row.name == name)
    # A process of its own: Dynamo can meet the fake tensors of another test.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        planned = pool.submit(plan_row, row).result()
    line = next(line for line in PAGE.read_text().splitlines() if name in line)
    assert f"{planned.speed_error:+8.1%}{' fitted' * planned.row.fitted}" in line


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_page_has_the_table_that_the_command_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--published", "--json", str(tmp_path / "rows.json")]) == 0
    table, _, commands = capsys.readouterr().out.partition("\n\ntitanlite plan ")
    assert table in PAGE.read_text()
    assert commands.count("\n") == len(ROWS)


def test_the_guide_has_the_errors_of_the_table() -> None:
    _, _, every = PAGE.read_text().partition("All sources")
    number, mean, signed, _ = re.findall(r"[+-]?[\d.]+%?", every)[:4]
    guide = (PAGE.parent / "plan.md").read_text()
    assert f"Of {number} steps that no figure was fitted to, the mean error is {mean}" in guide
    assert f"its sign\n{signed} (too fast)" in guide
    peaks, error = re.findall(r"[\d.]+%?", every.partition("memory, ")[2])[:2]
    assert f"Of {peaks} peaks the mean error is {error} (too low)" in guide


@pytest.mark.slow
def test_the_picture_of_a_plan_is_what_the_command_prints() -> None:
    assert make_pictures.draw_plan() == make_pictures.PLAN.read_text()


def test_rows_apart_are_in_no_mean_but_their_own() -> None:
    kinds = [replace(ROWS[0], fitted=False, apart=is_apart) for is_apart in (False, True)]
    planned = [Planned(row, "", 1.0, 1.0, 0.1 + 0.4 * row.apart, None, True, True) for row in kinds]
    shown = "\n".join(show(planned))
    for text in ("not fitted, 1 rows: mean error 10.0%", "apart, 1 rows: mean error 50.0%"):
        assert shown.count(f"speed, {text}") == 2, "of the source, and of all"


def test_mistakes_in_rows_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    for text, line in (
        ("a = 1", "rows.toml has no rows"),
        ('[[source]]\nsource = "A"\nrow = [{ name = "B" }]', "rows.toml: 0.unit: is missing"),
        ('[[source]]\nsource = "A"\nrow = [{ hint = "B" }]', "0.hint: is not a known key"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=line):
            read_rows(path)


def test_the_ring_of_torch_2_6_moves_all_heads_and_waits_at_once() -> None:
    """The planned bytes are those of PyTorch's own ring, which still sends the same messages."""
    cp, kv_heads, repeats, tokens = 4, 2, 3, 16
    numel = cp * 2 * kv_heads * tokens * HEAD_DIM
    forward, recomputed, backward = (
        Communication("all_gather", "cp", 2 * numel, cp, Site("layers.1.attention", phase), number)
        for number, phase in enumerate(("forward", "recomputation", "backward"), 2)
    )
    gradients = Communication("reduce_scatter", "cp", 4 * numel, cp, backward.place, 5)
    of_tp = Communication("all_gather", "tp", 8, 2, forward.place, 1)
    events = [of_tp, recomputed, Wait(1), Wait(3), backward, Wait(4), gradients, Wait(5)]
    found = list(with_ring_of_torch_2_6(events, cp, repeats))
    # The gather of the recomputation serves the backward pass.
    assert [getattr(one, "number", 0) for one in found] == [1, 3, 3, 1, 5, 5]
    _, gathered, _, _, reduced, _ = found
    assert isinstance(gathered, Communication)
    assert isinstance(reduced, Communication)
    sent: dict[str, list[Communication]] = {}
    for phase, of in run_ring_of_torch(cp, kv_heads * repeats, tokens).items():
        sent[phase] = [one for one in of if isinstance(one, Communication)]
    (first,), (again, *steps) = sent["forward"], sent["backward"]
    assert first.num_bytes == again.num_bytes == gathered.num_bytes
    # Each step sends the gradients of a rank's keys and values to the next rank.
    assert [one.kind for one in steps] == ["all_to_all"] * cp
    of_steps = sum(one.num_bytes for one in steps)
    assert bytes_sent(reduced.kind, reduced.num_bytes, cp) == of_steps


HEAD_DIM = 8


def run_ring_of_torch(cp: int, heads: int, tokens: int) -> dict[str, list[Event]]:
    """What PyTorch's ring does in the forward and in the backward pass of rank 0."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

    from titanlite.tools.planner.fake_world import fake_world, stand_ins
    from titanlite.tools.planner.recorder import StepRecorder

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    derivative = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: dict[str, list[Event]] = {}
    with fake_world(0, cp), stand_ins():
        group, recorder = dist.group.WORLD, StepRecorder({})
        assert group is not None
        with FakeTensorMode(), recorder.watching([]):
            q, k, v, grad = (
                torch.ones(1, heads, tokens, HEAD_DIM, dtype=torch.bfloat16) for _ in range(4)
            )
            out, lse = torch_ring._templated_ring_attention(
                group, 2, attention, q, k, v, is_causal=True
            )
            found["forward"] = list(recorder.events)
            recorder.events.clear()
            torch_ring._templated_ring_attention_backward(
                *(group, 2, derivative, grad, "grad_out", q, k, v, out, lse, True), dropout_p=0.0
            )
            found["backward"] = list(recorder.events)
    return found


def test_what_the_rows_have_is_not_ignored() -> None:
    for more, said in (
        (["--hardware=h100"], "leave out hardware"),
        (["--training.steps=1"], "leave out --training.steps=1"),
        (["nowhere.toml"], "nowhere.toml cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            main(["--published", *more])
