"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs.

    train, make_config, load_config     train a job from Python (docs/own_model.md)
    register_model, register_dataset, register_loss, register_metric    make your own known to a job
    keyed_normal, keyed_uniform, TokenDropout    random numbers of a sample (docs/randomness.md)
    compare, assert_parallel_equals_reference    verify any parallel code (docs/compare.md)
    export, load_weights                Hugging Face folders (docs/huggingface.md)
    apply_tp, apply_fsdp, Trainer, ...  the pieces of a loop by hand (docs/by_hand.md)

docs/api documents every name. They are imported when they are first used, so `import titanlite`
is fast and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from titanlite.version import VERSION

if TYPE_CHECKING:
    from titanlite.callbacks import Event, TrainResult
    from titanlite.config import JobConfig, load_config, make_config
    from titanlite.errors import ConfigError, RankError, TitanliteError
    from titanlite.from_python import train
    from titanlite.mesh.device_mesh import Meshes, build_meshes
    from titanlite.mesh.parallel_dims import ParallelDims
    from titanlite.modules.attention import Layout, make_layout
    from titanlite.modules.batch import Batch, FieldDims, call_model, make_batch
    from titanlite.modules.dropout import TokenDropout
    from titanlite.modules.keyed import keyed_normal, keyed_uniform, sample_keys
    from titanlite.modules.tied import find_tied
    from titanlite.parallelize import (
        ParallelPlan,
        PipelineRunner,
        apply_ac,
        apply_compile,
        apply_cp,
        apply_ddp,
        apply_float8,
        apply_fsdp,
        apply_tp,
        split_model,
    )
    from titanlite.parallelize.context_parallel.huggingface import register_ring_attention
    from titanlite.parallelize.context_parallel.ring import RingAttention, ring_attention
    from titanlite.parallelize.tensor_parallel.styles import (
        EmbeddingLocal,
        GatherColwise,
        NormLocal,
        RowwiseLocal,
        TokenDropoutLocal,
    )
    from titanlite.ranks.launch import Place, run_ranks, torchrun_place
    from titanlite.ranks.world import World, open_world
    from titanlite.register import register_dataset, register_loss, register_metric, register_model
    from titanlite.schedule import make_schedule
    from titanlite.tools.by_hand.checkpoints import Loaded, load_checkpoint, save_checkpoint
    from titanlite.tools.by_hand.huggingface import export, load_weights
    from titanlite.tools.verify.program.comparison import (
        Comparer,
        Comparison,
        assert_parallel_equals_reference,
        compare,
    )
    from titanlite.training.gradient_norm import (
        clip_gradients,
        gradient_norm,
        reduce_partial_gradients,
    )
    from titanlite.training.initialize import initialize
    from titanlite.training.loss import NEXT_TOKEN, Loss, loss_context, token_loss_sum
    from titanlite.training.optimizer import build_optimizer, build_scheduler
    from titanlite.training.step import StepResult, Trainer

__version__ = VERSION

PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "Train": {
        "from_python": ("train",),
        "callbacks": ("TrainResult", "Event"),
        "config": ("load_config", "make_config", "JobConfig"),
        "errors": ("TitanliteError", "ConfigError", "RankError"),
    },
    "Register": {
        "register": ("register_model", "register_dataset", "register_loss", "register_metric"),
    },
    "Random numbers": {
        "modules.keyed": ("keyed_normal", "keyed_uniform", "sample_keys"),
        "modules.dropout": ("TokenDropout",),
    },
    "Verify": {
        "tools.verify.program.comparison": (
            "compare",
            "assert_parallel_equals_reference",
            "Comparer",
            "Comparison",
        ),
    },
    "Ranks and meshes": {
        "mesh.parallel_dims": ("ParallelDims",),
        "mesh.device_mesh": ("build_meshes", "Meshes"),
        "ranks.launch": ("run_ranks", "torchrun_place", "Place"),
        "ranks.world": ("open_world", "World"),
    },
    "Parallelize": {
        "parallelize": (
            "ParallelPlan",
            "apply_float8",
            "apply_tp",
            "apply_cp",
            "apply_ac",
            "apply_compile",
            "apply_fsdp",
            "apply_ddp",
            "split_model",
            "PipelineRunner",
        ),
        "schedule": ("make_schedule",),
        "modules.tied": ("find_tied",),
    },
    "Styles of TP": {
        "parallelize.tensor_parallel.styles": (
            "GatherColwise",
            "RowwiseLocal",
            "NormLocal",
            "EmbeddingLocal",
            "TokenDropoutLocal",
        ),
    },
    "Ring attention": {
        "parallelize.context_parallel.ring": ("ring_attention", "RingAttention"),
        "parallelize.context_parallel.huggingface": ("register_ring_attention",),
        "modules.attention": ("make_layout", "Layout"),
    },
    "Step": {
        "training.initialize": ("initialize",),
        "modules.batch": ("make_batch", "Batch", "FieldDims", "call_model"),
        "training.step": ("Trainer", "StepResult"),
        "training.loss": ("Loss", "NEXT_TOKEN", "token_loss_sum", "loss_context"),
        "training.gradient_norm": ("gradient_norm", "clip_gradients", "reduce_partial_gradients"),
        "training.optimizer": ("build_optimizer", "build_scheduler"),
    },
    "Checkpoints": {
        "tools.by_hand.checkpoints": ("save_checkpoint", "load_checkpoint", "Loaded"),
        "tools.by_hand.huggingface": ("export", "load_weights"),
    },
}
"""The public names, by topic and module."""

_MODULES = {
    name: module
    for modules in PUBLIC.values()
    for module, names in modules.items()
    for name in names
}

__all__ = [
    "NEXT_TOKEN",
    "Batch",
    "Comparer",
    "Comparison",
    "ConfigError",
    "EmbeddingLocal",
    "Event",
    "FieldDims",
    "GatherColwise",
    "JobConfig",
    "Layout",
    "Loaded",
    "Loss",
    "Meshes",
    "NormLocal",
    "ParallelDims",
    "ParallelPlan",
    "PipelineRunner",
    "Place",
    "RankError",
    "RingAttention",
    "RowwiseLocal",
    "StepResult",
    "TitanliteError",
    "TokenDropout",
    "TokenDropoutLocal",
    "TrainResult",
    "Trainer",
    "World",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_ddp",
    "apply_float8",
    "apply_fsdp",
    "apply_tp",
    "assert_parallel_equals_reference",
    "build_meshes",
    "build_optimizer",
    "build_scheduler",
    "call_model",
    "clip_gradients",
    "compare",
    "export",
    "find_tied",
    "gradient_norm",
    "initialize",
    "keyed_normal",
    "keyed_uniform",
    "load_checkpoint",
    "load_config",
    "load_weights",
    "loss_context",
    "make_batch",
    "make_config",
    "make_layout",
    "make_schedule",
    "open_world",
    "reduce_partial_gradients",
    "register_dataset",
    "register_loss",
    "register_metric",
    "register_model",
    "register_ring_attention",
    "ring_attention",
    "run_ranks",
    "sample_keys",
    "save_checkpoint",
    "split_model",
    "token_loss_sum",
    "torchrun_place",
    "train",
]


# Otherwise a type checker would take any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(import_module(f"titanlite.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
