"""The schema as a table of keys: describe a key's legal values in words, and parse text into one.

Error messages, the command line, --help and docs/configuration.md all read the schema through
`Key`.
"""

import contextlib
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from titanlite.config.schema import JobConfig
from titanlite.config.toml import TOML_ERRORS, parse_toml
from titanlite.errors import one_of, quote
from titanlite.fields import INERT, NOT_YET, Section, Wanted

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "list"}

# Names from earlier TorchTitan releases that a search by spelling would not find.
RENAMED = {
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "validation.enabled": "validation.enable",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "experimental.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
}
RENAMED_SECTIONS = {
    "float8": "quantize.linear.float8",
    "quantize.dense": "quantize.linear",
    "quantize.moe": "quantize.grouped_mm",
}

# What TorchTitan 0.3 has moved: a key or section -> its name here, which is that of 0.2.
MOVED = {
    "dump_folder": "job.dump_folder",
    "hf_assets_path": "model.hf_assets_path",
    "debug.print_config": "job.print_config",
    "debug.save_config_file": "job.save_config_file",
    "dataloader.dataset": "training.dataset",
    "dataloader.dataset_path": "training.dataset_path",
    "dataloader": "training.dataloader",
    "validator.dataloader": "validation",
    "validator": "validation",
    "profiler": "profiling",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    ),
}

# Keys and sections in TorchTitan job files that are for one of its models, or were for its tests.
FOREIGN = {
    **dict.fromkeys(
        (
            "encoder",
            "inference",
            "training.classifier_free_guidance_prob",
            "training.img_size",
            "training.test_mode",
            "validation.enable_classifier_free_guidance",
            "validation.classifier_free_guidance_scale",
            "validation.denoising_steps",
            "validation.save_img_count",
            "validation.save_img_folder",
            "validation.all_timesteps",
        ),
        "belongs to TorchTitan's model flux, which titanlite does not have",
    ),
    "job.use_for_integration_test": "was for TorchTitan's own tests",
    **dict.fromkeys(
        ("checkpoint.initial_load_dequantize", "parallelism.enable_compiled_autograd"),
        "asks for a TorchTitan feature that titanlite does not have",
    ),
}


@dataclass(frozen=True)
class Key:
    """One key: its full name ("training.steps"), purpose, default, type and limits."""

    name: str
    text: str
    default: Any
    type: type  # one of KINDS, or object for another type in a user's model
    choices: tuple[str, ...] = ()
    limits: tuple[Any, ...] = ()
    wanted: Wanted | None = None
    optional: bool = False  # may be left unset
    not_yet: bool = False
    inert: bool = False
    torchtitan: Any = ...  # TorchTitan's default if it differs, OWN if it has no such key
    lacking: tuple[str, ...] = ()  # values that TorchTitan accepts and titanlite does not
    instead: str = ""  # advice for a key that titanlite does not have
    item: "Key | None" = None  # the type of a list's items

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_live(self) -> bool:
        """Whether the key has an effect in titanlite."""
        return not self.not_yet and not self.inert

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    def type_name(self) -> str:
        """The type and its limits in brief, for example "int >= 1"."""
        if self.choices:
            return " | ".join(map(quote, self.choices))
        if self.item is not None:
            return f"list of {self.item.type_name()}"
        if self.wanted:
            return self.wanted.brief
        names = {bool: "bool", int: "int", float: "float", str: "string", object: "value"}
        limits = (f"{sign} {bound}" for sign, bound in self._bounds() if bound != 2**63 - 1)
        return f"{names[self.type]} {', '.join(limits)}".rstrip()

    def describe(self) -> str:
        """The legal values in words, for example "an integer of at least 1"."""
        if self.wanted:
            return self.wanted.text
        if self.choices:
            return one_of(map(quote, self.choices))
        if self.item is not None:
            return f"a list of {self.item.describe_many()}"
        words = {
            bool: "true or false",
            int: "an integer",
            float: "a number",
            str: "a string",
            object: "a value of its type",
        }
        if self.type is str and any(isinstance(one, annotated_types.MinLen) for one in self.limits):
            return "a string that is not empty"
        signs = {">=": "of at least", ">": "above", "<=": "at most", "<": "below"}
        bounds = " and ".join(f"{signs[sign]} {bound}" for sign, bound in self._bounds())
        return f"{words[self.type]} {bounds}".rstrip()

    def describe_many(self) -> str:
        """The plural, for the items of a list: "integers", "strings"."""
        if self.choices:
            return " and ".join(map(quote, self.choices))
        if self.item is not None:
            return f"lists of {self.item.describe_many()}"
        return f"{KINDS.get(self.type, 'value')}s"

    def _bounds(self) -> Iterator[tuple[str, Any]]:
        """The limits of a number, the lower one first."""
        for limit in self.limits:
            if isinstance(limit, annotated_types.Gt):
                bound: Any = limit.gt
                yield (">=", bound + 1) if self.type is int else (">", bound)
            elif isinstance(limit, annotated_types.Ge):
                yield ">=", limit.ge
        for limit in self.limits:
            if isinstance(limit, annotated_types.Lt):
                yield "<", limit.lt
            elif isinstance(limit, annotated_types.Le):
                yield "<=", limit.le

    def read(self, text: str) -> Any:
        """Parse the text of a command-line option into a value.

        Text that cannot be parsed is returned as a string, which the schema refuses.
        """
        if self.optional and text == "none":
            return None
        if self.type is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        if self.type is object and text.lstrip().startswith("{"):
            with contextlib.suppress(*TOML_ERRORS):
                return parse_toml(f"table = {text}")["table"]
        if self.item is not None:
            if text.lstrip().startswith("["):
                try:
                    return parse_toml(f"list = {text}")["list"]
                except TOML_ERRORS:  # an unquoted word; shells eat quotes
                    text = text.strip().removeprefix("[").removesuffix("]")
            parts = [part.strip().strip("\"'") for part in text.split(",")]
            return [self.item.read(part) for part in parts if part]
        if self.type in (int, float):
            for convert in (int, float):
                with contextlib.suppress(ValueError):
                    return convert(text)
        return text


