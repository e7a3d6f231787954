"""A configuration of TorchTitan by name, with its own overrides, and as it is verified.

A name is a function of a `config_registry`, such as llama3_debugmodel, or one of the user's own, as
my_package.configs:my_job. TorchTitan's ConfigManager parses and checks all that follows it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.errors import ConfigError, quote, suggest
from titanlite.tools.torchtitan.stand_ins import attribute_of

# The mesh axes of TorchTitan, outermost first, by the key that has their degree.
AXES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
SEQ_LEN, LOCAL_BATCH = "training.seq_len", "training.local_batch_size"
# Of the chunks that a FlexAttention's block mask has; a rank of cp has two of them.
BLOCK = 128
EVERY_IGNORED = 7
FUSED = "RowParallelLinear"
"""A module whose collective is part of its product; it needs the backend spmd_types."""
MUON = "DistMuon"
OWN_DTYPE = "its own"
"""In place of a dtype, for a job that keeps those of its configuration."""


@dataclass
class TitanPlan:
    """A configuration as the ranks run it."""

    config: Any
    degrees: dict[str, int]
    ranks: int | None
    """The number of ranks that was asked for."""
    smaller: list[str] = field(default_factory=list)
    """What was made smaller, and how small it is."""
    is_other_backend: bool = False
    """Whether the SPMD backend is not the job's, since this torch lacks what that needs."""

    @property
    def balances(self) -> bool:
        """Whether the ranks of cp each have two chunks of a sequence."""
        return bool(self.config.parallelism.context_parallel_load_balancer == "headtail")


