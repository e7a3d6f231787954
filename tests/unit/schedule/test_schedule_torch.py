"""Schedules equal PyTorch's action for action, before and after lowering."""

from itertools import product
from unittest.mock import Mock

import pytest

from titanlite.schedule import ScheduleError, make_schedule, read_csv, write_csv
from titanlite.tools.planner.lower import add_communication, add_sends_and_receives

pytest.importorskip("torch.distributed.pipelining")
from torch.distributed.pipelining import schedules as theirs

MULTI = {
    "Interleaved1F1B": theirs.ScheduleInterleaved1F1B,
    "LoopedBFS": theirs.ScheduleLoopedBFS,
    "InterleavedZeroBubble": theirs.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": theirs.ScheduleZBVZeroBubble,
    "DualPipeV": theirs.ScheduleDualPipeV,
}


def torch_schedule(name, ranks, microbatches, chunks):
    """PyTorch's schedule, built with stages that only have an index."""
    place = {"group_rank": 0, "group_size": ranks, "num_stages": ranks * chunks, "submod": None}
    return MULTI[name]([Mock(**place) for _ in range(chunks)], microbatches)


def as_text(rows):
    return [[str(action) for action in row if action is not None] for row in rows]


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_equal_action_for_action(name, ranks):
    compared = 0
    for microbatches, chunks in product((1, 2, 3, 4, 6, 8, 9, 12, 13), (2, 3)):
        try:
            expected = torch_schedule(name, ranks, microbatches, chunks)
        except ValueError:
            with pytest.raises(ScheduleError):
                make_schedule(name, ranks, microbatches, chunks)
            continue
        schedule = make_schedule(name, ranks, microbatches, chunks)
        assert as_text(schedule.actions) == as_text(expected.pipeline_order.values())
        lowered = add_communication(schedule)
        assert as_text(lowered.actions) == as_text(expected.pipeline_order_with_comms.values())
        sent = add_sends_and_receives(schedule).actions
        bare = {r: [a for a in row if a] for r, row in expected.pipeline_order.items()}
        place = schedule.stage_to_rank.__getitem__
        assert as_text(sent) == as_text(
            theirs._add_send_recv(bare, place, schedule.num_stages).values()
        )
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_single_stage_schedules_equal(name, ranks):
    theirs_by_name = {"GPipe": theirs.ScheduleGPipe, "1F1B": theirs.Schedule1F1B}
    for microbatches in (ranks, ranks + 3, 4 * ranks):
        stage = Mock(group_rank=0, group_size=ranks, num_stages=ranks, submod=None)
        expected = theirs_by_name[name](stage, microbatches)._get_pipeline_order()
        if name == "1F1B":
            # PyTorch's table numbers the last rank's forwards from 1; its runtime is correct.
            expected[ranks - 1] = [
                action._replace(microbatch_index=action.microbatch_index - 1)
                if str(action).startswith(f"{ranks - 1}F")
                else action
                for action in expected[ranks - 1]
                if action is not None
            ]
        expected = {
            rank: [a for a in row if a is not None and "REDUCE" not in str(a)]
            for rank, row in expected.items()
        }
        schedule = make_schedule(name, ranks, microbatches)
        assert as_text(schedule.actions) == as_text(expected.values())


@pytest.mark.parametrize("name", ["Interleaved1F1B", "DualPipeV"])
def test_pytorch_reads_our_csv_and_we_read_its(name, tmp_path):
    schedule = make_schedule(name, 2, 4)
    write_csv(schedule, tmp_path / "ours.csv")
    expected = torch_schedule(name, 2, 4, 2)
    order = expected.pipeline_order
    expected._load_csv(str(tmp_path / "ours.csv"))
    assert as_text(expected.pipeline_order.values()) == as_text(order.values())
    expected._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    assert read_csv(tmp_path / "theirs.csv").actions == add_communication(schedule).actions
