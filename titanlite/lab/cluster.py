"""A cluster of virtual devices: one real process each, started once and kept for many runs.

    with VirtualCluster(Mesh(x=2, y=4)) as cluster:
        sums = cluster.run(lambda device, t: device.all_reduce(t), torch.arange(4))
        print(cluster.counts.d2d_bytes)

The processes come from a fork server and functions travel by cloudpickle, so this works from a
script, a test and a notebook cell alike. Whatever goes wrong in a device, the caller gets an error
in bounded time, all processes of the cluster are ended, and the next run starts new ones.
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
from titanlite.lab.mesh import Mesh, MeshIndex
from titanlite.lab.operation import Operation
from titanlite.ranks.launch import Place, Ranks, not_done
from titanlite.ranks.world import open_world

CALL, TENSOR = b"c", b"t"
START_SECONDS = 120


class VirtualCluster:
    """Processes that each stand for one device of a mesh and run what they are given.

    Args:
        mesh: the devices and their arrangement. It may be set anew between runs: the processes stay
            if there are enough of them.
        algorithm: the form of the virtual devices' collectives, "naive" or "ring".
        timeout_seconds: how long one run may take.
        device_type: "cpu" (gloo), or "cuda" (NCCL) where there is a GPU for each device.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        algorithm: str = "naive",
        timeout_seconds: float = 60,
        device_type: str = "cpu",
    ) -> None:
        self.mesh = mesh
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
        """Run `job` on every device; return what each returned, in mesh order.

        A function is called as `job(device, *args)` with the same arguments on every device. An
        Operation takes its global inputs: each device gets its share. `algorithm` and
        `timeout_seconds` may be given for this run alone.

        Raises RankError when a device raises (its traceback is the cause), dies, or is not done in
        time; and before anything runs whatever the Operation says of inputs that cannot work.
        """
        self.start(job, *args, **options)
        return self.finish()

    def start(
        self,
        job: Callable[..., Any] | Operation,
        *args: Any,
        algorithm: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Start what `run` runs and return, to talk with the devices over `channel` meanwhile."""
        if self._running is not None:
            raise RuntimeError("the cluster is running already; finish() first")
        algorithm = algorithm or self.algorithm
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {algorithm!r}; use one of {', '.join(ALGORITHMS)}")
        if isinstance(job, Operation):
            function, shares = job.run, job.shares(self.mesh, *args)
        else:
            function, shares = job, [args] * self.mesh.size
        calls = [CALL + dumps((function, share, self.mesh, algorithm)) for share in shares]
        if self._ranks is not None and len(self._ranks) < self.mesh.size:
            self.close()
        if self._ranks is None:
            self._ranks = Ranks(self._serve, self.mesh.size)
            # Each answers once when its world is open, so that no run's time includes that.
            self._begin(START_SECONDS)
            self._wait()
        self._begin(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        for rank, call in enumerate(calls):
            self._ranks.send(rank, call)

    def finish(self) -> list[Any]:
        """Wait for what `start` started; return and raise as `run` does."""
        self._wait()
        self._running = None
        answers = [loads(self._results[rank]) for rank in range(self.mesh.size)]
        self.device_counts = [counts for _, counts, _ in answers]
        self._check_traffic([traffic for _, _, traffic in answers])
        return [result for result, _, _ in answers]

    @property
    def counts(self) -> Counts:
        """What the last run cost, over all devices; `device_counts` has each one's."""
        return total(self.device_counts)

    def channel(self, device: int | MeshIndex) -> HostChannel:
        """The host's end of its link to a device, by rank or index, between start and finish."""
        rank = device if isinstance(device, int) else self.mesh.rank(device)

        def post(message: bytes) -> None:
            self._started().send(rank, TENSOR + message)

        def take() -> bytes:
            self._started()
            while self._tensors[rank].empty():
                if rank in self._results:
                    raise RuntimeError(f"device {rank} has returned and sends no more tensors")
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
            raise RuntimeError("nothing is running; start() first")
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
        """Take what has come, tensors or answers; wait for something, up to the deadline."""
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
        """A message that nobody took would be taken for the first one of the next run."""
        for source, target in itertools.permutations(range(self.mesh.size), 2):
            sent, received = traffic[source][target][0], traffic[target][source][1]
            if sent != received:
                self.close()
                raise RankError(
                    source,
                    f"sent {sent} messages to rank {target}, which received {received}; "
                    "every send needs its receive",
                )


class _DeviceTraceback(Exception):
    """The cause of a RankError, so that the device's own traceback is printed above it."""

    def __init__(self, text: str) -> None:
        super().__init__(f"on the device\n{text}")


def _serve(place: Place, connection: Connection, *, device_type: str) -> None:
    calls: queue.SimpleQueue[tuple[bytes, queue.SimpleQueue[bytes]] | None] = queue.SimpleQueue()

    def read() -> None:
        # Reading at all times keeps the host from waiting on a device that is busy or stuck.
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
            function, args, mesh, algorithm = loads(message)
            args = _on(world.device, args)
            counts = Counts()
            host = HostChannel(
                lambda message: connection.send(("message", TENSOR + message)), tensors.get, counts
            )
            device = VirtualDevice(mesh, place.rank, world.device, host, algorithm, counts)
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
