"""Async tensor parallelism: communication over tp, overlapped with matrix products; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from titanlite.errors import nearest, quote
from titanlite.fields import MODEL, Section, extra_key, key, reads
from titanlite.mesh.parallel_dims import divisors
from titanlite.parallelize.feature import Feature, Variation

if TYPE_CHECKING:
    from titanlite.config.draft import Draft
    from titanlite.config.schema import JobConfig


class AsyncTensorParallelKeys(Section):
    """The keys of async tensor parallelism in [parallelism]"""

    enable_async_tensor_parallel: bool = key(
        False, "TP: overlap communication with matrix products"
    )
    async_tensor_parallel_backend: Literal["auto", "symmetric_memory", "ring"] = extra_key(
        "auto", "async TP: symmetric_memory (GPUs, compiled model) or ring; auto: by device"
    )

    def overlap_backend(self, device_type: str) -> Literal["symmetric_memory", "ring"] | None:
        """The backend of async TP on `device_type`; None if async TP is off."""
        if not self.enable_async_tensor_parallel:
            return None
        if self.async_tensor_parallel_backend == "auto":
            return "symmetric_memory" if device_type == "cuda" else "ring"
        return self.async_tensor_parallel_backend


ASYNC_TP = "parallelism.enable_async_tensor_parallel"


@reads(
    MODEL,
    ASYNC_TP,
    "parallelism.async_tensor_parallel_backend",
    "parallelism.tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "training.seq_len",
    "training.dataset",
    "compile",
)
def _async_tensor_parallel(job: Draft) -> Iterator[str]:
    """Async TP needs a TP degree above 1, a sequence of equal chunks and, with symmetric memory, a
    model compiled by inductor."""
    parallelism, dims = job.config.parallelism, job.dims
    if not parallelism.enable_async_tensor_parallel:
        if parallelism.async_tensor_parallel_backend != "auto":
            yield (
                "parallelism.async_tensor_parallel_backend: "
                f"{quote(parallelism.async_tensor_parallel_backend)} has no effect without async "
                f"TP; remove it, or set {ASYNC_TP} = true"
            )
        return
    if dims.tp == 1:
        yield (
            f"{ASYNC_TP}: there is no tensor parallelism to overlap; set it to false, or set "
            "parallelism.tensor_parallel_degree to 2 or more"
        )
    tokens, remainder = divmod(job.seq_len, dims.cp)
    if not remainder and tokens % dims.tp and not job.misfits:
        yield (
            f"{ASYNC_TP}: {tokens} tokens are not a multiple of tensor_parallel_degree {dims.tp}, "
            "but async TP needs equal chunks; set tensor_parallel_degree to "
            f"{nearest(dims.tp, divisors(tokens))}, or set this key to false"
        )
    if parallelism.async_tensor_parallel_backend == "symmetric_memory":
        yield from _symmetric_memory_problems(job.config)


def _symmetric_memory_problems(config: JobConfig) -> Iterator[str]:
    """Symmetric memory needs a model compiled by inductor, which does the fusion."""
    compiled = config.compile
    if not compiled.enable or "model" not in compiled.components:
        yield (
            f"{ASYNC_TP}: symmetric memory needs the compiler, but the model is not "
            'compiled; set compile.enable = true with "model" in compile.components, or '
            'parallelism.async_tensor_parallel_backend = "ring"'
        )
    elif compiled.backend != "inductor":
        yield (
            f"{ASYNC_TP}: symmetric memory needs inductor, but compile.backend is "
            f'{quote(compiled.backend)}; set compile.backend = "inductor", or '
            'parallelism.async_tensor_parallel_backend = "ring"'
        )


def _machine_problems(config: JobConfig, device_type: str) -> Iterator[str]:
    parallelism = config.parallelism
    if parallelism.overlap_backend(device_type) != "symmetric_memory":
        return
    if device_type != "cuda":
        yield (
            'parallelism.async_tensor_parallel_backend: "symmetric_memory" needs GPUs, '
            f'but this job runs on {device_type}; give "ring" or "auto"'
        )
    # If the backend is named, `_async_tensor_parallel` has checked this already.
    elif parallelism.async_tensor_parallel_backend == "auto":
        yield from _symmetric_memory_problems(config)


ASYNC_TENSOR_PARALLEL = Feature(
    "async tensor parallel",
    "async_tensor_parallel",
    is_on=lambda config: config.parallelism.enable_async_tensor_parallel,
    checks=(_async_tensor_parallel,),
    machine_problems=_machine_problems,
    variations=(Variation("async tp", {"on": {ASYNC_TP: True}, "off": {}}, needs=("tp",)),),
)
