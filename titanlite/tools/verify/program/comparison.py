"""Compares parallel code with a plain model on one process: `titanlite.compare`.

result = titanlite.compare(build_model, build_parallel, batches=batches, loss=loss, ranks=4)
assert result.agrees, result
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titanlite.errors import ConfigError, TitanliteError
from titanlite.observe.terminal import tell
from titanlite.tools.verify import on_rank
from titanlite.tools.verify.job_runs import failure
from titanlite.tools.verify.pool import RankPools, must_run
from titanlite.tools.verify.program.judging import Judging
from titanlite.tools.verify.program.request import Request, Split, check, make_grid, pack
from titanlite.tools.verify.program.result import Comparison
from titanlite.tools.verify.record import ModelRun

# The arguments of `compare` that are not those of `Comparer.compare`, or not by name.
OF_THE_RANKS = ("timeout_seconds", "max_ranks", "threads")
POSITIONAL = ("reference", "parallel")


def compare(
    reference: Callable[[], Any],
    parallel: Callable[..., Any],
    *,
    batches: Sequence[Any],
    loss: Callable[[Any, Any], Any],
    ranks: int | Mapping[str, int],
    split: Split | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[list[Any]], Any] | None = None,
    clip: Callable[[Any], Any] | None = None,
    shard: Callable[[str], Any] | None = None,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    copy_weights: bool = False,
    leave_out: Sequence[str] = (),
    parallel_loss: Callable[[Any, Any], Any] | None = None,
    microbatches: int | None = None,
    modules: bool = True,
    dtype: str = "float64",
    tolerance: float | str | None = None,
    seed: int | None = 0,
    timeout_seconds: float = 300,
    max_ranks: int | None = None,
    threads: bool | None = None,
) -> Comparison:
    """Train parallel code on local ranks and its plain model on one process, and compare each step.

    `reference()` returns the plain model. `parallel()` or `parallel(mesh)` runs on every rank, in
    an initialized process group (gloo on CPU), and returns that rank's model, or a tuple, dict or
    object with modules (such as pipeline stages), optimizers, and anything else that `step` needs.
    `ranks` is their number, or a dict from axis to degree, in row-major order. `mesh` is a
    DeviceMesh with these axes, or only "world".

    batches: the global batch of each step: tensors in dicts, tuples or lists.
    loss: (model, batch) -> a scalar tensor; for the reference and, without `step` and
        `parallel_loss`, for the ranks.
    parallel_loss: the same for the ranks alone, such as a loss of vocabulary shards.
    split: how a rank gets its part of a batch. None: all of it. An axis: dimension 0 of every
        tensor is cut into equal parts over it. A dict from axis to dimension: other dimensions are.
        A function (batch, mesh) -> the part, of plain tensors or DTensors.
    step: (built, part) -> the loss or None, where `built` is what `parallel` returned. It runs a
        rank's forward and backward passes.
    microbatches: how many forward passes with gradients `step` makes, each with an equal part of
        the rank's rows; by default, as many as are seen.
    optimizer: (parameters) -> the optimizer, or several, of a side that returns none; by default
        AdamW with lr 1e-3.
    clip: (model) -> the norm of the gradients, which it clips; called on both sides before each
        optimizer step.
    shard: (name) -> how a rank's tensor is cut from the reference's. None: it is not. (dim, axis):
        into chunks over the mesh axis, as by torch.chunk or torch.tensor_split. (dim, index,
        count): chunk `index` of `count`. Or a list of such tuples, or a function from the whole
        tensor to the part. Not needed for DTensors, nor if one dimension has the size of such a
        chunk over one axis alone.
    rename: a function or dict from the parallel code's name of a parameter or module, without
        prefixes of DDP, FSDP1, torch.compile and checkpoint wrappers, to the reference's.
    copy_weights: start from the reference's weights instead of comparing the starting values.
    leave_out: names or patterns ("*.counts") of the reference's parameters, buffers and modules to
        leave out.
    modules: whether forward hooks record what modules receive and return.
    dtype: "float64", "float32" or "bfloat16", torch's default while the functions run.
    tolerance: the largest relative difference that counts as agreement, or "sensitivity": as much
        as rounding moves the reference. docs/compare.md has the default.
    seed: of torch.manual_seed before `reference` and before `parallel`; None: none.
    timeout_seconds: how long the ranks may take altogether.
    max_ranks: the most ranks to start; by default as the machine's cores and memory allow.
    threads: whether the ranks are threads of this process: up to 4,096, without a timeout; a
        breakpoint stops all of them, and what the functions change in the process stays changed. By
        default, if there are too many for processes.

    Raises ConfigError for a mistake in the arguments and TitanliteError if the reference does not
    run. An exception on a rank is part of the result.
    """
    options = {name: value for name, value in locals().items() if name not in POSITIONAL}
    ranks_of = {name: options.pop(name) for name in OF_THE_RANKS}
    try:
        with Comparer(**ranks_of) as comparer:
            return comparer.compare(reference, parallel, **options)
    except ConfigError as error:
        # The caller's mistake: where it was found in here says nothing to them.
        raise error.with_traceback(None) from None


def assert_equivalent(
    reference: Callable[[], Any], parallel: Callable[..., Any], **options: Any
) -> Comparison:
    """Call `compare` with these arguments, and return its result.

    Raises AssertionError, with the likely cause, unless the parallel code agrees.
    """
    return compare(reference, parallel, **options).check()


class Comparer(contextlib.AbstractContextManager["Comparer"]):
    """A context manager: all comparisons in its `with` block run on the same processes.

    That is faster. Global state that the caller's code changes stays changed for the next
    comparison.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = 300,
        max_ranks: int | None = None,
        threads: bool | None = None,
    ) -> None:
        self._pools = RankPools(
            timeout_seconds=timeout_seconds, max_ranks=max_ranks, threads=threads
        )

    def __exit__(self, *error: Any) -> None:
        self._pools.__exit__(*error)

    def compare(
        self,
        reference: Callable[[], Any],
        parallel: Callable[..., Any],
        *,
        ranks: int | Mapping[str, int],
        tolerance: float | str | None = None,
        **options: Any,
    ) -> Comparison:
        """The same as `titanlite.compare`."""
        start = time.perf_counter()
        grid = make_grid(ranks)
        request = Request(
            reference, parallel, grid=grid, timeout_seconds=self._pools.timeout_seconds, **options
        )
        check(request)
        packed = pack(request)
        name = getattr(getattr(parallel, "func", parallel), "__name__", type(parallel).__name__)
        found = Comparison(grid, request.dtype, len(request.batches), name)
        # No clock: the code may print. The ranks start while the reference runs.
        tell("training on one process and in parallel")
        pool = self._pools.of(grid.world_size)
        found.threads = pool.are_threads
        pool.start()
        with tempfile.TemporaryDirectory(prefix="titanlite-compare-") as folder:
            record = self._reference(packed, folder)
            found.narrowed = record.narrowed
            try:
                what = packed, folder, record
                runs = pool.call(on_rank.parallel.run_parallel, *what, records=False)
            except TitanliteError as error:
                found.error = failure(error)
                found.findings = [found.error_finding]
            else:
                judging = Judging(self._pools, request, packed, folder, record, runs, found)
                judging.judge(tolerance)
        found.seconds = time.perf_counter() - start
        return found

    def _reference(self, packed: bytes, folder: str) -> ModelRun:
        with must_run("reference: does not run"):
            record = self._pools.alone(on_rank.reference.run_model, packed, folder)
        for step, numbers in enumerate(record.steps):
            if not math.isfinite(numbers.loss + numbers.norm):
                raise ConfigError(
                    f"reference: its loss or gradient norm is not finite in step {step}, so it "
                    "cannot be compared; give other batches or another optimizer"
                )
        return record
