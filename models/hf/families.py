"""What is parallelized in a causal language model of transformers, found from its own structure.

The blocks are the list of modules in the base model, and the tensor-parallel styles come from the
configuration's `base_model_tp_plan`. `missing` says what a plan needs and a model lacks.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titanlite.models.hf.config import TP_TABLE, HFConfig
from titanlite.models.hf.model import ATTENTION, build, configuration
from titanlite.models.sizes import share_problems
from titanlite.modules.experts import expert_layers
from titanlite.parallelize.plan import block_lists, derive_plan, match_modules
from titanlite.parallelize.tensor_parallel.styles import NormLocal

PIPELINE_TYPES = (
    *("deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("glm4_moe", "gpt2", "gpt_oss", "llama", "mistral", "mixtral"),
    *("olmo", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
"""The types whose forward is that of `stage_forward`; others scale or mask between blocks."""

Problem = tuple[str, str]
REPLICATED = ("replicated", "replicate")


def style_of(entry: str) -> ParallelStyle | None:
    """The style of an entry of `base_model_tp_plan`; None if it replicates, or is not supported.

    The names are those of transformers 5, and in brackets of 4.
    """
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": lambda: ColwiseParallel(),
        "rowwise": lambda: RowwiseParallel(),
        # (colwise_rep) and (rowwise_rep): what is between the two is computed whole on every rank.
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        # Norms of single heads are replicated, while each rank has other heads.
        "replicated_with_grad_allreduce": lambda: NormLocal(),
    }
    return styles[entry]() if entry in styles else None


@dataclass(frozen=True)
class Structure:
    """The names of the modules of a model that a plan needs."""

    base: str
    blocks: str
    embeddings: tuple[str, ...]
    head: tuple[str, ...]
    attention: str | None
    """The name of the attention within a block; None if the blocks have none or several."""
    is_derived: bool = False
    """Whether only the blocks are known, which is enough for FSDP and DDP."""


def structure_of(model: nn.Module) -> Structure:
    """The structure of a model; raises ValueError if it has no obvious list of blocks.

    A list elsewhere than in the base model itself (`model.decoder.layers` of OPT) is only taken if
    its attention says that it is causal.
    """
    base = str(getattr(model, "base_model_prefix", ""))
    inner = getattr(model, base, None) if base else None
    lists = [
        name
        for name, child in (inner.named_children() if isinstance(inner, nn.Module) else ())
        if isinstance(child, nn.ModuleList) and len(child) > 0
    ]
    if inner is None or len(lists) != 1:
        deeper = derive_plan(model).blocks
        attentions = [module for module in model.modules() if hasattr(module, ATTENTION)]
        if deeper and all(getattr(module, "is_causal", False) for module in attentions):
            return Structure(base, deeper, (), (), None, is_derived=True)
        known = ", ".join(f"{name} ({what})" for name, what in block_lists(model).items())
        raise ValueError(
            "has no single list of blocks in its base model"
            + (f", or its attention is not causal; its lists are {known}" if known else "")
        )
    names = [
        name
        for name, child in inner.named_children()
        # A norm may have no weights.
        if name == lists[0] or _holds(child) or name.endswith("norm")
    ]
    place = names.index(lists[0])
    # An embedding comes before the blocks, wherever the model's constructor makes it.
    before = [n for n in names if n in names[:place] or isinstance(getattr(inner, n), nn.Embedding)]
    after = [f"{base}.{name}" for name in names if name != lists[0] and name not in before]
    outer = [name for name, child in model.named_children() if name != base and _holds(child)]
    blocks = getattr(inner, lists[0])
    found = {
        name
        for block in blocks
        for name, module in block.named_modules()
        if hasattr(module, ATTENTION)
    }
    everywhere = all(
        hasattr(dict(block.named_modules()).get(name), ATTENTION)
        for block in blocks
        for name in found
    )
    return Structure(
        base=base,
        blocks=f"{base}.{lists[0]}",
        embeddings=tuple(f"{base}.{name}" for name in before),
        head=(*after, *outer),
        attention=found.pop() if len(found) == 1 and everywhere else None,
    )


def tensor_parallel_of(model: Any, structure: Structure) -> dict[str, ParallelStyle]:
    """The styles of the model's `base_model_tp_plan`, and of its embedding table.

    `missing` names the entries that have no style; they are left out here.
    """
    table: Mapping[str, str] = getattr(model.config, TP_TABLE, None) or {}
    styles = {}
    for name, entry in table.items():
        pattern = f"{structure.base}.{name}"
        if match_modules(model, pattern) and (style := style_of(entry)) is not None:
            styles[pattern] = style
    if table.get(_inner(structure, "q_proj")) == "colwise":
        # transformers 4 has no entry for norms of single heads.
        for name in ("q_norm", "k_norm"):
            pattern = f"{structure.base}.{_inner(structure, name)}"
            if match_modules(model, pattern):
                styles.setdefault(pattern, NormLocal())
    table_name = f"{structure.base}.embed_tokens"
    if table_name in structure.embeddings:
        styles[table_name] = RowwiseParallel(input_layouts=Replicate())
    return styles


def _inner(structure: Structure, name: str) -> str:
    blocks = structure.blocks.removeprefix(f"{structure.base}.")
    return f"{blocks}.*.{structure.attention}.{name}"


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


CANNOT_BUILD = (ValueError, TypeError, KeyError, AttributeError, ImportError)


def num_experts(sizes: HFConfig) -> int:
    """The experts of the first layer of experts; 0 without one, or if it cannot be built."""
    with contextlib.suppress(*CANNOT_BUILD):
        layers = expert_layers([_built(sizes)[1]]).values()
        return next((layer.num_experts for layer in layers), 0)
    return 0


def missing(sizes: HFConfig, tp: int, pp: int, cp: int) -> list[Problem]:
    """What this model lacks for a plan, as (key, message); the model is built without storage."""
    try:
        config, model, structure = _built(sizes)
    except CANNOT_BUILD as error:
        key = "model.path" if sizes.path is not None else "model.config_class"
        why = " ".join(str(error).split())
        return [(key, f"{why[:200]}; give a causal language model of transformers")]
    return list(_missing(config, model, structure, tp, pp, cp))


@functools.lru_cache(maxsize=8)
def _built(sizes: HFConfig) -> tuple[Any, Any, Structure]:
    config = configuration(sizes)
    with torch.device("meta"):
        model = build(sizes)
    try:
        return config, model, structure_of(model)
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} {error}") from error


def _missing(
    config: Any, model: Any, structure: Structure, tp: int, pp: int, cp: int
) -> Iterator[Problem]:
    name = type(model).__name__
    degree = "parallelism.{}_parallel_degree"
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions or not getattr(model, "_supports_attention_backend", False):
        lacks = "attention that can be replaced" if takes_positions else "position_ids"
        yield "model.config_class", f"{name} has no {lacks}; give another model"
    if structure.is_derived:
        known = f"of {name} only the blocks are known, {structure.blocks}"
        for axis, axis_degree in {"tensor": tp, "pipeline": pp, "context": cp}.items():
            if axis_degree > 1:
                yield degree.format(axis), f"{known}, which is enough for FSDP and DDP; give 1"
        tp = pp = cp = 1
    wrong = _wrong_entry(config, model, structure)
    if wrong is not None:
        yield "model.values", wrong
    elif tp > 1:
        yield from _missing_for_tp(config, model, structure, tp)
    if pp > 1 and config.model_type not in PIPELINE_TYPES:
        known = ", ".join(PIPELINE_TYPES)
        yield (
            degree.format("pipeline"),
            f"{name} may compute between its blocks, which a stage would leave out; give 1, or a "
            f"model of one of the types {known}",
        )
    if cp > 1 and structure.attention is None:
        wanted = f"{name} does not have one attention in each block; give 1"
        yield degree.format("context"), wanted
    drops = (n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p)
    if config.model_type != "gpt2" and (dropped := next(drops, "")):
        drops_out = f"{name} drops out, in {dropped}, and differently under each plan"
        yield "model.values", f"{drops_out}; set its dropout to 0"
    if getattr(config, "attention_dropout", 0):
        yield ("model.values", "attention_dropout differs between plans; set it to 0")
    kinds = getattr(config, "layer_types", None) or ()
    if other := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        yield ("model.values", f"layers of type {other[0]} are not supported")


def _missing_for_tp(config: Any, model: Any, structure: Structure, tp: int) -> Iterator[Problem]:
    key, name = "parallelism.tensor_parallel_degree", type(model).__name__
    table = getattr(config, TP_TABLE, None)
    if not table:
        yield key, f"{type(config).__name__} has no {TP_TABLE}; give 1"
        return
    unknown = [
        f"{pattern} ({entry})"
        for pattern, entry in table.items()
        if style_of(entry) is None
        and entry not in REPLICATED
        # apply_ep shares out the tokens of experts, whose weights TP does not cut.
        and "experts" not in pattern.split(".")
    ]
    if unknown:
        shown = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        yield key, f"the base_model_tp_plan of {name} has unsupported entries: {shown}; give 1"
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv_entry = table.get(_inner(structure, "k_proj"))
    numbers = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if kv_entry == "colwise":
        yield from share_problems(tp, numbers)


def _wrong_entry(config: Any, model: Any, structure: Structure) -> str | None:
    """What is wrong with a table of styles that [model] gives; None if it is right, or not given.

    The tables of transformers itself may name modules that not every size of a model has.
    """
    table = getattr(config, TP_TABLE, None)
    if table is None or table is getattr(type(config), TP_TABLE, None):
        return None
    for pattern in table:
        if not match_modules(model, f"{structure.base}.{pattern}"):
            return (
                f"{TP_TABLE} names {pattern}, which is no module of the "
                f"{type(getattr(model, structure.base)).__name__}; correct it, or remove it"
            )
    return None
