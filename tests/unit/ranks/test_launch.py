"""Local ranks: results in order, and no failure of a rank that hangs or leaves anything behind."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from titanlite.errors import ConfigError, RankError
from titanlite.ranks import fork_server
from titanlite.ranks.launch import Place, choose_device, spawn, torchrun_place

ROOT = Path(__file__).parents[3]


def test_ranks_meet_and_return_in_order():
    def total(place: Place, offset: int):
        import torch
        import torch.distributed as dist

        from titanlite.ranks.world import open_world

        with open_world(place) as world:
            tensor = torch.arange(4) + world.rank + offset
            dist.all_reduce(tensor)
            return world.rank, tensor.tolist()

    assert spawn(total, 4, 0) == [(rank, [6, 10, 14, 18]) for rank in range(4)]


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns memory at every step")
def test_a_rank_keeps_the_memory_of_its_tensors():
    def resident_after_a_tensor(place: Place):
        import torch

        from titanlite.ranks.world import open_world

        def resident() -> int:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")

        with open_world(place):
            before = resident()
            torch.ones(1 << 23)  # 32 MiB, freed at once
            return resident() - before

    assert spawn(resident_after_a_tensor, 1)[0] > 1 << 24


def test_the_rank_that_raised_is_named_not_its_peers():
    def fail_on_two(place: Place):
        import torch
        import torch.distributed as dist

        from titanlite.ranks.world import open_world

        with open_world(place):
            if place.rank == 2:
                raise ValueError("no such shard") from KeyError("third")
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError) as raised:
        spawn(fail_on_two, 4)
    assert str(raised.value) == "rank 2: ValueError: no such shard (from KeyError: 'third')"
    assert "fail_on_two" in raised.value.rank_traceback


def test_a_killed_rank_is_named():
    def die_on_one(place: Place):
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(RankError, match="rank 1: was killed by SIGKILL"):
        spawn(die_on_one, 2)


def _crash(place):
    import resource

    import torch.distributed as dist

    from titanlite.ranks.world import open_world

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file is left behind
    with open_world(place):
        dist.barrier()  # no rank crashes while another is still connecting
        ctypes.string_at(8)


def test_ranks_that_all_crash_leave_a_stack():
    # Either rank may end first.
    with pytest.raises(RankError, match=r"rank [01]: was killed by SIGSEGV") as caught:
        spawn(_crash, 2)
    rank = caught.value.rank
    first, *_, crashed, last = caught.value.rank_traceback.splitlines()
    assert first == f"Python stack of rank {rank}, as last recorded (most recent call last):"
    assert crashed.endswith("in _crash")
    assert last.endswith("in string_at")


def test_ranks_that_do_not_end_are_named_and_ended():
    def stay(place: Place):
        if place.rank == 1:
            threading.Event().wait()
        return os.getpid()

    with pytest.raises(RankError, match="rank 1 did not finish within 1 s; all ranks were term"):
        spawn(stay, 2, timeout_seconds=1)


def test_ranks_are_gone_after_an_error(tmp_path):
    def note_pid(place: Place):
        (tmp_path / str(place.rank)).write_text(str(os.getpid()))
        if place.rank == 0:
            while len(list(tmp_path.iterdir())) < 3:
                pass
            raise RuntimeError("stop")
        threading.Event().wait()

    with pytest.raises(RankError, match="rank 0: RuntimeError: stop"):
        spawn(note_pid, 3)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


LIFELINE = """
import sys, threading
from multiprocessing.connection import Connection
from pathlib import Path

from titanlite.ranks.launch import _end_with

_end_with(Connection(sys.stdin.fileno(), writable=False), Path(sys.argv[1]))
print("ready", flush=True)
threading.Event().wait()
"""


def test_a_rank_ends_when_its_launcher_does(tmp_path):
    (folder := tmp_path / "shared").mkdir()
    words = [sys.executable, "-c", LIFELINE, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
        assert rank.poll() is None
        # The system closes what a killed launcher had open.
        rank.stdin.close()
        try:
            assert rank.wait(60) == -signal.SIGKILL
        finally:
            rank.kill()
    assert not folder.exists()


RUN_IN_A_FOLDER = """
import os
from titanlite.ranks.launch import spawn

def environment(place):
    return os.getcwd(), os.environ.get("PYTHONSAFEPATH"), os.environ.get("PYTHONPATH")

if __name__ == "__main__":
    print(spawn(environment, 1)[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python always looks there")
def test_nothing_in_the_working_directory_is_imported(tmp_path):
    (folder := tmp_path / "downloaded").mkdir()
    for module in ("multiprocessing", "signal", "socket", "torch", "pickle", "numpy"):
        (folder / f"{module}.py").write_text("raise SystemExit('it ran')")
    (script := tmp_path / "script.py").write_text(RUN_IN_A_FOLDER)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{(str(folder), None, str(ROOT))}\n"


def test_a_folder_too_long_for_a_socket_is_refused(monkeypatch):
    monkeypatch.setattr(fork_server, "SHORT_FOLDERS", ())
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 90}")
    with pytest.raises(ConfigError) as caught:
        fork_server.start_fork_server()
    assert caught.value.problems == (
        f"environment: TMPDIR is /tmp/{'x' * 90}, which is too long for the path of a Unix socket; "
        "set it to a folder whose path has at most 71 characters",
    )


def test_cuda_without_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("titanlite.ranks.launch.count_gpus", lambda: 2)
    assert choose_device("auto", 2) == "cuda"
    assert choose_device("auto", 4) == "cpu"
    assert choose_device("cpu", 1) == "cpu"
    with pytest.raises(
        ConfigError,
        match=r'job\.device: "cuda" needs a GPU for each of 4 ranks here, and there are 2;',
    ):
        choose_device("cuda", 4)


def test_a_mistake_of_the_user_is_raised_as_it_is_with_its_rank():
    def mistaken(place: Place):
        if place.rank == 1:
            raise ConfigError("model.name: is odd")

    with pytest.raises(ConfigError, match=r"^model\.name: is odd$") as raised:
        spawn(mistaken, 2)
    assert raised.value.rank == 1


def test_the_place_of_a_process_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    """The second rank of the second of two machines."""
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**names, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    place = torchrun_place()
    assert place == Place(3, 4, 1, 2, rendezvous="env://")
    assert not place.is_one_node


def test_ranks_divide_the_cores(monkeypatch: pytest.MonkeyPatch):
    def num_threads(place: Place, num_cores: int):
        from unittest import mock

        import torch

        from titanlite.ranks import world

        with mock.patch.object(world, "num_cores", return_value=num_cores), world.open_world(place):
            return torch.get_num_threads()

    assert spawn(num_threads, 2, 6) == [3, 3]
    assert spawn(num_threads, 2, 1) == [1, 1]
