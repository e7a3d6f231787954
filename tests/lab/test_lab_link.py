"""Slow links: a run takes at least as long as its messages, and is otherwise unchanged."""

import time

import pytest
import torch

from titanlite.tools.lab import (
    Link,
    data_parallelism_main,
    over_channels,
    ring_attention,
    shard_sequence,
)
from titanlite.tools.lab.link import Port

# 10 ms per message and 10 ms per 10,000 bytes.
SLOW = Link(latency_seconds=0.01, bytes_per_second=1e6)


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    assert SLOW.seconds(20_000) == pytest.approx(0.03)
    assert Link().seconds(1 << 40) == 0


def test_a_port_receives_one_message_at_a_time_and_none_before_both_sides_are_ready():
    port = Port(SLOW)
    assert port.receive(sent=100.0, posted=90.0, num_bytes=10_000) == pytest.approx(100.02)
    # Sent at the same time, by another device: its bytes arrive after those of the first.
    assert port.receive(sent=100.0, posted=90.0, num_bytes=10_000) == pytest.approx(100.03)
    assert port.receive(sent=100.0, posted=200.0, num_bytes=10_000) == pytest.approx(200.02)


def test_a_port_sends_one_message_at_a_time():
    port = Port(SLOW)
    now = time.monotonic()
    first, second = port.send(1_000_000_000), port.send(10_000)
    assert now <= first[0] <= time.monotonic()
    assert first[1] == pytest.approx(first[0] + 1000)
    assert second == (first[1], pytest.approx(first[1] + 0.01))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"latency_seconds": -1.0}, "latency_seconds: -1.0 is not a latency; use 0 or more"),
        ({"latency_seconds": float("nan")}, "latency_seconds: nan is not a latency"),
        ({"bytes_per_second": 0.0}, "bytes_per_second: 0.0 is not a bandwidth; use more than 0"),
        ({"bytes_per_second": float("nan")}, "bytes_per_second: nan is not a bandwidth"),
    ],
)
def test_a_link_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        Link(**values)


def test_a_send_is_done_when_the_message_has_left(cluster_of_4):
    def send_or_receive(device, tensor):
        if device.rank > 1:
            return 0.0
        start = time.monotonic()
        if device.rank == 0:
            for _ in range(2):
                device.channel(1).send(tensor)
        else:
            into = [torch.empty_like(tensor) for _ in range(2)]
            for transfer in [device.channel(0).irecv(each) for each in into]:
                transfer.wait()
            assert all(torch.equal(each, tensor) for each in into)
        return time.monotonic() - start

    sender, receiver, *_ = cluster_of_4.run(send_or_receive, torch.ones(5_000), link=SLOW)
    assert sender >= 0.04
    assert receiver >= 0.05


def test_a_slow_device_takes_the_time_of_its_flops(cluster_of_4):
    def products(device, x):
        start = time.monotonic()
        for _ in range(3):
            x = x @ x
        return x, time.monotonic() - start

    x = torch.eye(100)
    # Three products of 2e6 operations.
    for result, seconds in cluster_of_4.run(products, x, flops_per_second=1e8):
        assert torch.equal(result, x)
        assert seconds >= 3 * 0.02
    assert cluster_of_4.counts.flops == 4 * 3 * 2e6
    with pytest.raises(ValueError, match="flops_per_second: -1 is not positive"):
        cluster_of_4.run(products, x, flops_per_second=-1)


@pytest.mark.slow
def test_overlap_is_faster_than_compute_and_communication_one_after_the_other(cluster_of_4):
    """Data parallelism where compute and communication take known times on every machine."""
    layers, dim, batch, flops_per_second = 4, 128, 256, 5e7
    link = Link(latency_seconds=2e-4, bytes_per_second=1.1e6)
    # Forward, weight gradients, and input gradients except for the first layer's.
    compute = (3 * layers - 1) * 2 * (batch // 4) * dim * dim / flops_per_second
    communicate = layers * 6 * link.seconds(dim * dim * 4 // 4)
    assert 0.5 < communicate / compute < 1

    def seconds_per_step(overlap):
        job = over_channels(data_parallelism_main, overlap=overlap)
        records = cluster_of_4.run(
            job,
            torch.ones(batch, dim),
            layers,
            2,
            algorithm="ring",
            link=link,
            flops_per_second=flops_per_second,
        )
        return max(record.seconds for record in records)

    in_turn = compute + communicate
    assert seconds_per_step(overlap=False) >= in_turn
    # A busy machine may be slow, but not several times in a row.
    assert any(seconds_per_step(overlap=True) < in_turn for _ in range(5))


@pytest.mark.slow
def test_ring_attention_computes_while_keys_travel(cluster_of_4):
    world_size, heads, num_local, features = 4, 2, 64, 32
    flops_per_second = 2 * 2 * heads * num_local**2 * features / 0.1
    # A block takes 0.1 s, and so do its keys and values.
    link = Link(bytes_per_second=2 * heads * num_local * features * 4 / 0.1)
    shards = shard_sequence(torch.ones(3, heads, 4 * num_local, features), 4, "headtail")

    def attend(device, shards):
        device.barrier()
        start = time.monotonic()
        ring_attention(device, *shards[device.rank], causal=False)
        return time.monotonic() - start

    def seconds():
        return max(cluster_of_4.run(attend, shards, link=link, flops_per_second=flops_per_second))

    in_turn = (2 * world_size - 1) * 0.1
    assert any(seconds() < 0.9 * in_turn for _ in range(5))
    assert seconds() >= world_size * 0.1
