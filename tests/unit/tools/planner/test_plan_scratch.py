"""What kernels allocate inside themselves is what the table of the CPU says."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.benchmarks.allocator import changes, has_avx512_bf16
from titanlite.tools.planner.scratch import CPU, num_bytes

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def scratch_of(function: Callable[..., Any], *args: Any) -> int:
    """The most bytes that a call holds beside its result."""
    results: list[Any] = []
    found = changes(lambda: results.append(function(*args)))
    most = max(itertools.accumulate(change.num_bytes for change in found))
    result = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    return most - sum(num_bytes(tensor) for tensor in result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention(threads: int, dtype: torch.dtype) -> None:
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for batch, heads, queries, keys, features in (
        (1, 8, 64, 64, 4),
        (2, 4, 200, 200, 16),
        (1, 2, 800, 1000, 8),
        (1, 2, 40, 30, 16),
    ):
        q = torch.randn(batch, heads, queries, features, dtype=dtype)
        k, v = torch.randn(2, batch, heads, keys, features, dtype=dtype)
        args = (q, k, v, 0.0, False)
        assert scratch_of(forward, *args) == CPU.kernels[FLASH](args, threads)
        out, lse = forward(*args)
        for grad in (torch.randn(out.shape, dtype=dtype), torch.randn_like(out)):
            grads = (grad, q, k, v, out, lse, 0.0, False)
            expected = CPU.kernels[f"{FLASH}_backward"](grads, threads)
            assert scratch_of(backward, *grads) == expected


def test_the_padded_copies_of_gradients() -> None:
    gradients = [torch.randn(5, 3), torch.randn(8, 4), torch.randn(7)]

    def copy(*args: Any) -> None:
        torch._chunk_cat(*args[:3], out=args[3])

    for dtype in (torch.float32, torch.float64):
        args = (gradients, 0, 4, torch.empty(4, 16, dtype=dtype))
        found, expected = scratch_of(copy, *args), CPU.kernels["fsdp::chunk_cat"](args, 1)
        assert found == expected if dtype == torch.float32 else 0.8 * expected <= found <= expected


def test_products_in_low_precision_take_onednns_scratch_memory(threads: int) -> None:
    if not has_avx512_bf16() or torch.cpu._is_amx_tile_supported():
        pytest.skip("the table has the blocks of AVX-512, and other machines have others")
    for m, k, n in ((64, 32, 32), (64, 64, 17), (256, 64, 64), (512, 256, 256), (2048, 512, 64)):
        a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
        found = scratch_of(torch.mm, a, b)
        assert found == pytest.approx(CPU.kernels["aten::mm"]((a, b), threads), rel=0.02)
    assert CPU.kernels["aten::mm"]((a.float(), b.float()), threads) == 0
    assert scratch_of(torch.mm, a.float(), b.float()) == 0
