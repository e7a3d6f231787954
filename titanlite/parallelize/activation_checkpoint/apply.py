"""apply_ac: save fewer activations, and recompute the others in the backward pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import titanlite.parallelize.context_parallel.ring  # noqa: F401 (registers its operator)
from titanlite.errors import TitanliteError
from titanlite.modules.shards import local_part
from titanlite.parallelize.activation_checkpoint.buffers import BufferStates, around, has_buffers
from titanlite.parallelize.arguments import Plan, as_plan, check_choice, check_flags, check_names
from titanlite.parallelize.async_tensor_parallel.ring_product import PRODUCT_SCATTER
from titanlite.parallelize.plan import find_container
from titanlite.ranks import settings

aten = torch.ops.aten

# Matrix products, of which every second one is saved; those of float8 count as the others do.
PRODUCTS = (aten.mm.default, aten._scaled_mm.default)
# The outputs of these operators are saved. Matrix multiplications and attention cost the most to
# recompute. Collectives would communicate twice. max and amax are the magnitudes from which the
# scales of low-precision casts are computed, after an all_reduce over ranks.
SAVED_OPERATORS = (
    *PRODUCTS,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._flash_attention_forward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.titanlite.ring_attention.default,
    PRODUCT_SCATTER,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    aten.max.default,
    aten.amax.default,
)
# The hooks of an FSDP unit inside a block, such as its experts, name what they do to the profiler,
# and do not do the same in the forward pass and in its recomputation.
IGNORED_OPERATORS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
MODES = ("none", "full", "selective", "memory_budget")
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass
class OperatorTally:
    """How often a block called each operator of SAVED_OPERATORS: output saved, or recomputed."""

    saved: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """One line: which operators are saved and which are recomputed, with counts per block."""
        if not self.saved and not self.recomputed:
            return "nothing counted yet"
        parts = []
        for verb, counts in (("saves", self.saved), ("recomputes", self.recomputed)):
            if counts:
                listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
                parts.append(f"{verb} {listed}")
        return "; ".join(parts)


@dataclass(frozen=True)
class RecomputationReport:
    """What apply_ac did: the blocks it wrapped, and the operator counts of one block."""

    wrapped: tuple[str, ...]
    tally: OperatorTally | None = None


def apply_ac(
    model: nn.Module,
    mode: str = "selective",
    *,
    selective_option: str = "op",
    recompute_mm_of: tuple[str, ...] = (),
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = False,
    debug: bool = False,
    save_cpu_attention: bool = False,
    memory_budget: float = 0.5,
    plan: Plan | None = None,
) -> RecomputationReport:
    """Checkpoint the blocks of `model` in place.

    mode "none" saves everything. "full" saves only each block's input and recomputes the block in
    the backward pass. "selective" with a number n as `selective_option` does this for every n-th
    block; with "op", for every block, but it saves the outputs of SAVED_OPERATORS: attention,
    reduce-scatters, all-reduces, all-to-alls, max, and every second matrix product, not counting
    those of the linear layers that `recompute_mm_of` names by the ends of their names.
    "memory_budget" leaves the choice to the compiler: 0 equals "full", 1 equals "none".

    Recomputing uses the buffers as the forward pass found them, and leaves them as they are:
    BatchNorm's statistics change once. `save_cpu_attention` also saves the output of CPU attention
    in blocks that are recomputed whole; compiled tensor-parallel blocks need it.

    Raises TitanliteError for an invalid argument, and if `model` lacks the plan's container of
    blocks. Source: arXiv 2205.05198
    """
    plan = as_plan("apply_ac", model, plan)
    check_choice("apply_ac", "mode", mode, MODES)
    check_choice("apply_ac", "determinism_check", determinism_check, ("default", "none"))
    check_names("apply_ac", "recompute_mm_of", recompute_mm_of)
    check_flags(
        "apply_ac",
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        debug=debug,
        save_cpu_attention=save_cpu_attention,
    )
    every = block_interval(selective_option) if mode == "selective" else 1
    if mode == "memory_budget" and not 0 <= memory_budget <= 1:
        raise TitanliteError(
            f"apply_ac: memory_budget {memory_budget} is out of range; give 0 to 1"
        )
    if mode == "memory_budget":
        settings.change(settings.MEMORY_BUDGET, memory_budget)
    if mode in ("none", "memory_budget"):
        return RecomputationReport(())
    settings.ignore_when_saving(IGNORED_OPERATORS)
    options: dict[str, Any] = {
        "preserve_rng_state": preserve_rng_state,
        "determinism_check": determinism_check,
        "early_stop": early_stop,
        "debug": debug,
    }
    tally = None
    if mode == "selective" and selective_option == "op":
        tally = OperatorTally()
        shapes = _transposed_weight_shapes(model, recompute_mm_of)
        options["context_fn"] = partial(_selective_contexts, shapes, tally)
    elif save_cpu_attention:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, [CPU_ATTENTION])
    container = find_container(model, plan, "activation checkpointing")
    wrapped = []
    for index, (key, block) in enumerate(list(container.named_children())):
        if is_checkpointed(key, index, every):
            own = dict(options)
            if has_buffers(block):
                own |= {"checkpoint_fn": _checkpoint, "states": BufferStates()}
            container.register_module(key, checkpoint_wrapper(block, **own))
            wrapped.append(plan.block_name(key))
    return RecomputationReport(tuple(wrapped), tally)


def _checkpoint(
    block: nn.Module, *args: Any, states: BufferStates, debug: bool, **options: Any
) -> Any:
    """Checkpoint a call of a block that has buffers."""
    options = {"use_reentrant": False, "debug": debug, **options}
    if torch.compiler.is_compiling():
        return checkpoint(block, *args, **options)
    forward, recomputation = states.contexts(block)
    if not debug:
        options["context_fn"] = partial(
            around, (forward, recomputation), options.get("context_fn", noop_context_fn)
        )
        return checkpoint(block, *args, **options)
    # With debug, torch accepts no contexts but its own.
    calls = [recomputation, forward]

    def run(*args: Any, **kwargs: Any) -> Any:
        with calls.pop() if len(calls) == 2 else recomputation:
            return block(*args, **kwargs)

    return checkpoint(run, *args, **options)


def is_checkpointed(key: str, index: int, every: int) -> bool:
    """Whether the block at `index`, named `key` in its container, is an `every`-th one.

    In a pipeline stage, blocks keep their keys of the whole model.
    """
    place = int(key) if key.isdigit() else index
    return (place + 1) % every == 0


def block_interval(selective_option: object) -> int:
    """The n of "every n-th block is checkpointed"; 1 for "op"."""
    text = str(selective_option)
    if text != "op" and not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise TitanliteError(
            f'apply_ac: selective_option {selective_option!r} is not one of its values; give "op", '
            'or a block interval such as "2"'
        )
    return 1 if text == "op" else int(text)


def _selective_contexts(recomputed_shapes: frozenset[torch.Size], tally: OperatorTally) -> Any:
    """The two contexts of one checkpointed call, with a policy that counts only this call."""
    tally.saved.clear()
    tally.recomputed.clear()
    # Separate counters for the forward pass and its recomputation. With a shared counter, a block
    # with an odd number of matrix multiplications would look for outputs that were never saved.
    num_mm = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in SAVED_OPERATORS
        if operator in PRODUCTS:
            if args[1].shape in recomputed_shapes:
                saved = False
            else:
                num_mm[context.is_recompute] += 1
                saved = num_mm[context.is_recompute] % 2 == 1
        if operator in SAVED_OPERATORS and not context.is_recompute:
            counts = tally.saved if saved else tally.recomputed
            counts[str(operator).removeprefix("aten.").removesuffix(".default")] += 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _transposed_weight_shapes(model: nn.Module, suffixes: tuple[str, ...]) -> frozenset[torch.Size]:
    """Shapes of the second operand (weight.T) of the linear layers whose names end in a suffix."""
    shapes = set()
    for name, module in model.named_modules():
        named = any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)
        if named and isinstance(module, nn.Linear):
            # A TP style multiplies by either the DTensor or its local shard.
            shapes |= {module.weight.shape[::-1], local_part(module.weight).shape[::-1]}
    return frozenset(shapes)
