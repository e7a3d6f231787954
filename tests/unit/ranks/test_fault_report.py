"""What is made of the states of several ranks: who is waited for, who went astray, and how."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from titanlite.ranks.report import Absent, Call, Message, RankState, find_astray, write_report

WORLD = {"0": ("the world", (0, 1, 2)), "1": ("tp", (0, 1)), "2": ("dp_shard", (1, 2))}
OPERATIONS = {"A": "all_reduce", "B": "broadcast", "G": "all_gather"}


def state(
    rank: int, calls: Sequence[str], *, done: int | None = None, group: str = "0", **more: object
) -> RankState:
    """A rank whose calls are letters, a digit after one being its place; those past `done` wait."""
    made = [
        Call(
            group=group,
            number=number,
            operation=OPERATIONS[letter[0]],
            num_elements=8,
            dtype="float",
            site=f"model.py:{letter[1:] or ord(letter)} in forward",
            is_done=done is None or number <= done,
        )
        for number, letter in enumerate(calls, 1)
    ]
    return RankState(rank, site=f"data.py:{rank} in read", calls=made, groups=WORLD, **more)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("AGBA", "called all_gather of 8 float at model.py:71 in forward before broadcast"),
        (
            "AGA",
            "skipped broadcast of 8 float at model.py:66 in forward, which ranks 0, 1 called; its ",
        ),
        ("ABBGA", "called broadcast of 8 float at model.py:66 in forward, which ranks 0, 1 did"),
        ("AAGA", "called all_reduce of 8 float at model.py:65 in forward; ranks 0, 1 called"),
    ],
)
def test_how_a_rank_went_astray(bad, words):
    states = {0: state(0, "ABGA"), 1: state(1, "ABGA"), 2: state(2, bad)}
    astray = find_astray(states, WORLD)
    assert astray is not None
    assert (astray.rank, astray.axis) == (2, "the world")
    assert astray.number == (3 if words.startswith("called broadcast") else 2)
    assert words in astray.text


def test_the_same_operation_from_another_place_counts_where_asked():
    usual, swapped = ["A1", "A2", "A3"], ["A1", "A3", "A2"]
    states = {0: state(0, usual), 1: state(1, swapped), 2: state(2, usual)}
    assert find_astray(states, WORLD) is None
    astray = find_astray(states, WORLD, by_site=True)
    assert astray is not None
    assert (astray.rank, astray.number) == (1, 2)
    assert "called all_reduce of 8 float at model.py:3 in forward before all_reduce" in astray.text


def test_ranks_that_agree_as_far_as_they_go_are_not_astray():
    states = {0: state(0, "ABG"), 1: state(1, "AB"), 2: state(2, "ABGA")}
    assert find_astray(states, WORLD, by_site=True) is None


def test_the_rank_at_the_end_of_a_chain_of_waits_is_named():
    # 0 waits for 1 over tp, 1 for 2 over dp_shard, and 2 for nobody.
    states = {
        0: state(0, "AG", done=1, group="1"),
        1: state(1, "B", done=0, group="2"),
        2: state(2, "", stack=["train.py:1 in train", "data.py:2 in read"]),
    }
    report = write_report(states, {})
    assert report.rank == 2
    assert report.headline == (
        "did not reach broadcast 1 over dp_shard; rank 1 is waiting in it; rank 2 is at "
        "data.py:2 in read"
    )
    waits = "rank 0 is waiting for rank 1 in all_gather 2 over tp (ranks 0, 1), 8 float"
    assert waits in report.body
    assert report.body.endswith(
        "Python stack of rank 2 (most recent call last):\n"
        "  train.py:1 in train\n  data.py:2 in read"
    )


def test_a_rank_without_account_is_named():
    states = {0: state(0, "A", done=0), 1: state(1, "A", done=0)}
    report = write_report(states, {2: Absent("has died", ["train.py:1 in train"])}, "a reason")
    assert (report.rank, report.headline) == (2, "has died")
    assert report.body.startswith("The run has stopped: a reason.\n")
    assert "Python stack of rank 2, as last recorded (most recent call last):" in report.body


def test_a_message_that_does_not_come():
    message = Message("recv", (2,), "ring.py:3 in wait", "cp")
    states = {0: state(0, "A", message=message), 1: state(1, "AA", done=1), 2: state(2, "A")}
    report = write_report(states, {})
    assert report.rank == 2
    missed = "did not reach the recv over cp with rank 0 and all_reduce 2 over the world"
    assert missed in report.headline
    waits = "rank 0 is waiting for rank 2 in a recv over cp, called at ring.py:3 in wait"
    assert waits in report.body


def test_a_rank_that_never_came_has_its_place():
    states = {0: state(0, "A", done=0), 1: state(1, "A", done=0)}
    absent = {2: Absent("did not join the rendezvous")}
    report = write_report(states, absent, describe_place=lambda rank: f"tp {rank}")
    assert "rank 0 (tp 0) is waiting for rank 2 in all_reduce 1" in report.body
    assert "rank 2 (tp 2) did not join the rendezvous" in report.body


def test_ranks_that_wait_for_each_other():
    states = {
        0: state(0, "A", done=0, group="1"),
        1: state(1, "A", done=0, group="2"),
        2: state(2, "A", done=0),
    }
    report = write_report(states, {})
    assert report.rank in (0, 1)
    assert "did not reach" in report.headline


def test_without_a_recorder_the_one_that_does_not_wait_is_named():
    message = Message("message", (), "dp.py:1 in step")
    states = {
        0: state(0, "", message=message, error="RuntimeError: Timed out"),
        1: state(1, ""),
        2: state(2, "", message=message),
    }
    report = write_report(states, {})
    assert (report.rank, report.headline) == (
        1,
        "is not waiting, but ranks 0, 2 are; rank 1 is at data.py:1 in read",
    )


def test_an_account_survives_its_journey():
    sent = state(1, "AB", done=1, message=Message("recv", (0,), "x"), stack=["a"])
    assert RankState.of_dict(asdict(sent)) == sent


def test_ranks_send_different_numbers_of_tokens():
    send = Call("0", 1, "all_to_all", 24, "float", "dispatch.py:1 in send")
    calls = [replace(send, num_elements=24 + 8 * rank) for rank in range(4)]
    states = {rank: RankState(rank, calls=[call]) for rank, call in enumerate(calls)}
    assert find_astray(states, WORLD) is None
    states[2].calls[0] = replace(send, dtype="double")
    assert find_astray(states, WORLD) is not None


def test_the_root_of_a_scatter_gives_what_all_receive():
    scatter = Call("0", 1, "scatter", 24, "uint8", "save.py:1 in save")
    states = {
        rank: RankState(rank, calls=[replace(scatter, num_elements=24 if rank == 0 else 8)])
        for rank in range(3)
    }
    assert find_astray(states, WORLD) is None
    states[2].calls[0] = replace(scatter, dtype="float")
    assert find_astray(states, WORLD) is not None
