"""Attention within documents and windows on a GPU: against a mask, its waits, time and memory.

    python docs/gpu_documents.py FOLDER      # a check of gpu_checks.py; without a GPU a small one

Each line ends with what it measured. The exit status is 1 if a value is wrong, or the host waits.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import titanlite
from titanlite.modules.attention import LAYOUTS, make_layout
from titanlite.modules.attention.dense import attend
from titanlite.modules.attention.documents import noted, same_document
from titanlite.modules.batch import Batch, FieldDims
from titanlite.parallelize.context_parallel import ring
from titanlite.parallelize.context_parallel.rotation import ROTATE_METHODS
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import open_world

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Relative to the largest value, by dtype.
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-12}
LENGTH, HEADS, KV_HEADS, SIZE = (8192, 32, 8, 128) if ON_GPU else (64, 4, 2, 8)
ROWS = [[100, 1, 27, 128], [256], [3] * 84 + [4], [255, 1]]
# As shares of a sequence.
TIMED = {
    "2 documents": [1 / 2] * 2,
    "8 documents": [1 / 8] * 8,
    "64 documents": [1 / 64] * 64,
    "a long one and 8 short ones": [3 / 4] + [1 / 32] * 8,
}


def batch_of(rows: Sequence[Sequence[int]]) -> Batch:
    """The documents [B, T] of these lengths."""
    numbers = [torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in rows]
    return Batch({"documents": torch.stack(numbers)}, {"documents": FieldDims(0, 1)})


def documents_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """The documents, as a batch brings them to the device."""
    return batch_of(rows).to(DEVICE)["documents"]


def drawn(
    batch: int, heads: int, kv_heads: int, length: int, size: int, dtype: Any
) -> list[Tensor]:
    """q, k, v and the gradient of the output; the memory of q, k and v has the sequence first."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": DEVICE, "dtype": torch.float64}
    shapes = [(length, batch, h, size) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, **options).to(dtype).permute(1, 2, 0, 3) for s in shapes]