@dataclass(frozen=True)
class TitanJob:
    """A configuration: its name, TorchTitan's own options, and the dtype it is verified in."""

    name: str
    options: tuple[str, ...] = ()
    dtype: str = "float64"
    is_full: bool = False
    """Whether it keeps its own length, batch and layers."""

    def read(self) -> Any:
        """A Trainer.Config as TorchTitan reads and checks it. Raises ConfigError."""
        module, function = self._place()
        from torchtitan.config import ConfigManager

        words = ["--module", module, "--config", function, *self.options]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                return ConfigManager().parse_args(words)
        except SystemExit as stop:
            said = printed.getvalue()
            said = _what_tyro_says(said) if stop.code else said
            raise ConfigError(f"{self.name}: {said}") from None
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self.name}: {text}") from error

    def _place(self) -> tuple[str, str]:
        """The module and the function of the name. Raises ConfigError."""
        module, colon, function = self.name.rpartition(":")
        if colon:
            sys.path[:0] = [path for path in (os.getcwd(),) if path not in sys.path]
            try:
                found = importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(f"{self.name}: {error}; give PACKAGE.MODULE:FUNCTION") from error
            if not callable(getattr(found, function, None)):
                names = [name for name, value in vars(found).items() if callable(value)]
                advice = suggest(function, names, "give one that it has")
                raise ConfigError(f"{self.name}: {module} has no function {function}; {advice}")
            return module, function
        registries = dict(_registries())
        for model, names in registries.items():
            if self.name in names:
                _import_registry(model, self.name)
                return model, self.name
        every = [name for names in registries.values() for name in names]
        raise ConfigError(
            f"{self.name}: no config_registry of torchtitan has it; "
            + suggest(self.name, every, "one of your own is PACKAGE.MODULE:FUNCTION")
        )

    def is_given(self, key: str) -> bool:
        """Whether the options set a key."""
        words = (word.partition("=")[0].lstrip("-").replace("-", "_") for word in self.options)
        return key in words

    def plan(self, ranks: int | None = None) -> TitanPlan:
        """The configuration as the ranks run it: small, in one dtype, on their own data.

        A shard degree of -1 is as small as it can be, or fits `ranks`. Raises ConfigError.
        """
        config = self.read()
        if not hasattr(config.model_spec.model, "vocab_size"):
            raise ConfigError(f"{self.name}: its model takes no tokens; give a language model")
        training, parallelism = config.training, config.parallelism
        degrees = self._degrees(parallelism, ranks)
        plan = TitanPlan(config, degrees, ranks)
        if self.dtype == "float32" and FUSED in kernels_of(plan):
            raise ConfigError(
                f"--dtype: {FUSED} calls torch.mm with out_dtype, for which a CPU has no kernel; "
                "give float64"
            )
        if attribute_of(parallelism, "spmd_backend") == "spmd_types" and not _takes_spmd_types():
            if self.is_given("parallelism.spmd_backend") or FUSED in kernels_of(plan):
                raise ConfigError(
                    "parallelism.spmd_backend: FSDP of this torch takes no parameters of "
                    'spmd_types; take a torch from 2.14 on, or "partial_dtensor" if the model can'
                )
            parallelism.spmd_backend, plan.is_other_backend = "partial_dtensor", True
        replicas = degrees["dp_replicate"] * degrees["dp_shard"]
        accumulates = 1
        if training.global_batch_size > 0:
            accumulates = training.global_batch_size // (training.local_batch_size * replicas)
        if not self.is_full:
            self._shrink(plan)
            accumulates = min(2, accumulates)
        training.global_batch_size = training.local_batch_size * replicas * max(1, accumulates)
        self._settle(config)
        return plan

    @staticmethod
    def _degrees(parallelism: Any, ranks: int | None) -> dict[str, int]:
        found = {axis: int(attribute_of(parallelism, key)) for axis, key in AXES.items()}
        if found["dp_shard"] < 0:
            found["dp_shard"] = 1
            others, ep = math.prod(found.values()), parallelism.expert_parallel_degree
            least = ep // math.gcd(ep, found["cp"] * found["tp"])
            found["dp_shard"] = least if ranks is None else max(1, ranks // others)
            parallelism.data_parallel_shard_degree = found["dp_shard"]
        size = math.prod(found.values())
        if ranks is not None and size != ranks:
            raise ConfigError(f"--ranks: {ranks} ranks do not fit the degrees, which need {size}")
        return found

    def _shrink(self, plan: TitanPlan) -> None:
        training, model = plan.config.training, plan.config.model_spec.model
        degrees = plan.degrees
        if not self.is_given(SEQ_LEN):
            needed = 2 * degrees["cp"] * BLOCK if degrees["cp"] > 1 else 64
            training.seq_len = min(training.seq_len, math.lcm(needed, 8 * degrees["tp"]))
            plan.smaller.append(f"{SEQ_LEN} {training.seq_len}")
        if not self.is_given(LOCAL_BATCH):
            size = plan.config.parallelism.pipeline_parallel_microbatch_size
            stages = 2 * degrees["pp"] if degrees["pp"] > 1 else 1
            training.local_batch_size = max(2, stages * size)
            plan.smaller.append(f"{LOCAL_BATCH} {training.local_batch_size}")
        number = len(getattr(model, "layers", ()))
        _fewer_layers(model, 2 * degrees["pp"])
        if len(getattr(model, "layers", ())) < number:
            plan.smaller.append(f"{len(model.layers)} of {number} layers")

    def reference(self, plan: TitanPlan) -> Any:
        """The same on one rank: the plain model, which is not parallelized, and the whole batch."""
        config = self.read()
        training, small = config.training, plan.config
        for key in (*AXES.values(), "expert_parallel_degree"):
            attribute_of(config.parallelism, key)
            setattr(config.parallelism, key, 1)
        # Of the backends the one that leaves plain tensors as they are, if the model takes it.
        if FUSED not in kernels_of(plan):
            config.parallelism.spmd_backend = "partial_dtensor"
        training.seq_len = small.training.seq_len
        training.local_batch_size = small.training.global_batch_size
        training.global_batch_size = -1
        attribute_of(config.model_spec, "parallelize_fn")
        config.model_spec.parallelize_fn = _not_at_all
        config.compile.enable = False
        self._settle(config)
        if not self.is_full:
            _fewer_layers(config.model_spec.model, 2 * plan.degrees["pp"])
        return config

    def _settle(self, config: Any) -> None:
        """What both have in common."""
        training = config.training
        training.disable_cuda_graphs = True
        if self.dtype != OWN_DTYPE:
            training.dtype = self.dtype
            training.mixed_precision_param = training.mixed_precision_reduce = self.dtype
        config.debug.deterministic = False
        config.debug.save_config_file = None
        config.metrics.log_freq = 1
        config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
        config.checkpoint.enable = config.validator.enable = False
        config.dataloader = config.tokenizer = NoData()

    def batches(self, plan: TitanPlan, steps: int) -> list[dict[str, Tensor]]:
        """The global batch of each step, from one seed.

        Rows have two documents of different lengths, and every seventh label of a document's first
        half is ignored, so that ranks have different numbers of targets.
        """
        training = plan.config.training
        rows, length = training.global_batch_size, training.seq_len
        vocabulary = attribute_of(plan.config.model_spec.model, "vocab_size")
        generator = torch.Generator().manual_seed(1)
        found = []
        for _ in range(steps):
            tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
            begins = torch.arange(rows)[:, None] * 7 % (length // 2) + length // 4
            place = torch.arange(length)[None].expand(rows, -1)
            labels = tokens[:, 1:].clone()
            labels[(place < begins) & (place % EVERY_IGNORED == 0)] = -100
            # What a rank computes of; the ranks of cp find their own part of the rest.
            batch = {"cells": torch.arange(rows * length).view(rows, length)}
            batch |= {"input": tokens[:, :-1].clone(), "labels": labels}
            batch["positions"] = torch.where(place < begins, place, place - begins)
            found.append(batch)
        return found


def kernels_of(plan: TitanPlan) -> Iterator[str]:
    """The names of the model's modules, and of an optimizer, whose kernels have stand-ins."""
    from torchtitan.models.common import attention, dist_gemm, moe

    for owner, name in (
        (attention, "FlexAttention"),
        (attention, "VarlenAttention"),
        (moe, "GroupedExperts"),
        (dist_gemm, FUSED),
    ):
        if any(plan.config.model_spec.model.traverse(attribute_of(owner, name).Config)):
            yield name
    if any(group.optimizer_name == MUON for group in plan.config.optimizer.param_groups):
        yield MUON


def _fewer_layers(model: Any, least: int) -> None:
    """Keep the first layer of each kind, and as many others as are needed."""
    layers, kinds, kept = getattr(model, "layers", []), set(), []
    for number, layer in enumerate(layers):
        kind = tuple((one.name, type(getattr(layer, one.name))) for one in fields(layer))
        if kind not in kinds:
            kinds.add(kind)
            kept.append(number)
    others = [number for number in range(len(layers)) if number not in kept]
    kept = sorted(kept + others[: max(0, least - len(kept))])
    model.layers = [layers[number] for number in kept]


def _not_at_all(model: Any, **_: Any) -> Any:
    return model


class NoData:
    """In place of the configurations of a data loader and a tokenizer."""

    def build(self, **_: Any) -> NoData:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {}


def _registries() -> Iterator[tuple[str, list[str]]]:
    """Each model of TorchTitan, and the functions of its config_registry, by their text."""
    spec = importlib.util.find_spec("torchtitan")
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("models/*/config_registry.py")):
            yield file.parent.name, re.findall(r"^def ([a-z]\w*)\(", file.read_text(), re.MULTILINE)


def _import_registry(model: str, name: str) -> None:
    """Raises ConfigError if a model of TorchTitan needs a package that is not installed."""
    try:
        importlib.import_module(f"torchtitan.models.{model}.config_registry")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: the code of {model} imports {quote(str(error.name))}, which is not "
            "installed; install its package"
        ) from error


def _takes_spmd_types() -> bool:
    """Whether FSDP takes parameters that spmd_types has annotated; torch 2.13 does not."""
    module = importlib.util.find_spec("torch.distributed.fsdp._fully_shard._fsdp_param")
    return module is not None and "spmd_types" in Path(str(module.origin)).read_text()


def _what_tyro_says(text: str) -> str:
    """The message in a box that tyro has printed, on one line."""
    parts = re.split(
        r"^[\s\u2500-\u257f]*[-\u2500]{9,}[\s\u2500-\u257f]*$", text, flags=re.MULTILINE
    )
    words = [" ".join(re.sub(r"[\u2500-\u257f]", " ", part).split()) for part in parts]
    said = words[min(1, len(words) - 1)].partition(" Available subcommands")[0]
    meant = [re.search(r"--[\w.-]+", word) for word in words if word.startswith("Perhaps")]
    return said + "".join(f"; did you mean {found[0]}?" for found in meant if found)
