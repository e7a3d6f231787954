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
    from titanlite.config import JobConfig as JobConfig
    from titanlite.config import load_config as load_config
    from titanlite.config import parse_args as parse_args
    from titanlite.errors import ConfigError as ConfigError
    from titanlite.errors import RankError as RankError
    from titanlite.errors import TitanliteError as TitanliteError
    from titanlite.from_python import train as train
    from titanlite.parallelize import ParallelPlan as ParallelPlan
    from titanlite.parallelize import apply_ac as apply_ac
    from titanlite.parallelize import apply_compile as apply_compile
    from titanlite.parallelize import apply_cp as apply_cp
    from titanlite.parallelize import apply_ddp as apply_ddp
    from titanlite.parallelize import apply_ep as apply_ep
    from titanlite.parallelize import apply_float8 as apply_float8
    from titanlite.parallelize import apply_fsdp as apply_fsdp
    from titanlite.parallelize import apply_tp as apply_tp
    from titanlite.ranks.launch import spawn as spawn
    from titanlite.ranks.world import open_world as open_world
    from titanlite.register import register_dataset as register_dataset
    from titanlite.register import register_loss as register_loss
    from titanlite.register import register_metric as register_metric
    from titanlite.register import register_model as register_model
    from titanlite.register import register_optimizer as register_optimizer
    from titanlite.register import register_scheduler as register_scheduler
    from titanlite.tools.by_hand.checkpoints import load_checkpoint as load_checkpoint
    from titanlite.tools.by_hand.checkpoints import save_checkpoint as save_checkpoint
    from titanlite.tools.by_hand.huggingface import load_hf as load_hf
    from titanlite.tools.by_hand.huggingface import save_hf as save_hf
    from titanlite.tools.planner.from_python import plan as plan
    from titanlite.tools.verify.from_python import verify as verify
    from titanlite.tools.verify.program.comparison import assert_equivalent as assert_equivalent
    from titanlite.tools.verify.program.comparison import compare as compare

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

lazy(__name__, PUBLIC, PACKAGES)
