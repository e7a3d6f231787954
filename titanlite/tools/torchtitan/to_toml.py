"""A configuration of TorchTitan 0.3 as titanlite's TOML, with comments for what titanlite lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from titanlite.config import JobConfig
from titanlite.config.keys import own_name
from titanlite.errors import ConfigError
from titanlite.tools.torchtitan.job import TitanJob
from titanlite.tools.torchtitan.options import Options
from titanlite.tools.torchtitan.stand_ins import attribute_of, require_torchtitan, standing_in

SECTIONS = (
    *("training", "parallelism", "lr_scheduler", "checkpoint", "compile", "comm"),
    *("debug", "metrics", "profiler", "validator"),
)

Place = tuple[str, str]
Keys = dict[Place, Any]
Lacking = dict[Place, str]


def import_job(options: Options) -> str:
    """The TOML of a job. Raises ConfigError."""
    require_torchtitan()
    with standing_in():
        config = TitanJob(options.name, tuple(options.titan)).read()
        lacking: Lacking = {}
        keys = dict(_keys(config, lacking))
        usual = JobConfig().model_dump()
        # Not a key of titanlite, whose models have it whenever they have tensor parallelism.
        usual["parallelism"]["enable_sequence_parallel"] = True
        own: Keys = {}
        for (section, key), value in keys.items():
            if section == "model" or key in usual[section]:
                known = usual[section].get(key)
                known = list(known) if isinstance(known, tuple) else known
                if value is not None and value != known:
                    own[section, key] = value
            elif value not in (None, False, [], {}):
                lacking[section, key] = f"{key} = {_toml(value)}: titanlite lacks it"
        _leave_out_refused(own, lacking)
    return _written(options.name, own, lacking)


def _keys(config: Any, lacking: Lacking) -> Iterator[tuple[Place, Any]]:
    """All keys of a configuration, in titanlite's sections."""
    spec = attribute_of(config, "model_spec")
    yield from _model(spec, lacking)
    for section in SECTIONS:
        part = attribute_of(config, section)
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, str | int | float | bool | list | None):
                own_section, _, key = own_name(f"{section}.{field.name}").rpartition(".")
                yield (own_section, key), value
    for key in ("dataset", "dataset_path"):
        yield ("training", key), getattr(config.dataloader, key, None)
    kind = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    modes = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
    yield ("activation_checkpoint", "mode"), modes.get(kind, "none")
    if kind == "SelectiveAC":
        yield ("activation_checkpoint", "selective_ac_option"), "op"
    first, *others = attribute_of(config.optimizer, "param_groups")
    yield ("optimizer", "name"), first.optimizer_name
    yield ("optimizer", "implementation"), config.optimizer.implementation
    given = dict(first.optimizer_kwargs)
    betas = given.pop("betas", ())
    for key, value in {**given, **dict(zip(("beta1", "beta2"), betas, strict=False))}.items():
        yield ("optimizer", key), value
    for number, group in enumerate(others):
        text = f"{group.optimizer_name} for parameters that match {group.pattern!r}"
        lacking["optimizer", f"group {number + 1}"] = f"{text}: titanlite has one optimizer"


def _model(spec: Any, lacking: Lacking) -> Iterator[tuple[Place, Any]]:
    """The sizes of a Llama 3; another model has to be registered."""
    model = spec.model
    if spec.name.partition("/")[0] != "llama3":
        lacking["model", "name"] = (
            f"name = {_toml(spec.name)}, flavor = {_toml(spec.flavor)}: titanlite has no such "
            'model; register your own, or take one of transformers by name = "hf"'
        )
        return
    attention, hidden = model.layers[0].attention, model.layers[0].feed_forward.w1.out_features
    rope = attention.rope
    sizes = {
        "name": "llama3",
        "dim": model.dim,
        "n_layers": len(model.layers),
        "n_heads": attention.n_heads,
        "n_kv_heads": attention.n_kv_heads,
        "vocab_size": model.vocab_size,
        "tie_embeddings": model.enable_weight_tying,
        "rope_theta": float(rope.theta),
        "rope_scaling_factor": rope.scaling_factor if rope.scaling == "llama" else 1.0,
        # The hidden width itself: 8/3 of the width, times this, rounded up to a multiple of 1.
        "multiple_of": hidden,
    }
    yield from ((("model", key), value) for key, value in sizes.items())


def _leave_out_refused(own: Keys, lacking: Lacking) -> None:
    """Move what titanlite refuses to `lacking`, with its reason."""
    while True:
        # Data may lie elsewhere, and a model that titanlite lacks may be registered.
        job: dict[str, dict[str, Any]] = {"model": {"name": "llama3"}}
        for (section, key), value in own.items():
            job.setdefault(section, {})[key] = "synthetic" if key == "dataset" else value
        try:
            JobConfig.from_dict(job)
            return
        except ConfigError as error:
            refused = {}
            for problem in error.problems:
                section, _, rest = problem.partition(".")
                refused[section, rest.partition(":")[0]] = problem
            moved = [place for place in refused if place in own]
            for place in moved:
                value = _toml(own.pop(place))
                lacking[place] = f"{place[1]} = {value}: {refused[place].partition(': ')[2]}"
            if not moved:
                lacking["job", ""] = "; ".join(error.problems)
                return


def _written(name: str, own: Keys, lacking: Mapping[Place, str]) -> str:
    lines = [f"# torchtitan:{name}, without what titanlite does by default"]
    for section in dict.fromkeys([section for section, _ in (*own, *lacking)]):
        lines += ["", f"[{section}]"]
        lines += [f"{k} = {_toml(value)}" for (s, k), value in own.items() if s == section]
        lines += [f"# {text}" for (s, _), text in lacking.items() if s == section]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML has it, which JSON nearly has too."""
    return "none" if value is None else json.dumps(value)
