"""Files of hardware: those that are shipped, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.errors import ConfigError
from titanlite.tools.planner.hardware import FOLDER, Curve, known_hardware, load_hardware
from titanlite.tools.planner.planning import JobPlan, plan_job, resolve
from titanlite.tools.planner.report import show

UNCALIBRATED = {"gb200", "l40s", "rtx4090", "rtx5090"}
"""Devices whose plans were compared with no run."""


def test_every_shipped_file_loads_and_lists_at_most_five_fitted_figures() -> None:
    assert set(known_hardware()) >= {"a100", "h100", "h200", "b200", "mi300x"} | UNCALIBRATED
    for name in known_hardware():
        found = load_hardware(name)
        assert found.kind == ("cpu" if name == "cpu" else "gpu")
        assert found.accuracy is None or name not in UNCALIBRATED
        assert found.peak("bfloat16") >= found.peak("float32") or found.kind == "cpu"
        assert found.peak("float8") >= found.peak("bfloat16") or found.kind == "cpu"
        assert len(found.fitted) <= 5
        assert (found.host is None) == (found.kind == "cpu")
        if found.host is not None:
            assert found.host.num_bytes > found.memory.num_bytes
            assert found.host.bytes_per_second < found.host.memory_bytes_per_second
            assert 0 < found.host.memory_share <= 1
        for share in (found.memory.share, found.node.share, found.fabric.share):
            assert all(0 < y <= 1 for _, y in share.points) or found.kind == "cpu"
        if found.kind == "gpu":
            assert found.node.bytes_per_second > found.fabric.bytes_per_second


def test_an_unknown_dtype_has_the_peak_of_a_wider_one() -> None:
    a100 = load_hardware("a100")
    assert a100.peak("float8_e4m3fn") == a100.peak("bfloat16") == 312e12
    assert load_hardware("h100").peak("float8_e4m3fn") == 1979e12


def test_a_curve_is_a_line_of_logarithms_and_constant_outside() -> None:
    curve = Curve(((1e2, 0.1), (1e4, 0.4)))
    assert curve(1) == curve(1e2) == pytest.approx(0.1)
    assert curve(1e3) == pytest.approx(0.2)
    assert curve(1e4) == curve(1e9) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("num_bytes = 80e9\n", "", "memory.num_bytes: is missing; give it"),
        ("num_bytes = 80e9", "num_bytes = -1", "memory.num_bytes: -1 is not a number above 0"),
        (
            "num_ranks = 8",
            "num_ranks = 8.5",
            "node.num_ranks: 8.5 is refused: input should be a valid int",
        ),
        ("share = 0.8\n", "share = [[2, 1], [1, 1]]\n", "fabric.share: [[2, 1], [1, 1]] is not a"),
        ("half_m = 0", "half_m = true", "products.half_m: True is not a number"),
        ("bytes_per_second = 12.4e9\n", "", "host.bytes_per_second: is missing; give it"),
        ("[fitted]", "[fited]", "fited: is not a known key; remove it"),
        ('kind = "gpu"', 'kind = "tpu"', "kind: 'tpu' is refused: input should be 'gpu' or 'cpu'"),
        (
            "is_causal_halved = true",
            "is_causal_halved = 1",
            "attention.is_causal_halved: 1 is refused",
        ),
        (
            "bfloat16 = 312e12",
            "bfloat16 = 0",
            "flops_per_second.bfloat16: 0 is not a number above 0",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_key(
    before: str, after: str, line: str, tmp_path: Path
) -> None:
    text = (FOLDER / "a100.toml").read_text()
    assert before in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ConfigError) as error:
        load_hardware(str(path))
    assert [problem for problem in error.value.problems if line in problem]
    assert all(problem.startswith("mine.toml: ") for problem in error.value.problems)


def test_an_unknown_name_or_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mine' is not known; give one of a100, b200"):
        load_hardware("mine")
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read \(No such file"):
        load_hardware(str(tmp_path / "none.toml"))
    path = tmp_path / "mine.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_hardware(str(path))


def test_a_plan_fits_if_the_upper_end_of_its_range_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"

    def plan_on(num_bytes: int) -> JobPlan:
        accuracy = '[accuracy]\nmemory = [0.9, 1.5]\nstep = [0.8, 1.25]\nrows = "mine"\n'
        path.write_text(f'base = "h100"\n[memory]\nnum_bytes = {num_bytes}\n{accuracy}')
        device = load_hardware(str(path))
        resolved, _ = resolve(["configs/single.toml"], device)
        return plan_job(resolved, device)

    plan = plan_on(10**12)
    beside = plan.device_bytes - plan.reserved_bytes
    expected = (0.9 * plan.reserved_bytes + beside, 1.5 * plan.reserved_bytes + beside)
    assert plan.bytes_range == pytest.approx(expected)
    assert plan.prediction is not None
    seconds = plan.prediction.step.seconds
    assert plan.seconds_range == pytest.approx((0.8 * seconds, 1.25 * seconds))
    assert "it fits" in show(plan)
    tight = plan_on(plan.device_bytes + plan.reserved_bytes // 4)
    assert "IT MAY NOT FIT" in show(tight)
    assert tight.warnings[0].startswith("may not fit")
    full = plan_on(plan.device_bytes - 1)
    assert "IT DOES NOT FIT" in show(full)
    assert full.warnings[0].startswith("does not fit")


def test_a_file_gives_only_what_differs_from_its_base(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text('base = "a100"\n[products]\nshare = 0.5\n')
    path = tmp_path / "mine.toml"
    path.write_text('base = "slow.toml"\n[software]\nring = "torch 2.6"\n')
    found, a100 = load_hardware(str(path)), load_hardware("a100")
    assert (found.software.ring, a100.software.ring) == ("torch 2.6", "titanlite")
    assert found.products == replace(a100.products, share=0.5)
    assert found.memory == a100.memory
    for base, line in (
        ("3", "mine.toml: base: 3 is not the name or file of another device"),
        ('"mine.toml"', "mine.toml: base: 'mine.toml' is not the name or file"),
        ('"nine"', "--hardware: 'nine' is not known"),
        ('"a100"\n[software]\nring = "new"', "mine.toml: software.ring: 'new' is refused"),
    ):
        path.write_text(f"base = {base}\n")
        with pytest.raises(ConfigError, match=line):
            load_hardware(str(path))
