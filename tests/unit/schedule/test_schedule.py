"""Actions as text and CSV, schedules by name, and the errors for schedules that cannot run."""

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    check,
    make_schedule,
    parse_action,
    read_csv,
    write_csv,
)
from titanlite.schedule.clock import TimedAction, run
from titanlite.tools.figures.timeline import walk
from titanlite.tools.planner.lower import add_communication

SIZES = [(1, 4), (2, 4), (3, 6), (4, 8), (4, 16)]


@pytest.mark.parametrize(
    "text", ["2F0", "0B13", "5I1", "7W2", "3SEND_F4", "3RECV_B0", "1UNSHARD", "2REDUCE_GRAD"]
)
def test_action_reads_what_it_writes(text):
    action = parse_action(text)
    assert str(action) == text
    assert action.parts == (action,)


def test_overlapped_pair_reads_what_it_writes():
    action = parse_action("(0F4;7B0)OVERLAP_F_B")
    assert action.parts == (Action(0, "F", 4), Action(7, "B", 0))
    assert str(action) == "(0F4;7B0)OVERLAP_F_B"


def test_empty_cell_is_idle():
    assert parse_action("  ") is None


@pytest.mark.parametrize("text", ["F0", "2Q0", "2F", "1UNSHARD3", "2F0x", "(2F0;3F1)OVERLAP_F_B"])
def test_action_that_is_none_is_named(text):
    with pytest.raises(ScheduleError) as error:
        parse_action(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_schedule_runs_with_and_without_communication(name, ranks, microbatches):
    schedule = make_schedule(name, ranks, microbatches)
    check(schedule)
    lowered = add_communication(schedule)
    check(lowered)
    for rank in range(ranks):
        assert lowered.compute(rank) == schedule.compute(rank)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_csv_gives_back_what_was_stored(name, tmp_path):
    for schedule in (make_schedule(name, 3, 6), add_communication(make_schedule(name, 3, 6))):
        path = tmp_path / f"{name}.csv"
        write_csv(schedule, path)
        assert read_csv(path) == schedule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,1Z0\n", "rank 1, cell 1"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", "no rank has stage 1"),
        ("", "empty"),
        ("0UNSHARD\n", "no compute action"),
    ],
)
def test_csv_that_cannot_be_read_says_where(text, said, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=said):
        read_csv(path)


