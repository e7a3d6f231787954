"""A cluster of virtual devices, each a real process that is started once and runs many jobs.

    with VirtualCluster(Mesh(x=2, y=4)) as cluster:
        sums = cluster.run(lambda device, t: device.all_reduce(t), torch.arange(4))
        print(cluster.counts.d2d_bytes)

A fork server starts the processes and cloudpickle serializes the functions, so this works in
scripts, tests and notebooks. If anything fails on a device, the caller gets an error in bounded
time and all processes of the cluster are ended; the next run starts new ones.

Devices write what they send, receive and wait for into logs (recorder.py). The host reads these, so
that unequal sizes, unequal collectives and deadlocks are errors that name both sides
(diagnosis.py), and gives them to the caller as `record`.
"""

import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from titanlite.errors import RankError
from titanlite.ranks.launch import Place, Ranks, not_done
from titanlite.ranks.world import open_world
from titanlite.tools.lab.channel import HostChannel, dumps, loads
from titanlite.tools.lab.counts import Counts
from titanlite.tools.lab.device import ALGORITHMS, VirtualDevice
from titanlite.tools.lab.diagnosis import (
    CommunicationError,
    check_agreement,
    check_deadlock,
    check_received,
)
from titanlite.tools.lab.link import Link
from titanlite.tools.lab.mesh import Mesh, MeshIndex
from titanlite.tools.lab.operation import Operation
from titanlite.tools.lab.pictures import Record
from titanlite.tools.lab.record import Logs, log_path
from titanlite.tools.lab.recorder import CountingMode, Recorder

CALL, TENSOR = b"c", b"t"
START_SECONDS = 120
# How often the host looks whether the devices still communicate.
LOOK_SECONDS = 0.03


