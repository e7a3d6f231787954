"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs.

    train, verify, plan                 a job, from Python as by the commands (docs/own_model.md)
    compare, assert_equivalent          any parallel code with its plain model (docs/compare.md)
    register_model, register_dataset, register_loss, ...    make your own known to a job
    apply_tp, apply_fsdp, ...           make a model parallel by hand (docs/by_hand.md)
    save_checkpoint, save_hf, ...       checkpoints and Hugging Face folders
    spawn, open_world                   functions on local ranks

These are the names that most programs need. The pieces of a training loop are in the packages
titanlite.training, .parallelize, .modules, .mesh and .ranks; docs/api documents every name. All are
imported when they are first used, so `import titanlite` is fast and does not import torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.lazy import lazy
from titanlite.version import VERSION

if TYPE_CHECKING:
    from titanlite import callbacks as callbacks
    from titanlite import mesh as mesh
    from titanlite import modules as modules
    from titanlite import parallelize as parallelize
    from titanlite import ranks as ranks
    from titanlite import schedule as schedule
    from titanlite import tools as tools
    from titanlite import training as training
    from titanlite.config import JobConfig, load_config, parse_args
    from titanlite.errors import ConfigError, RankError, TitanliteError
    from titanlite.from_python import train
    from titanlite.parallelize import (
        ParallelPlan,
        apply_ac,
        apply_compile,
        apply_cp,
        apply_ddp,
        apply_ep,
        apply_float8,
        apply_fsdp,
        apply_tp,
    )
    from titanlite.ranks.launch import spawn
    from titanlite.ranks.world import open_world
    from titanlite.register import (
        register_dataset,
        register_loss,
        register_metric,
        register_model,
        register_optimizer,
        register_scheduler,
    )
    from titanlite.tools.by_hand.checkpoints import load_checkpoint, save_checkpoint
    from titanlite.tools.by_hand.huggingface import load_hf, save_hf
    from titanlite.tools.planner.from_python import plan
    from titanlite.tools.verify.from_python import verify
    from titanlite.tools.verify.program.comparison import assert_equivalent, compare

if not Path(__file__).with_name("models").is_dir():  # a text file where links are not kept
    __path__.append(str(Path(__file__).parents[1]))

__version__ = VERSION

PUBLIC = {
    "from_python": ("train",),
    "tools.verify.from_python": ("verify",),
    "tools.planner.from_python": ("plan",),
    "tools.verify.program.comparison": ("compare", "assert_equivalent"),
    "config": ("JobConfig", "load_config", "parse_args"),
    "register": (
        *("register_model", "register_dataset", "register_loss", "register_metric"),
        *("register_optimizer", "register_scheduler"),
    ),
    "parallelize": (
        *("ParallelPlan", "apply_float8", "apply_tp", "apply_ep", "apply_cp", "apply_ac"),
        *("apply_compile", "apply_fsdp", "apply_ddp"),
    ),
    "tools.by_hand.checkpoints": ("save_checkpoint", "load_checkpoint"),
    "tools.by_hand.huggingface": ("save_hf", "load_hf"),
    "ranks.launch": ("spawn",),
    "ranks.world": ("open_world",),
    "errors": ("TitanliteError", "ConfigError", "RankError"),
}
"""The public names, by module."""

PACKAGES = (
    *("callbacks", "mesh", "modules", "parallelize", "ranks", "schedule", "tools", "training"),
)
"""What else is public: packages that `import titanlite` makes known."""

__all__ = [
    "ConfigError",
    "JobConfig",
    "ParallelPlan",
    "RankError",
    "TitanliteError",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_ddp",
    "apply_ep",
    "apply_float8",
    "apply_fsdp",
    "apply_tp",
    "assert_equivalent",
    "compare",
    "load_checkpoint",
    "load_config",
    "load_hf",
    "open_world",
    "parse_args",
    "plan",
    "register_dataset",
    "register_loss",
    "register_metric",
    "register_model",
    "register_optimizer",
    "register_scheduler",
    "save_checkpoint",
    "save_hf",
    "spawn",
    "train",
    "verify",
]

lazy(__name__, PUBLIC, PACKAGES)
