"""A cluster of virtual devices, each a real process that is started once and runs many jobs.

    with VirtualCluster(Mesh(x=2, y=4)) as cluster:
        sums = cluster.run(lambda device, t: device.all_reduce(t), torch.arange(4))
        print(cluster.counts.d2d_bytes)

A fork server starts the processes and cloudpickle serializes the functions, so this works in
scripts, tests and notebooks. If anything fails on a device, the caller gets an error in bounded
time and all processes of the cluster are ended; the next run starts new ones.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from titanlite.errors import RankError
from titanlite.lab.channel import HostChannel, dumps, loads
from titanlite.lab.counts import CountingMode, Counts, total
from titanlite.lab.device import ALGORITHMS, VirtualDevice
from titanlite.lab.link import Link
from titanlite.lab.mesh import Mesh, MeshIndex
from titanlite.lab.operation import Operation
from titanlite.ranks.launch import Place, Ranks, not_done
from titanlite.ranks.world import open_world

CALL, TENSOR = b"c", b"t"
START_SECONDS = 120


class VirtualCluster:
    """One process per device of a mesh; the processes run the jobs given to `run`.

    Args:
        mesh: the devices. It may be changed between runs; the processes are kept if there are
            enough of them.
        algorithm: the algorithm of the virtual devices' collectives, "naive" or "ring".
        timeout_seconds: the time limit of one run.
        device_type: "cpu" (gloo), or "cuda" (NCCL), which needs one GPU per device.
        link: delays messages between virtual devices; by default, they are as fast as the machine.
            Collectives of torch.distributed are never delayed.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        algorithm: str = "naive",
        timeout_seconds: float = 60,
        device_type: str = "cpu",
        link: Link | None = None,
    ) -> None:
        self.mesh = mesh
        self.link = link
        self.algorithm = algorithm
        self.timeout_seconds = timeout_seconds
        self.device_counts: list[Counts] = []
        self._serve = functools.partial(_serve, device_type=device_type)
        self._ranks: Ranks | None = None
        self._results: dict[int, bytes] = {}
        self._tensors: list[queue.SimpleQueue[bytes]] = []
        self._running: tuple[float, float] | None = None

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def run(self, job: Callable[..., Any] | Operation, *args: Any, **options: Any) -> list[Any]:
        """Run `job` on every device; return the results in mesh order.

        A function is called as `job(device, *args)` with the same arguments on every device. An
        Operation takes its global inputs and gives each device its shards. The options `algorithm`,
        `timeout_seconds` and `link` apply to this run only.

        Raises RankError if a device raises (its traceback is the cause), dies, or exceeds the time
        limit. An Operation with invalid inputs raises its own error before anything runs.
        """
        self.start(job, *args, **options)
        return self.finish()

    def start(
        self,
        job: Callable[..., Any] | Operation,
        *args: Any,
        algorithm: str | None = None,
        timeout_seconds: float | None = None,
        link: Link | None = None,
    ) -> None:
        """Like `run`, but return at once; `channel` then exchanges tensors with the devices."""
        if self._running is not None:
            raise RuntimeError("the cluster is already running; call finish() first")
        algorithm = algorithm or self.algorithm
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm: {algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}"
            )
        if isinstance(job, Operation):
            function, shares = job.run, job.shares(self.mesh, *args)
        else:
            function, shares = job, [args] * self.mesh.size
        setting = self.mesh, algorithm, link or self.link
        calls = [CALL + dumps((function, share, *setting)) for share in shares]
        if self._ranks is not None and len(self._ranks) < self.mesh.size:
            self.close()
        if self._ranks is None:
            self._ranks = Ranks(self._serve, self.mesh.size)
            # Wait until every process group is open, so that no run's time includes it.
            self._begin(START_SECONDS)
            self._wait()
        self._begin(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        for rank, call in enumerate(calls):
            self._ranks.send(rank, call)

    def finish(self) -> list[Any]:
        """Wait for the job of `start`; returns and raises like `run`."""
        self._wait()
        self._running = None
        answers = [loads(self._results[rank]) for rank in range(self.mesh.size)]
        self.device_counts = [counts for _, counts, _ in answers]
        self._check_traffic([traffic for _, _, traffic in answers])
        return [result for result, _, _ in answers]

    @property
    def counts(self) -> Counts:
        """The counts of the last run, summed over devices; `device_counts` has one per device."""
        return total(self.device_counts)

    def channel(self, device: int | MeshIndex) -> HostChannel:
        """The host's end of the link to a device (rank or index), between start and finish."""
        rank = device if isinstance(device, int) else self.mesh.rank(device)

        def post(message: bytes) -> None:
            self._started().send(rank, TENSOR + message)

        def take() -> bytes:
            self._started()
            while self._tensors[rank].empty():
                if rank in self._results:
                    raise RuntimeError(
                        f"device {rank} has already returned; it sends no more tensors"
                    )
                self._receive()
            return self._tensors[rank].get()

        return HostChannel(post, take)

    def close(self) -> None:
        """End the processes. Safe to call twice; the next run starts new ones."""
        if self._ranks is not None:
            if self._running is not None:
                self._ranks.terminate()
            self._ranks.close()
            self._ranks = None
        self._running = None

    def _started(self) -> Ranks:
        if self._running is None or self._ranks is None:
            raise RuntimeError("nothing is running; call start() first")
        return self._ranks

    def _begin(self, timeout_seconds: float) -> None:
        self._results = {}
        self._tensors = [queue.SimpleQueue() for _ in range(self.mesh.size)]
        self._running = (time.monotonic() + timeout_seconds, timeout_seconds)

    def _wait(self) -> None:
        self._started()
        while len(self._results) < self.mesh.size:
            self._receive()

    def _receive(self) -> None:
        """Receive pending tensors and results; blocks until there is one, or the deadline."""
        ranks = self._started()
        assert self._running is not None
        deadline, seconds = self._running
        pending = set(range(self.mesh.size)) - set(self._results)
        try:
            received = ranks.receive(pending, deadline)
            if not received:
                raise not_done(pending, seconds)
        except BaseException as error:
            self.close()
            if isinstance(error, RankError) and error.rank_traceback:
                raise error from _DeviceTraceback(error.rank_traceback)
            raise
        for rank, message in received.items():
            if message[:1] == TENSOR:
                self._tensors[rank].put(message[1:])
            else:
                self._results[rank] = message[1:]

    def _check_traffic(self, traffic: list[list[tuple[int, int]]]) -> None:
        """Raise if a message was sent but not received: the next run would receive it."""
        for source, target in itertools.permutations(range(self.mesh.size), 2):
            sent, received = traffic[source][target][0], traffic[target][source][1]
            if sent != received:
                self.close()
                raise RankError(
                    source,
                    f"sent {sent} messages to rank {target}, which received {received}; "
                    "every send needs a matching receive",
                )


class _DeviceTraceback(Exception):
    """The cause of a RankError, so that Python prints the device's traceback above it."""

    def __init__(self, text: str) -> None:
        super().__init__(f"on the device\n{text}")


def _serve(place: Place, connection: Connection, *, device_type: str) -> None:
    calls: queue.SimpleQueue[tuple[bytes, queue.SimpleQueue[bytes]] | None] = queue.SimpleQueue()

    def read() -> None:
        # Always keep reading, so that the host never blocks on a busy or hung device.
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                calls.put(None)
                return
            if message[:1] == CALL:
                tensors: queue.SimpleQueue[bytes] = queue.SimpleQueue()
                calls.put((message[1:], tensors))
            else:
                tensors.put(message[1:])

    threading.Thread(target=read, daemon=True).start()
    with open_world(place, device_type) as world:
        connection.send(("message", CALL))
        while (call := calls.get()) is not None:
            message, tensors = call
            function, args, mesh, algorithm, link = loads(message)
            args = _on(world.device, args)
            counts = Counts()
            host = HostChannel(
                lambda message: connection.send(("message", TENSOR + message)), tensors.get, counts
            )
            device = VirtualDevice(mesh, place.rank, world.device, host, algorithm, counts, link)
            counts.count_h2d(args)
            with CountingMode(counts):
                result = function(device, *args)
            counts.count_d2h(result)
            connection.send(("message", CALL + dumps((result, counts, device.traffic()))))


def _on(device: torch.device, args: Sequence[Any]) -> Sequence[Any]:
    if device.type == "cpu":
        return args
    return [
        value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for value in args
    ]