class VirtualCluster(contextlib.AbstractContextManager["VirtualCluster"]):
    """One process per device of a mesh; the processes run the jobs given to `run`.

    Args:
        mesh: the devices. It may be changed between runs; the processes are kept if there are
            enough of them.
        algorithm: the algorithm of the virtual devices' collectives, "naive" or "ring".
        timeout_seconds: the time limit of one run.
        device_type: "cpu" (gloo), or "cuda" (NCCL), which needs one GPU per device.
        link: delays messages between virtual devices; by default, they are as fast as the machine.
            Collectives of torch.distributed are never delayed.
        flops_per_second: delays matrix products on every device; by default, they are as fast as
            the machine.

    After each run, `record` has its messages, collectives and waits; with the option `record=True`
    of `run` also the values of small tensors.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        algorithm: str = "naive",
        timeout_seconds: float = 60,
        device_type: str = "cpu",
        link: Link | None = None,
        flops_per_second: float = math.inf,
    ) -> None:
        self.mesh = mesh
        self.link = link
        self.flops_per_second = flops_per_second
        self.algorithm = algorithm
        self.timeout_seconds = timeout_seconds
        self.device_counts: list[Counts] = []
        self._serve = functools.partial(_serve, device_type=device_type)
        self._ranks: Ranks | None = None
        self._results: dict[int, bytes] = {}
        self._tensors: list[queue.SimpleQueue[bytes]] = []
        self._running: tuple[float, float] | None = None
        self._record: Record | None = None
        self._logs: Logs | None = None
        self._looked: tuple[list[int], bool] = ([], False)

    def __exit__(self, *error: Any) -> None:
        self.close()

    def run(self, job: Callable[..., Any] | Operation, *args: Any, **options: Any) -> list[Any]:
        """Run `job` on every device; return the results in mesh order.

        A function is called as `job(device, *args)` with the same arguments on every device. An
        Operation takes its global inputs and gives each device its shards. The options `algorithm`,
        `timeout_seconds`, `link` and `flops_per_second` apply to this run only. With `record=True`,
        `cluster.record` also has the values of tensors of at most 64 elements.

        Raises RankError if a device raises (its traceback is the cause), dies, or exceeds the time
        limit, and CommunicationError if the devices do not agree on what they send, receive or call
        together, or are in a deadlock. An Operation with invalid inputs raises its own error before
        anything runs.
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
        flops_per_second: float | None = None,
        record: bool = False,
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
        flops_per_second = flops_per_second or self.flops_per_second
        if not flops_per_second > 0:
            raise ValueError(f"flops_per_second: {flops_per_second} is not positive")
        start = time.monotonic()
        setting = self.mesh, algorithm, link or self.link, flops_per_second, start, record
        calls = [CALL + dumps((function, share, *setting)) for share in shares]
        if self._ranks is not None and len(self._ranks) < self.mesh.size:
            self.close()
        if self._ranks is None:
            self._ranks = Ranks(self._serve, self.mesh.size)
            # Wait until every process group is open, so that no run's time includes it.
            self._begin(START_SECONDS)
            self._wait()
        self._logs = Logs(self._ranks.folder, self.mesh.size)
        self._logs.clear()
        self._begin(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        for rank, call in enumerate(calls):
            self._ranks.send(rank, call)

    def finish(self) -> list[Any]:
        """Wait for the job of `start`; returns and raises like `run`."""
        self._wait()
        self._running = None
        answers = [loads(self._results[rank]) for rank in range(self.mesh.size)]
        self.device_counts = [counts for _, counts in answers]
        assert self._logs is not None
        self._record = Record(self._logs.read())
        try:
            check_agreement(self._record)
            check_received(self._record)
        except CommunicationError:
            # The next run would receive the messages that are still there.
            self.close()
            raise
        return [result for result, _ in answers]

    @property
    def counts(self) -> Counts:
        """The counts of the last run, summed over devices; `device_counts` has one per device."""
        return sum(self.device_counts, Counts())

    @property
    def record(self) -> Record:
        """The record of the last run that has ended without an error."""
        if self._record is None:
            raise RuntimeError("nothing was recorded; call run() first")
        return self._record

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
            self._logs = None
        self._running = None

    def _started(self) -> Ranks:
        if self._running is None or self._ranks is None:
            raise RuntimeError("nothing is running; call start() first")
        return self._ranks

    def _begin(self, timeout_seconds: float) -> None:
        self._results = {}
        self._looked = ([], False)
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
            received: dict[int, bytes] = {}
            while not received:
                until = min(deadline, time.monotonic() + LOOK_SECONDS)
                received = ranks.receive(pending, until)
                if not received:
                    self._look()
                    if time.monotonic() >= deadline:
                        raise not_done(pending, seconds)
        except BaseException as error:
            mistake = self._mistake() if isinstance(error, RankError) else None
            self.close()
            if mistake is not None:
                raise mistake from None
            if isinstance(error, RankError) and error.rank_traceback:
                raise error from _DeviceTraceback(error.rank_traceback)
            raise
        for rank, message in received.items():
            if message[:1] == TENSOR:
                self._tensors[rank].put(message[1:])
            else:
                self._results[rank] = message[1:]

    def _look(self) -> None:
        """Raise CommunicationError if devices have stopped communicating for good.

        A record that was read while no device wrote is one moment of the whole cluster.
        """
        if self._logs is None:
            return
        sizes = self._logs.sizes()
        known, is_checked = self._looked
        if sizes != known:
            self._looked = (sizes, False)
        elif not is_checked:
            record = Record(self._logs.read())
            if self._logs.sizes() == sizes:
                self._looked = (sizes, True)
                check_agreement(record, is_running=True)
                try:
                    check_deadlock(record)
                except CommunicationError:
                    # Unequal collectives are the cause if there are any.
                    check_agreement(record)
                    raise

    def _mistake(self) -> CommunicationError | None:
        """The disagreement that made a device fail, if there is one."""
        if self._logs is None:
            return None
        try:
            check_agreement(Record(self._logs.read()))
        except CommunicationError as error:
            return error
        return None


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
            function, args, mesh, algorithm, link, flops_per_second, *recording = loads(message)
            args = [
                value.to(world.device)
                if isinstance(value, torch.Tensor) and not value.is_meta
                else value
                for value in args
            ]
            counts = Counts()
            host = HostChannel(
                lambda message: connection.send(("message", TENSOR + message)), tensors.get, counts
            )
            recorder = Recorder(log_path(place.folder, place.rank), place.rank, *recording)
            device = VirtualDevice(
                mesh, place.rank, world.device, host, algorithm, counts, recorder, link
            )
            counts.count_h2d(args)
            with recorder.running(), CountingMode(counts, recorder, flops_per_second):
                result = function(device, *args)
            counts.count_d2h(result)
            connection.send(("message", CALL + dumps((result, counts))))
