"""The virtual cluster: results, counts, channels, and failures that do not hang or persist."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlite.errors import RankError
from titanlite.tools.lab import Mesh, VirtualCluster


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_mesh_order_from_processes_that_stay(cluster):
    indices = cluster.run(lambda device: str(device.index))
    assert indices == [f"x={x}, y={y}" for x in range(2) for y in range(4)]
    pids = cluster.run(lambda device: os.getpid())
    assert len({*pids, os.getpid()}) == 9
    assert cluster.run(lambda device: os.getpid()) == pids


def test_an_existing_cluster_takes_another_mesh(cluster):
    cluster.mesh = Mesh(a=3, b=2)
    assert [str(index) for index in cluster.mesh] == cluster.run(lambda device: str(device.index))


def test_every_flop_message_and_byte_is_counted_once(cluster):
    weight, x = torch.ones(6, 5), torch.ones(4, 6)

    def step(device, weight, x):
        weight.requires_grad_()
        F.gelu(x @ weight).sum().backward()
        device.channel((device.rank + 1) % 8).isend(weight.grad)
        device.channel((device.rank - 1) % 8).recv(torch.empty(6, 5))
        dist.all_reduce(weight.grad)
        return weight.grad

    cluster.run(step, weight, x)
    counts = cluster.counts
    # Forward x @ w, backward x.T @ dy; x needs no gradient.
    assert counts.flops == 8 * 2 * (2 * 4 * 6 * 5)
    assert (counts.d2d_messages, counts.d2d_bytes) == (8, 8 * 30 * 4)
    assert (counts.h2d_messages, counts.h2d_bytes) == (16, 8 * (30 + 24) * 4)
    assert (counts.d2h_messages, counts.d2h_bytes) == (8, 8 * 30 * 4)
    assert counts.torch_collectives == {"all_reduce": 8}
    assert counts.torch_collective_bytes == {"all_reduce": 8 * 30 * 4}
    assert [each.flops for each in cluster.device_counts] == [counts.flops // 8] * 8
    assert [each.d2d_bytes for each in cluster.device_counts] == [120] * 8


def test_counts_are_those_of_the_last_run(cluster):
    cluster.run(lambda device: device.all_reduce(torch.ones(3)))
    cluster.run(lambda device: None)
    assert cluster.counts.d2d_messages == 0
    assert cluster.counts.collectives == []


def test_a_shard_is_sent_without_the_tensor_it_is_a_view_of(cluster):
    size = cluster.run(lambda device, part: part.untyped_storage().nbytes(), torch.ones(100)[:2])
    assert size == [8] * 8


def test_host_and_devices_talk_while_running(cluster):
    def serve(device):
        total = torch.zeros(2)
        for _ in range(3):
            total += device.host.recv()
            device.host.send(total)
        return "done"

    cluster.start(serve)
    for request in range(1, 4):
        for rank in range(8):
            cluster.channel(rank).send(torch.full((2,), float(rank)))
        answers = [cluster.channel(index).recv() for index in cluster.mesh]
        assert [answer.tolist() for answer in answers] == [[request * r] * 2 for r in range(8)]
    assert cluster.finish() == ["done"] * 8
    assert (cluster.counts.h2d_messages, cluster.counts.h2d_bytes) == (24, 24 * 8)
    assert (cluster.counts.d2h_messages, cluster.counts.d2h_bytes) == (24, 24 * 8)


@pytest.mark.parametrize("kind", ["cell", pytest.param("script", marks=pytest.mark.slow)])
def test_a_notebook_cell_and_a_script_without_a_guard_work(kind, tmp_path):
    # In a notebook, __main__ has no file; in a script, the file must not run again.
    code = """
from titanlite.tools.lab import Mesh, VirtualCluster
import torch
def main(device, data):
    return device.all_reduce(data + device.rank)
cluster = VirtualCluster(Mesh(x=2))
print(cluster.run(main, torch.arange(2))[1].tolist())
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, *(["-c", code] if kind == "cell" else [script])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.stdout, done.returncode) == ("[1, 3]\n", 0), done.stderr


@pytest.fixture(scope="module")
def small():
    with VirtualCluster(Mesh(rank=3), timeout_seconds=20) as cluster:
        yield cluster


class TestFailures:
    """These use a separate cluster: each failure ends it, and the next run starts it again."""

    def test_an_error_comes_with_its_rank_and_traceback_and_the_cluster_recovers(self, small):
        pids = small.run(lambda device: os.getpid())

        def fail_on_one(device):
            if device.rank == 1:
                raise ValueError("no such shard")
            device.all_reduce(torch.ones(2))

        with pytest.raises(RankError, match="rank 1: ValueError: no such shard") as raised:
            small.run(fail_on_one)
        assert raised.value.rank == 1
        assert "in fail_on_one" in str(raised.value.__cause__)
        assert not any(map(is_alive, pids))
        assert small.run(lambda device: device.rank) == [0, 1, 2]

    def test_a_killed_device_is_named(self, small):
        def die(device):
            if device.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            device.all_reduce(torch.ones(2))

        with pytest.raises(RankError, match="rank 2: was killed by SIGKILL"):
            small.run(die)

    def test_a_device_stuck_in_python_is_ended(self, small):
        with pytest.raises(RankError, match="ranks 0, 1, 2 did not finish"):
            small.run(lambda device: threading.Event().wait(), timeout_seconds=0.5)

    def test_a_tensor_that_a_device_never_sends_is_not_waited_for(self, small):
        small.start(lambda device: None)
        with pytest.raises(RuntimeError, match="device 0 has already returned"):
            small.channel(0).recv()
        assert small.finish() == [None] * 3

    def test_a_cluster_closed_while_it_runs_ends_at_once(self):
        cluster = VirtualCluster(Mesh(rank=2))
        pids = cluster.run(lambda device: os.getpid())
        cluster.start(lambda device: threading.Event().wait())
        start = time.monotonic()
        cluster.close()
        assert time.monotonic() - start < 4
        assert not any(map(is_alive, pids))

    def test_a_forgotten_cluster_leaves_no_process(self):
        cluster = VirtualCluster(Mesh(rank=1))
        pids = cluster.run(lambda device: os.getpid())
        del cluster
        gc.collect()
        assert not any(map(is_alive, pids))


def test_mistakes_on_the_host(cluster):
    with pytest.raises(ValueError, match="algorithm: 'tree' is unknown; use one of naive, ring"):
        cluster.run(print, algorithm="tree")
    with pytest.raises(RuntimeError, match=r"nothing is running; call start\(\) first"):
        cluster.channel(0).recv()