def by_mask(
    documents: Tensor | None, is_causal: bool, window: int | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """As before there were kernels for documents in a row: a mask in every layer."""
    mask = torch.ones(1, 1, q.size(2), q.size(2), dtype=torch.bool, device=q.device)
    mask = mask if documents is None else same_document(documents, documents)
    mask = mask.tril() if is_causal else mask
    mask = mask if window is None else mask.triu(1 - window)
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_gradients(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    inputs = [one.detach().requires_grad_() for one in tensors[:3]]
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def check_values(call: Callable[..., Tensor], what: str, *, only: Any = None) -> bool:
    """Whether values and gradients are those of a dense mask in float64; prints the errors."""
    said, is_right = [], True
    cases = ((2, True, None), (8, True, None), (2, False, None), (2, True, 50), (8, True, 2))
    for dtype, limit in LIMITS.items():
        if only not in (None, dtype):
            continue
        worst = 0.0
        for (kv_heads, is_causal, window), is_cut in product(cases, (True, False)):
            documents = documents_of(ROWS) if is_cut else None
            tensors = drawn(len(ROWS), 8, kv_heads, 256, 64, dtype)
            doubles = [tensor.double() for tensor in tensors]
            exact = with_gradients(partial(by_mask, documents, is_causal, window), doubles)
            if ON_GPU:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if only is None else "default")
            how = {"documents": documents, "is_causal": is_causal, "window": window}
            found = with_gradients(partial(call, **how), tensors)
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
                is_right &= documents is None or getattr(noted(documents), "rows", None) is not None
            worst = max(worst, error(found, exact))
        is_right &= worst < limit
        said.append(f"{str(dtype).removeprefix('torch.')} {worst:.1e}")
    print(f"{what}: values and gradients differ by {', '.join(said)}", flush=True)
    return is_right


def ring_error(place: Place, dtype: torch.dtype) -> float:
    """How far a rank of ring attention is from a mask over the whole sequences."""
    worst = 0.0
    with open_world(place, DEVICE.type) as world:
        for name, window, is_cut in product(LAYOUTS, (None, 50, 2), (True, False)):
            layout, batch = make_layout(name, world.size), batch_of(ROWS)
            cut = partial(layout.shard, dim=2, rank=world.rank)
            tensors = drawn(len(ROWS), 8, 2, 256, 64, dtype)
            whole = batch["documents"].to(DEVICE) if is_cut else None
            exact = with_gradients(
                partial(by_mask, whole, True, window), [tensor.double() for tensor in tensors]
            )
            own = batch.shard(layout, world.rank).to(DEVICE)["documents"] if is_cut else None
            for method in ROTATE_METHODS:
                attention = ring.RingAttention(dist.group.WORLD, layout, method)
                call = partial(attention, documents=own, window=window)
                found = with_gradients(call, [cut(tensor) for tensor in tensors])
                worst = max(worst, error(found, [cut(tensor) for tensor in exact]))
    return worst


def check_ring(num_ranks: int = 4) -> bool:
    """Whether ranks that share the device as threads find it too, in 16 bits without a mask."""
    said, is_right = [], True
    for dtype, limit in LIMITS.items():
        is_free = ON_GPU and dtype.itemsize == 2
        with patch.object(ring, "_mask", None if is_free else ring._mask):
            worst = max(spawn(ring_error, num_ranks, dtype, threads=True))
        is_right &= worst < limit
        said.append(f"{str(dtype).removeprefix('torch.')} {worst:.1e}")
    print(f"ring of {num_ranks}: values and gradients differ by {', '.join(said)}", flush=True)
    return is_right


def timed(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> str:
    """Milliseconds of a forward and a backward pass, and the most memory that they take."""
    seconds = []
    for _ in range(8):
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if ON_GPU else 0
        began = time.perf_counter()
        with_gradients(call, tensors)
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if ON_GPU else 0.0
    return f"{1e3 * statistics.median(seconds[3:]):.2f} ms, {peak:.2f} GiB"


def measure() -> None:
    """One layer by a mask and without, of the sizes of Llama 3 8B; then without documents."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors = drawn(1, HEADS, KV_HEADS, LENGTH, SIZE, dtype)
        name = str(dtype).removeprefix("torch.")
        for what, shares in TIMED.items():
            documents = documents_of([[int(LENGTH * share) for share in shares]])
            before = timed(partial(by_mask, documents, True, None), tensors)
            after = timed(partial(attend, documents=documents), tensors)
            print(f"{name}, {what}: a mask {before}; now {after}", flush=True)
        before = timed(partial(by_mask, None, True, LENGTH // 8), tensors)
        after = timed(partial(attend, window=LENGTH // 8), tensors)
        print(f"{name}, a window of 1/8: a mask {before}; now {after}", flush=True)
        print(f"{name}, causal, without documents: {timed(attend, tensors)}", flush=True)


def check_training(folder: Path) -> bool:
    """Whether a job trains alike with its batches read ahead and not; prints seconds of a step."""
    losses = []
    for is_ahead in (True, False):
        job: dict[str, Any] = {
            "job": {"dump_folder": str(folder / f"runs/ahead_{is_ahead}")},
            "model": {"name": "llama3", "flavor": "tiny"},
            "training": {
                "dataset": "pydoc",
                "seq_len": 4 * HEADS,
                "local_batch_size": 8,
                "steps": 12,
            },
            "sampling": {"num_samples": 0},
        }
        job["training"] |= {"attend_across_documents": False, "prefetch": is_ahead}
        job["training"] |= {"mixed_precision_param": "bfloat16"} if ON_GPU else {}
        began = time.perf_counter()
        losses.append(titanlite.train(job).losses)
        print(f"read ahead {is_ahead}: {time.perf_counter() - began:.1f} s", flush=True)
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    print(f"losses of 12 steps, read ahead and not, differ by {worst:.1e}", flush=True)
    return worst < 1e-3


def main() -> int:
    is_right = check_values(attend, "documents and windows") & check_ring()
    if ON_GPU:
        compiled = torch.compile(attend, fullgraph=True)
        is_right &= check_values(compiled, "compiled", only=torch.bfloat16)
    is_right &= check_training(Path(sys.argv[1]).absolute())
    measure()
    print("passed" if is_right else "failed", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