def test_csv_that_is_not_there(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_csv(tmp_path / "none.csv")


HOSTILE_CSV = {
    # Iterating up to any of these numbers would never end.
    "0F999999999,0B999999999\n": "2 actions are too few for 1 stages and 1000000000 microbatches",
    "0F0,999999999F0\n": "2 actions are too few for 1000000000 stages",
    "0F1000000000\n": "is not an action",
    f"{'9' * 5000}F0\n": "is not an action",
    f"{'(' * 20_000}{')OVERLAP_F_B' * 5_000}\n": "is not an action",
    f"0F0,{'x' * 200_000}\n": "field larger than field limit",
    "0F0,\x1b[2J\n": r"is not an action",
    "\u0660F0\n": "is not an action",
    "0F0\0,0B0\n": "rank 0, cell 0|line contains NUL",
    "\udcff": "can't decode byte",
}


@pytest.mark.parametrize("text", HOSTILE_CSV, ids=range(len(HOSTILE_CSV)))
def test_csv_of_wrong_content_is_one_line(text, tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ScheduleError, match=HOSTILE_CSV[text]) as raised:
        read_csv(path)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


def test_what_is_no_csv_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    (tmp_path / "b.csv").mkdir()
    (tmp_path / "c.csv").symlink_to("/dev/zero")
    for name, said in (("a", "is a pipe"), ("b", "is a folder"), ("c", "is a pipe or a device")):
        with pytest.raises(ScheduleError, match=said):
            read_csv(tmp_path / f"{name}.csv")


def test_deadlock_names_the_blocked_action_of_each_rank():
    rows = [
        [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
    ]
    schedule = Schedule("mine", 2, (0, 1), rows)
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    waits = "rank 0 at 0B0, which waits for the backward of stage 1 for microbatch 0"
    assert waits in str(error.value)
    assert "rank 1 at 1F1, which waits for 0F1" in str(error.value)
    with pytest.raises(ScheduleError, match="rank 0 at 0B0, rank 1 at 1F1"):
        add_communication(schedule)


def test_blocked_receive_is_named():
    lowered = add_communication(make_schedule("1F1B", 2, 2))
    rows = [[a for a in row if a.kind != "SEND_F" or a.microbatch != 1] for row in lowered.actions]
    with pytest.raises(ScheduleError, match="rank 1 at 1RECV_F1, which waits for 0SEND_F1"):
        check(replace(lowered, actions=rows))


@pytest.mark.parametrize(
    ("dropped", "said"),
    [("1F2", "1F2 is missing"), ("0B1", "backward of stage 0 for microbatch 1 is missing")],
)
def test_missing_work_is_named(dropped, said):
    schedule = make_schedule("1F1B", 2, 4)
    rows = [[a for a in row if str(a) != dropped] for row in schedule.actions]
    with pytest.raises(ScheduleError, match=said):
        check(replace(schedule, actions=rows))


def test_work_done_twice_or_elsewhere_is_named():
    schedule = make_schedule("GPipe", 2, 2)
    twice = [schedule.actions[0] + [Action(0, "F", 1)], schedule.actions[1]]
    with pytest.raises(ScheduleError, match="0F1 runs twice"):
        check(replace(schedule, actions=twice))
    with pytest.raises(ScheduleError, match="1F0 is on rank 0, but its stage is on rank 1"):
        check(replace(schedule, actions=schedule.actions[::-1]))
    half = [[a for a in row if a.kind != "B"] for row in schedule.actions]
    inputs = [row + [Action(r, "I", m) for m in (0, 1)] for r, row in enumerate(half)]
    with pytest.raises(ScheduleError, match="0W0 is missing"):
        check(replace(schedule, actions=inputs))


def test_walk_starts_everything_as_soon_as_it_can():
    timeline = walk(make_schedule("1F1B", 4, 8))
    assert timeline.end == 3 * 8 + 3 * 3
    assert timeline.bubbles() == pytest.approx([1 - 24 / 33] * 4)
    held = [max(value for _, value in curve) for curve in timeline.curves.values()]
    assert held == [4, 3, 2, 1]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_a_1f1b_pipeline_has_the_known_bubble(stages, more, forward, backward):
    microbatches = stages - 1 + more
    schedule = make_schedule("1F1B", stages, microbatches)
    timeline = walk(schedule, lambda _, action: forward if action.kind == "F" else backward)
    assert timeline.end == (microbatches + stages - 1) * (forward + backward)
    share = (stages - 1) / (microbatches + stages - 1)
    assert timeline.bubbles() == pytest.approx([share] * stages)


def test_a_channel_sends_beside_the_work_and_a_wait_tells_what_for():
    waits = []
    sender = [
        *(TimedAction(1), TimedAction(4, gives=["a"], channel="link"), TimedAction(1)),
        *(TimedAction(2, gives=["b"], channel="link"), TimedAction(1, ["reply"])),
    ]
    receiver = [TimedAction(3, ["a"]), TimedAction(1, ["b"], ["reply"])]
    ran, free, blocked = run(
        [sender, receiver], lambda rank, need, now, giver: waits.append((rank, need, now, giver))
    )
    assert not blocked
    assert [(start, end) for rank, _, start, end in ran if rank == 0] == [
        *((0, 1), (1, 5), (1, 2), (5, 7), (9, 10))
    ]
    assert [(start, end) for rank, _, start, end in ran if rank == 1] == [(5, 8), (8, 9)]
    assert free == [10, 9]
    assert waits == [(1, "a", 0, (0, 1, 1, 5)), (0, "reply", 2, (1, 1, 8, 9))]
    assert run([[TimedAction(1), TimedAction(1, ["never"])], []])[2] == [(0, 1, "never")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1F1", 4, 8), "did you mean 1F1B"),
        (("GPipe", 0, 8), "number of ranks is 0"),
        (("GPipe", 4, 0), "number of microbatches is 0"),
        (("GPipe", 4, 8, 2), "needs 1 stages per rank, not 2"),
        (("LoopedBFS", 4, 8, 1), "needs 2 or more stages per rank, not 1"),
        (("ZBV", 4, 8, 3), "needs 2 stages per rank, not 3"),
        (("Interleaved1F1B", 4, 9), "2 rounds.*use 8 or 12"),
        (("DualPipeV", 4, 7), r"as many microbatches as stages \(8\), not 7"),
    ],
)
def test_schedule_that_cannot_be_made_says_why(arguments, said):
    with pytest.raises(ScheduleError, match=said):
        make_schedule(*arguments)


def test_which_schedules_split_the_backward_pass():
    split = {name for name in SCHEDULES if make_schedule(name, 2, 4).splits_backward}
    assert split == {"ZB-H1", "ZB-H2", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}


def test_names_may_be_in_any_case_or_short():
    assert make_schedule("gpipe", 2, 2).name == "GPipe"
    assert make_schedule("zbv", 2, 2).name == "ZBVZeroBubble"
