"""What a step gets, and what it does: the model or pipeline stage with what it needs of the job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from titanlite.config.schema import JobConfig
from titanlite.mesh.device_mesh import Meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.parallelize.activation_checkpoint.apply import RecomputationReport
from titanlite.parallelize.ddp.apply import DDPReport, apply_ddp
from titanlite.parallelize.plan import ParallelPlan
from titanlite.plan_row import PlanRow

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass
class Part:
    """A model or pipeline stage during the steps, with what the steps need of the job."""

    model: nn.Module
    config: JobConfig
    dims: ParallelDims
    meshes: Meshes
    plan: ParallelPlan
    whole: nn.Module | None
    ddp: Callable[..., DDPReport] = apply_ddp
    recomputation: RecomputationReport = field(default_factory=lambda: RecomputationReport(()))
    rings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FeatureStep:
    """What the step of a feature does; each step.py has one as STEP."""

    apply: Callable[[Part], PlanRow]
    """Applies the feature in place; the row of the effective plan."""
    check_model: Callable[[nn.Module, ParallelPlan, JobConfig, ParallelDims], None] | None = None
    """Raises ConfigError if the plain model, on "meta", does not fit; called before ranks start."""
    finish: Callable[[JobConfig, list[nn.Module], Optimizer], None] | None = None
    """Called when this rank's parts have values and an optimizer."""
    convert: Callable[[nn.Module, ParallelPlan, JobConfig], None] | None = None
    """Changes the parameters of the plain model, on "meta", before it is split or cut."""
