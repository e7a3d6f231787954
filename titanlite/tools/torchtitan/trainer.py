"""On a rank: TorchTitan's Trainer, built and stepped as titanlite.tools.verify.program wants it.

A step of the verifier is Trainer.train_step. Two of its calls are kept and made right after it, so
that the gradients can be compared before: the one that clips, and the steps of its optimizers and
learning rates. They are TorchTitan's own, with the arguments that it gave.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from titanlite.ranks.settings import ignore_warnings
from titanlite.ranks.turns import is_rank
from titanlite.tools.torchtitan.job import TitanJob
from titanlite.tools.torchtitan.stand_ins import Widened, attribute_of, clipping, keep_standing_in

# Of a CPU, of torchrun's handler of faults, and of views that only an operator in place would harm.
UNIMPORTANT = "In CPU autocast|DTensor (random|manual)|Unable to enable|FSDP2-wrapped module"

Built = tuple[Any, ...]
"""The parts of the model on a rank, an optimizer, and the TrainerOfRank."""


class TrainerOfRank:
    """A Trainer whose step is taken in two halves, and its loss as it is logged."""

    def __init__(self, config: Any, dtype: str) -> None:
        self._widens = dtype == "float64"
        ignore_warnings(UNIMPORTANT, UserWarning)
        with self._mode():
            self.trainer = trainer = config.build()
        gc.enable()
        if not is_rank():
            # Gloo does not multiply before it sums.
            for part in trainer.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.set_force_sum_reduction_for_comms(True)
        self._clips: list[Callable[[], Tensor]] = []
        self._loss: float | None = None
        containers = trainer.optimizers, trainer.lr_schedulers
        self._steps = [attribute_of(container, "step") for container in containers]
        for container in containers:
            container.step = lambda *_: None
        attribute_of(trainer.metrics_processor, "log")
        trainer.metrics_processor.log = self._log

    def _mode(self) -> AbstractContextManager[Any]:
        return Widened() if self._widens else nullcontext()

    def _log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        self._loss = global_avg_loss

    def step(self, part: Mapping[str, Tensor]) -> float | None:
        """Its own step, up to the norm; returns the loss, None on a stage that has none."""
        trainer = self.trainer
        trainer.step += 1
        self._clips.clear()
        with self._mode(), clipping(calls=self._clips):
            trainer.train_step(self._microbatches(part))
        has_none = trainer.parallel_dims.pp_enabled and not trainer.pp_has_last_stage
        return None if has_none else self._loss

    def _microbatches(self, part: Mapping[str, Tensor]) -> Iterator[tuple[Any, Tensor]]:
        trainer = self.trainer
        count = trainer.gradient_accumulation_steps * attribute_of(
            trainer, "num_pipeline_parallel_microbatches"
        )
        for number in range(count):
            own = {name: value.chunk(count)[number].clone() for name, value in part.items()}
            yield {"input": own["input"], "positions": own["positions"]}, own["labels"]

    def clip(self) -> Tensor:
        """Clip as the step would have; returns the norm."""
        (clip,) = self._clips
        return clip()

    def advance(self) -> None:
        """Step the optimizers and the learning rates."""
        # Hooks of the optimizers balance experts.
        with self._mode():
            for step in self._steps:
                step()


class OptimizersOfRank(Optimizer):
    """The optimizers of a Trainer as one."""

    def __init__(self, of_rank: TrainerOfRank) -> None:
        self._of_rank = of_rank
        self._container = of_rank.trainer.optimizers

    @property
    def state(self) -> Any:  # type: ignore[override]
        return state_of(self._container)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._of_rank.advance()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._container.zero_grad(set_to_none)


def state_of(container: Any) -> dict[Any, dict[str, Any]]:
    """The state of each parameter of all optimizers."""
    # Not a ChainMap: each state makes an empty one for any parameter that it is asked for.
    return {one: of for part in container.optimizers for one, of in part.state.items()}


def build_plan(job: TitanJob, ranks: int | None, mesh: Any) -> Built:
    """A rank's part of the job under its plan, in torch's default dtype."""
    return _build(job, lambda job: job.plan(ranks).config)


def build_reference(job: TitanJob, ranks: int | None) -> Built:
    """The job on one rank, in torch's default dtype."""
    return _build(job, lambda job: job.reference(job.plan(ranks)))


def _build(job: TitanJob, read: Callable[[TitanJob], Any]) -> Built:
    keep_standing_in()
    # The rounding error of float32 is measured by a run in float64.
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    of_rank = TrainerOfRank(read(replace(job, dtype=dtype)), dtype)
    return *of_rank.trainer.model_parts, OptimizersOfRank(of_rank), of_rank


def run_step(built: Built, part: Mapping[str, Tensor]) -> float | None:
    return built[-1].step(part)


def clip(built: Built) -> Tensor:
    return built[-1].clip()


def mesh_of(degrees: Mapping[str, int]) -> Any:
    """The mesh along whose axes batches are split."""
    return init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def split(
    degrees: Mapping[str, int], balances: bool, batch: Mapping[str, Tensor], mesh: Any
) -> dict[str, Tensor]:
    """A rank's rows of a batch, and of its cells the columns that the rank of cp computes."""
    names = mesh.mesh_dim_names
    at = {axis: mesh.get_local_rank(axis) if axis in names else 0 for axis in degrees}
    count = degrees["dp_replicate"] * degrees["dp_shard"]
    index = at["dp_replicate"] * degrees["dp_shard"] + at["dp_shard"]
    found = {name: value.chunk(count)[index] for name, value in batch.items()}
    cp, parts = degrees["cp"], 2 * degrees["cp"] if balances else degrees["cp"]
    own = {at["cp"], parts - 1 - at["cp"]} if balances and cp > 1 else {at["cp"]}
    chunks = found["cells"].chunk(parts if cp > 1 else 1, 1)
    found["cells"] = torch.cat([chunks[number] for number in sorted(own)], 1)
    return found
