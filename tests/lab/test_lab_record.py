"""The record of a run: messages, collectives, steps, and mistakes that name both sides."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from titanlite.tools.lab import CommunicationError, Mesh, VirtualCluster


@pytest.fixture(scope="module")
def small():
    with VirtualCluster(Mesh(rank=3), timeout_seconds=60) as cluster:
        yield cluster


def ring(device, tensor):
    return device.all_reduce(tensor * 10**device.rank, label="gradient")


class TestRecord:
    def test_every_message_has_its_sides_tensor_collective_and_values(self, small):
        small.run(ring, torch.tensor([1, 2, 3]), algorithm="ring", record=True)
        record = small.record
        assert len(record.messages) == small.counts.d2d_messages == 12
        assert sum(one.tensor.nbytes for one in record.messages) == small.counts.d2d_bytes
        for message in record.messages:
            assert message.target == (message.source + 1) % 3
            assert message.within == message.into == "all_reduce 0"
            assert message.label == "gradient"
            assert message.tensor.shape == (1,)
            assert message.tensor.dtype == "int64"
            assert message.sent.where.startswith("test_lab_record.py:")
        by_0 = [one.tensor.values for one in record.messages if one.source == 0]
        # Part 2 of rank 0; the sum of part 1 of ranks 0 and 2; the whole parts 0 and 2.
        assert by_0 == [(3,), (202,), (111,), (333,)]

    def test_without_the_option_the_same_messages_have_no_values(self, small):
        inputs = torch.tensor([1, 2, 3])
        results = small.run(ring, inputs)
        with_values = small.run(ring, inputs, record=True)
        assert all(map(torch.equal, results, with_values))
        small.run(ring, inputs)
        assert {one.tensor.values for one in small.record.messages} == {None}

    def test_a_message_takes_a_step_and_a_rank_one_message_at_a_time(self, small):
        def to_all(device):
            return device.broadcast(torch.ones(2))

        small.run(to_all)
        flights = small.record.steps.flights
        assert [(one.message.source, one.message.target, one.start) for one in flights] == [
            (0, 1, 0),
            (0, 2, 1),
        ]
        small.run(ring, torch.ones(3), algorithm="ring")
        steps = small.record.steps
        assert steps.length == 4
        assert sorted((one.message.source, one.start) for one in steps.flights) == [
            (rank, step) for rank in range(3) for step in range(4)
        ]

    def test_blocks_and_the_collectives_of_torch_are_on_the_clock(self, small):
        def step(device):
            weight = torch.ones(2, requires_grad=True)
            with record_function("all"):
                with record_function("forward"):
                    loss = (weight * (device.rank + 1)).sum()
                with record_function("backward"):
                    loss.backward()
                work = dist.all_reduce(weight.grad, async_op=True)
                with record_function("other work"):
                    (weight * 2).sum()
                work.wait()
            return weight.grad

        small.run(step)
        steps = small.record.steps
        blocks = {
            one.name: (one.start, one.end, one.is_work) for one in steps.blocks if one.rank == 1
        }
        # The all-reduce runs beside the other work.
        assert blocks == {
            "forward": (0, 1, True),
            "backward": (1, 2, True),
            "other work": (2, 3, True),
            "all": (0, 3, False),
        }
        (call,) = steps.calls
        assert (call.start, call.call.ranks, call.call.names[1]) == (2, (0, 1, 2), "all_reduce 0")
        assert steps.length == 3

    def test_messages_of_torch_keep_the_order_of_their_process_group(self, small):
        def main(device):
            group = dist.new_group([0, 2])
            if device.rank == 2:
                dist.isend(torch.full((3,), 1.0), 0)
                dist.send(torch.full((2,), 2.0), 0, group=group)
            if device.rank == 0:
                first, second = torch.empty(3), torch.empty(2)
                dist.recv(second, 2, group=group)
                dist.recv(first, 2)
            dist.barrier()
            dist.destroy_process_group(group)

        small.run(main, record=True)
        messages = small.record.messages
        assert [(one.source, one.target, one.tensor.values) for one in messages] == [
            (2, 0, (1.0, 1.0, 1.0)),
            (2, 0, (2.0, 2.0)),
        ]


def wait_for_nothing(device):
    if device.rank == 0:
        device.channel(1).recv(torch.empty(1))


def send_before_receiving(device):
    device.channel((device.rank + 1) % 3).send(torch.ones(2))
    device.channel((device.rank - 1) % 3).recv(torch.empty(2))


def receive_before_sending(device):
    device.channel((device.rank - 1) % 3).recv(torch.empty(2))
    device.channel((device.rank + 1) % 3).send(torch.ones(2))


def receive(tensor, device):
    if device.rank == 1:
        device.channel(2).recv(tensor)
    if device.rank == 2:
        device.channel(1).send(torch.ones(4))


def receive_more(device):
    receive(torch.empty(5), device)


def receive_less(device):
    receive(torch.empty(3), device)


def receive_integers(device):
    receive(torch.empty(4, dtype=torch.int32), device)


def unequal_shapes(device):
    for size in (1, 2, 3):
        device.all_reduce(torch.ones(size))
    device.all_reduce(torch.ones(5 if device.rank == 1 else 4))


def other_order(device):
    kinds = ["all_reduce", "broadcast"]
    for kind in reversed(kinds) if device.rank == 2 else kinds:
        getattr(device, kind)(torch.ones(2))


def unequal_dtypes_in_torch(device):
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if device.rank == 1 else torch.float32))


def missing_in_torch(device):
    if device.rank != 1:
        dist.all_reduce(torch.ones(4))


def crossed(device):
    if device.rank == 0:
        dist.recv(torch.ones(4), 1)
    elif device.rank == 1:
        dist.barrier()
    else:
        dist.send(torch.ones(4), 1)


def unreceived(device):
    if device.rank == 0:
        device.channel(2).isend(torch.ones(1))


HERE = r"at test_lab_record\.py:\d+"
MISTAKES = {
    wait_for_nothing: ("deadlock", 0, f"waits {HERE} for 4 bytes from rank 1, which has ended"),
    send_before_receiving: (
        "deadlock",
        0,
        f"is in a deadlock, 0 -> 1 -> 2 -> 0: .* rank 1 waits {HERE} until its 8 bytes "
        r"\(float32 \(2,\)\) are received by rank 2; .* send with isend",
    ),
    receive_before_sending: (
        "deadlock",
        0,
        f"0 -> 2 -> 1 -> 0: .* rank 0 waits {HERE} for 8 bytes from rank 2; .* one of them must "
        "send before it receives",
    ),
    receive_more: (
        "size",
        1,
        rf"waits {HERE} for 20 bytes \(float32 \(5,\)\) from rank 2, which sent 16 ",
    ),
    receive_less: ("size", 1, rf"waits {HERE} for 12 bytes .* from rank 2, which sent 16 "),
    receive_integers: (
        "dtype",
        1,
        rf"for int32 \(4,\) from rank 2, which sent float32 \(4,\) {HERE}: the dtypes differ",
    ),
    unequal_shapes: (
        "collectives",
        1,
        rf"calls all_reduce 3 {HERE} with float32 \(5,\), rank [02] with float32 \(4,\); the shape "
        rf"must .*; rank \d waits in all_reduce 3 {HERE} for (20|16) bytes .* which sent (16|20) ",
    ),
    other_order: (
        "collectives",
        2,
        f"calls broadcast 0 {HERE} where rank [01] calls all_reduce 0 {HERE}; .* same order",
    ),
    unequal_dtypes_in_torch: (
        "collectives",
        1,
        r"with float64 \(4,\), rank [02] with float32 \(4,\); the dtype must",
    ),
    missing_in_torch: ("deadlock", None, f"waits in all_reduce 0 {HERE} for .*1(,|;).* has ended"),
    crossed: (
        "deadlock",
        None,
        f"(0 -> 1 -> 0|1 -> 2 -> 1): .* rank 1 waits in barrier 0 {HERE} for ranks 0, 2",
    ),
    unreceived: (
        "unreceived",
        0,
        rf"sent 1 message to rank 2, which received 0: nothing receives 4 bytes .* {HERE}",
    ),
}


class TestMistakes:
    """Each ends the cluster; the next run starts it again."""

    @pytest.mark.parametrize("job", MISTAKES, ids=lambda job: job.__name__)
    def test_a_mistake_names_both_sides(self, small, job):
        kind, rank, pattern = MISTAKES[job]
        with pytest.raises(CommunicationError, match=pattern) as raised:
            small.run(job)
        assert raised.value.kind == kind
        # None: the first rank that is seen to wait.
        assert rank in (None, raised.value.rank)

    def test_a_deadlock_is_seen_while_another_device_still_computes(self, small):
        def main(device):
            if device.rank == 2:
                # Computes for a while; the other two are lost already.
                end = time.monotonic() + 30
                while time.monotonic() < end:
                    torch.ones(4).sum()
            else:
                device.channel(1 - device.rank).recv(torch.empty(1))

        start = time.monotonic()
        small.run(lambda device: None)
        with pytest.raises(CommunicationError, match="deadlock, 0 -> 1 -> 0"):
            small.run(main)
        assert time.monotonic() - start < 20

    def test_a_device_that_waits_for_a_busy_one_is_not_in_a_deadlock(self, small):
        def main(device):
            if device.rank == 0:
                end = time.monotonic() + 0.5
                while time.monotonic() < end:
                    torch.ones(4).sum()
                device.channel(1).send(torch.ones(1))
            elif device.rank == 1:
                device.channel(0).recv(torch.empty(1))
            device.all_reduce(torch.ones(1))
            return "done"

        assert small.run(main) == ["done"] * 3
