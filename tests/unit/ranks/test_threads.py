"""Ranks as threads of one process: collectives, messages, states of their own, and deadlocks."""

import contextlib
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.ranks.hang_state import recorded_calls
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.settings import own_settings
from titanlite.ranks.turns import Turns
from titanlite.ranks.world import World, open_world

RANKS = 4


def in_threads(function: Callable[[World], Any], num_ranks: int = RANKS) -> list[Any]:
    def on_rank(place: Place) -> Any:
        with open_world(place) as world:
            return function(world)

    return spawn(on_rank, num_ranks, threads=True)


def tensor(world: World, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(world.rank))
    return (10 * values).to(dtype)


def calls(world: World) -> dict[str, Any]:
    """The result of each collective that both worlds have."""
    size, rank = world.size, world.rank
    results: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.int64, torch.uint8):
        for name in ("SUM", "PRODUCT", "MIN", "MAX"):
            x = tensor(world, 3, 5, dtype=dtype).abs()
            dist.all_reduce(x, getattr(dist.ReduceOp, name))
            results[f"all_reduce {name} {dtype}"] = x
    for name in ("BAND", "BOR", "BXOR"):
        x = tensor(world, 6, dtype=torch.int64)
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        results[f"all_reduce {name}"] = x
    sparse = torch.sparse_coo_tensor([[rank, 5]], tensor(world, 2), (6,), check_invariants=True)
    dist.all_reduce(sparse)
    results["sparse"] = sparse.to_dense()
    x = tensor(world, 2, 3)
    dist.broadcast(x, src=2)
    results["broadcast"] = x
    x = tensor(world, 2, 3)
    dist.reduce(x, dst=1)
    results["reduce"] = x if rank == 1 else None
    x, parts = tensor(world, 2, 3), [torch.empty(2, 3, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(parts, x)
    results["all_gather"] = parts
    whole = torch.empty(2 * size, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(whole, x)
    results["all_gather_into_tensor"] = whole
    part = torch.empty(2, 3, dtype=torch.float64)
    dist.reduce_scatter_tensor(part, tensor(world, 2 * size, 3))
    results["reduce_scatter_tensor"] = part
    part = torch.empty(3, dtype=torch.float64)
    dist.reduce_scatter(part, list(tensor(world, size, 3).unbind()))
    results["reduce_scatter"] = part
    parts = [torch.empty(3, dtype=torch.float64) for _ in range(size)] if rank == 3 else None
    dist.gather(tensor(world, 3), parts, dst=3)
    results["gather"] = parts
    part = torch.empty(3, dtype=torch.float64)
    dist.scatter(part, list(tensor(world, size, 3).unbind()) if rank == 1 else None, src=1)
    results["scatter"] = part
    whole = torch.empty(size, 3, dtype=torch.float64)
    dist.all_to_all_single(whole, tensor(world, size, 3))
    results["all_to_all_single"] = whole
    uneven = torch.empty(sum(range(1, size + 1)), dtype=torch.float64)
    given = tensor(world, size * (rank + 1))
    dist.all_to_all_single(uneven, given, list(range(1, size + 1)), [rank + 1] * size)
    results["uneven all_to_all_single"] = uneven
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    results["objects"] = objects
    sent, received = tensor(world, 4), torch.empty(4, dtype=torch.float64)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    results["messages"] = received
    if rank == 0:
        dist.send(sent, dst=1, tag=7)
    elif rank == 1:
        assert dist.recv(received, tag=7) == 0
        results["any source"] = received
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = tensor(world, 3)
    dist.all_reduce(x, group=halves[rank % 2])
    results["group"] = x
    work = dist.all_reduce(y := tensor(world, 3), async_op=True)
    assert work is not None
    work.wait()
    results["asynchronous"] = y
    with dist._coalescing_manager(async_ops=True) as coalesced:
        pair = [tensor(world, 2), tensor(world, 3)]
        for one in pair:
            dist.all_reduce(one)
    coalesced.wait()
    results["coalesced"] = pair
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(24.0).reshape(4, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    results["DTensor"] = sharded.redistribute(mesh, [Replicate(), Shard(0)]).to_local()
    results["functional"] = (sharded @ sharded.T).full_tensor()
    results |= calls_with_strides(world)
    dist.barrier()
    return results


def calls_with_strides(world: World) -> dict[str, Any]:
    """Those of tensors whose memory has another order on every second rank, or gaps."""
    size, rank = world.size, world.rank

    def strided(*, gaps: bool = False) -> torch.Tensor:
        if gaps:
            return tensor(world, 3, 6)[:, ::2]
        return tensor(world, 3, 3).t() if rank % 2 else tensor(world, 3, 3)

    results: dict[str, Any] = {}
    for gaps in (False, True):
        x = strided(gaps=gaps)
        dist.all_reduce(x)
        results[f"all_reduce, gaps: {gaps}"] = x
        x = strided(gaps=gaps)
        dist.broadcast(x, src=2)
        results[f"broadcast, gaps: {gaps}"] = x
        x = strided(gaps=gaps)
        dist.reduce(x, dst=1)
        results[f"reduce, gaps: {gaps}"] = x if rank == 1 else None
        x = strided(gaps=gaps)
        dist.scatter(x, [one.t() for one in tensor(world, size, 3, 3)] if rank == 1 else None, 1)
        results[f"scatter, gaps: {gaps}"] = x
        parts = [strided(gaps=gaps) for _ in range(size)]
        dist.all_gather(parts, strided(gaps=gaps))
        results[f"all_gather, gaps: {gaps}"] = parts
    x = tensor(world, size, size).t()
    refused: dict[str, Callable[[], object]] = {
        "send": lambda: dist.send(x, (rank + 1) % size),
        "receive": lambda: dist.recv(x, (rank + 1) % size),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(x), x),
    }
    for name, call in refused.items():
        with pytest.raises((RuntimeError, ValueError, TitanliteError), match="contiguous"):
            call()
        results[f"{name} of what is not contiguous is refused"] = True
    return results


def test_collectives_give_what_processes_get() -> None:
    def on_rank(place: Place) -> Any:
        with open_world(place) as world:
            return calls(world)

    threads, processes = in_threads(calls), spawn(on_rank, RANKS, timeout_seconds=100)
    for mine, other in zip(threads, processes, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=1e-6, atol=1e-6, msg=name)


def test_reductions_that_only_nccl_has() -> None:
    def on_rank(world: World) -> tuple[torch.Tensor, ...]:
        mean, scaled = tensor(world, 3), tensor(world, 3)
        narrow = tensor(world, 3, dtype=torch.bfloat16)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        dist.all_reduce(narrow, dist.ReduceOp.AVG)
        part = torch.empty(1, dtype=torch.float64)
        dist.reduce_scatter_tensor(part, tensor(world, RANKS), dist.ReduceOp.AVG)
        return mean, scaled, narrow, part

    given = [10 * torch.randn(3, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    total = sum(one.double() for one in given)
    for mean, scaled, narrow, part in in_threads(on_rank):
        torch.testing.assert_close(mean, total / RANKS)
        torch.testing.assert_close(scaled, total / 2)
        assert narrow.dtype == torch.bfloat16
        assert part.shape == (1,)


def test_sums_have_the_same_bits_in_every_run() -> None:
    def on_rank(world: World) -> torch.Tensor:
        x = tensor(world, 1000, dtype=torch.float32)
        dist.all_reduce(x)
        return x

    first, second = in_threads(on_rank, 7), in_threads(on_rank, 7)
    in_order = torch.zeros(1000)
    for rank in range(7):
        in_order += 10 * torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    for x in (*first, *second):
        assert torch.equal(x, in_order)


def test_each_rank_has_generators_and_settings_of_its_own() -> None:
    def draw() -> tuple[float, ...]:
        drawn = torch.rand(1).item(), random.random(), np.random.randn(), np.random.rand()
        return (*drawn, float(torch.get_default_dtype() == torch.float64))

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def on_rank(world: World) -> list[tuple[float, ...]]:
        seed(world.rank)
        torch.set_default_dtype(torch.float64 if world.rank == 1 else torch.float32)
        drawn = []
        for _ in range(3):
            dist.barrier()
            drawn.append(draw())
        return drawn

    before = torch.get_rng_state()
    drawn = in_threads(on_rank)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    for rank, of_rank in enumerate(drawn):
        seed(rank)
        torch.set_default_dtype(torch.float64 if rank == 1 else torch.float32)
        try:
            assert of_rank == [draw() for _ in range(3)]
        finally:
            torch.set_default_dtype(torch.float32)


def test_each_rank_starts_from_the_state_of_the_process() -> None:
    def on_rank(world: World) -> tuple[float, float, torch.dtype, int]:
        drawn = torch.rand(1).item(), random.random(), torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return *drawn, torch.get_num_threads()

    with own_settings():
        torch.set_num_threads(3)
        first, *others = in_threads(on_rank)
    assert others == [first] * (RANKS - 1)
    assert first == (torch.rand(1).item(), random.random(), torch.float32, 3)


def fails(function: Callable[[World], Any], kind: type[TitanliteError] = RankError) -> Any:
    with pytest.raises(kind) as caught:
        in_threads(function)
    assert not [one for one in threading.enumerate() if one.name.startswith("rank ")]
    assert not dist.is_initialized()
    return caught.value


def test_an_error_ends_the_world_with_its_traceback() -> None:
    def on_rank(world: World) -> None:
        if world.rank == 2:
            raise ValueError("broken")
        dist.barrier()

    error = fails(on_rank)
    assert error.rank == 2
    assert error.message == "ValueError: broken"
    assert 'raise ValueError("broken")' in error.rank_traceback


def test_a_users_mistake_on_a_rank_is_raised_as_it_is() -> None:
    def on_rank(world: World) -> None:
        if world.rank == 1:
            raise ConfigError("model.name: is odd")
        dist.barrier()

    assert fails(on_rank, ConfigError).rank == 1


def test_a_deadlock_is_reported_with_what_each_rank_waits_for() -> None:
    def on_rank(world: World) -> None:
        if world.rank == 0:
            dist.recv(torch.ones(3), 1)
        else:
            dist.barrier()

    error = fails(on_rank)
    assert "rank 0 is waiting for rank 1 in a receive of 3 float32 over the world" in (
        error.rank_traceback
    )
    assert "rank 1 is waiting for rank 0 in barrier 1" in error.rank_traceback
    assert "test_threads.py" in error.rank_traceback


def test_a_rank_that_has_returned_is_missing() -> None:
    def on_rank(world: World) -> None:
        if world.rank != 3:
            dist.all_reduce(torch.ones(2))

    error = fails(on_rank)
    assert error.rank == 3
    assert "did not reach all_reduce 1 over the world" in error.message
    assert "rank 3 has finished" in error.rank_traceback


def test_different_collectives_name_both_ranks_and_lines() -> None:
    def on_rank(world: World) -> None:
        x = torch.ones(3)
        if world.rank == 1:
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 0)

    error = fails(on_rank)
    assert "The run has stopped: ranks called different collectives." in error.rank_traceback
    assert error.rank == 1
    assert "collective 1 over the world it called all_reduce of 3 float32 at" in error.message
    assert "ranks 0, 2, 3 called broadcast of 3 float32 (root: rank 0) at" in error.message
    assert error.message.count("test_threads.py:") == 2


def test_no_code_of_a_rank_can_catch_different_collectives() -> None:
    def on_rank(world: World) -> None:
        x = torch.ones(3 + (world.rank == 1))
        with contextlib.suppress(Exception):
            dist.all_reduce(x)
        dist.barrier()

    assert "called all_reduce of 4 float32" in fails(on_rank).message


def test_messages_of_different_sizes_are_named() -> None:
    def on_rank(world: World) -> None:
        if world.rank == 0:
            dist.send(torch.ones(3), 1)
        elif world.rank == 1:
            dist.recv(torch.ones(2), 0)

    text = str(fails(on_rank, TitanliteError))
    assert text == "rank 0 sends 3 float32 to rank 1, which receives 2 float32"


def test_what_a_rank_computes_for_others_is_not_seen_by_its_autograd() -> None:
    def on_rank(world: World) -> int:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        version = y._version
        dist.all_reduce(y.detach())
        y.sum().backward()
        return y._version - version

    assert in_threads(on_rank) == [0] * RANKS


def test_threads_do_not_start_threads() -> None:
    def on_rank(world: World) -> None:
        in_threads(lambda world: None, 2)

    assert "cannot start ranks as threads" in str(fails(on_rank, ConfigError))


def test_a_group_can_be_split() -> None:
    def on_rank(world: World) -> tuple[list[int], float, bool]:
        half = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        assert half is not None
        rank = torch.tensor([float(world.rank)])
        dist.all_reduce(rank, group=half)
        alone = dist.split_group(half, [[0]])
        return dist.get_process_group_ranks(half), rank.item(), alone is not None

    evens, odds = ([0, 2], 2.0), ([1, 3], 4.0)
    assert in_threads(on_rank) == [(*evens, True), (*odds, True), (*evens, False), (*odds, False)]


def test_no_two_ranks_of_any_worlds_have_equal_meshes() -> None:
    """torch keeps plans of DTensor by mesh, and a thread may get the number of an earlier one."""

    def on_rank(world: World) -> Any:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    meshes = [mesh for _ in range(3) for mesh in in_threads(on_rank)]
    assert len(set(meshes)) == 3 * RANKS


def test_a_rank_remembers_its_own_calls() -> None:
    def on_rank(world: World) -> list[str]:
        if world.rank < 2:
            pair = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(torch.ones(3, dtype=torch.bfloat16), group=pair)
        dist.barrier()
        return [str(call) for call in recorded_calls()]

    pair = "all_reduce of 3 bfloat16"
    remembered = in_threads(on_rank)
    assert [pair in of_rank for of_rank in remembered] == [True, True, False, False]
    assert all(of_rank[-1].startswith("barrier") for of_rank in remembered)


def test_warnings_are_shown_though_the_caller_makes_errors_of_them() -> None:
    def on_rank(world: World) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("odd", UserWarning, stacklevel=1)
        return len(caught)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_threads(on_rank, 1) == [1]


def test_ranks_sleep_at_the_same_time() -> None:
    turns, ended = Turns(8, lambda: (0, AssertionError("stuck"))), []

    def sleep(rank: int) -> None:
        turns.sleep(0.2 - 0.02 * rank)
        ended.append(rank)

    start = time.monotonic()
    turns.run(sleep)
    assert turns.failure is None
    assert ended == [7, 6, 5, 4, 3, 2, 1, 0]
    assert 0.2 <= time.monotonic() - start < 0.8  # one after the other, 1.04 seconds


def test_a_message_is_taken_from_the_rank_that_is_named() -> None:
    def on_rank(world: World) -> list[float]:
        if world.rank:
            work = dist.isend(torch.tensor([float(world.rank)]), 0)
            dist.barrier()
            assert work is not None
            work.wait()
            return []
        dist.barrier()
        received = [torch.zeros(1) for _ in range(1, RANKS)]
        for source in range(RANKS - 1, 0, -1):
            dist.recv(received[source - 1], source)
        return [one.item() for one in received]

    assert in_threads(on_rank)[0] == [1.0, 2.0, 3.0]


def test_the_first_error_of_a_world_is_its_cause() -> None:
    def on_rank(world: World) -> None:
        if world.rank == 2:
            raise ValueError("first")
        try:
            dist.barrier()
        finally:
            raise RuntimeError("then")

    assert fails(on_rank).message == "ValueError: first"