def make_key(name: str, field: FieldInfo) -> Key:
    """The Key for a field of a pydantic model or of a model's own dataclass."""
    marks = list(field.metadata)
    base, optional = _unwrap(field.annotation, marks)
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    choices: tuple[str, ...] = ()
    item = None
    if typing.get_origin(base) is Literal:
        choices, base = typing.get_args(base), str
    elif typing.get_origin(base) in (tuple, list):
        item = make_key(name, FieldInfo.from_annotation(typing.get_args(base)[0]))
        base = tuple
    return Key(
        name=name,
        text=field.description or "",
        default=field.default,
        type=base if base in KINDS else object,
        choices=choices,
        limits=tuple(marks),
        wanted=next((mark for mark in marks if isinstance(mark, Wanted)), None),
        optional=optional,
        not_yet=NOT_YET in marks,
        inert=INERT in marks,
        torchtitan=extra.get("torchtitan", ...),
        lacking=typing.cast(tuple[str, ...], extra.get("lacking", ())),
        instead=str(extra.get("instead", "")),
        item=item,
    )


def _unwrap(annotation: Any, marks: list[Any]) -> tuple[Any, bool]:
    """The type inside Annotated and `| None`, and whether it may be None; appends to `marks`."""
    optional = False
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            annotation, *more = typing.get_args(annotation)
            for mark in more:
                marks += mark.metadata if isinstance(mark, FieldInfo) else [mark]
        elif origin in (typing.Union, types.UnionType):
            some = [a for a in typing.get_args(annotation) if a is not types.NoneType]
            if len(some) > 1:
                return object, optional
            annotation, optional = some[0], True
        else:
            return annotation, optional


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if _is_section(field.annotation):
            yield from _walk(field.annotation, f"{prefix}{name}.")


def _is_section(annotation: Any) -> typing.TypeGuard[type[Section]]:
    # In Python 3.10, tuple[str, ...] is an instance of type too.
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return is_class and issubclass(annotation, Section)


@functools.cache
def job_sections() -> dict[str, type[Section]]:
    """Full name -> section, including nested sections, in the order of the schema."""
    return {name: f.annotation for name, f in _walk(JobConfig) if _is_section(f.annotation)}


@functools.cache
def job_keys() -> dict[str, Key]:
    """Full name -> key, in the order of the schema."""
    return {n: make_key(n, f) for n, f in _walk(JobConfig) if not _is_section(f.annotation)}


@functools.cache
def field_types(config_class: Any) -> dict[str, Any]:
    """Field -> annotation, with its bounds, of a model's own configuration class."""
    return typing.get_type_hints(config_class, include_extras=True)


@functools.cache
def model_keys(config_class: Any) -> dict[str, Key]:
    """Full name -> key for the fields of a model's own configuration class."""
    hints = field_types(config_class)
    names = [field.name for field in dataclasses.fields(config_class) if field.init]
    keys = [make_key(f"model.{name}", FieldInfo.from_annotation(hints[name])) for name in names]
    return {key.name: key for key in keys}


def own_name(name: str) -> str:
    """The name here of a key or section, which TorchTitan 0.3 may have moved."""
    for new, own in MOVED.items():
        if name == new or name.startswith(f"{new}."):
            return own + name[len(new) :]
    return name


def nearest_key(name: str, known: Mapping[str, Key]) -> str | None:
    """The key that was probably meant by `name`; None if there is no good match.

    Searches for a similar key in the same section, then for the same key in another section, then
    for any similar key.
    """
    if name in RENAMED:
        return RENAMED[name]
    section, _, leaf = name.rpartition(".")
    live = [key for key in known.values() if key.is_live]
    siblings = {key.leaf: key.name for key in live if key.section == section}
    if match := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.76):
        return siblings[match[0]]
    if len(leaf) > 3 and (match := [siblings[other] for other in siblings if leaf in other]):
        return match[0]
    elsewhere = [key.name for key in live if key.leaf == leaf]
    if elsewhere:
        return difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.0)[0]
    if not siblings and (match := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
        return match[0]
    leaves = {key.leaf.replace("_", ""): key.name for key in reversed(live)}
    match = difflib.get_close_matches(leaf.replace("_", ""), leaves, n=1, cutoff=0.78)
    return leaves[match[0]] if match else None
