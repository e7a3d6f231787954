"""The building blocks of the schema: key(), field types, marks for missing features, and checks."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    Strict,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

T = TypeVar("T")


class NotYetMark:
    """Marks a key whose feature titanlite does not have: only the default is accepted."""


class InertMark:
    """Marks a key without effect: any value is accepted.

    It configures a feature that another key turns on, and that other key is refused.
    """


@dataclass(frozen=True)
class Wanted:
    """Describes the legal values of a key whose type alone does not: in full, and in brief."""

    text: str
    brief: str


def _count_or_minus_one(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError
    return value


def _in_order(value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if any(b <= a for (a, _), (b, _) in itertools.pairwise(value)):
        raise ValueError
    # A step of the same size changes nothing: a list of all steps is as short as can be.
    before = [None, *(size for _, size in value)]
    return tuple(one for one, size in zip(value, before, strict=False) if one[1] != size)


NOT_YET = NotYetMark()
NotYet = Annotated[T, NOT_YET]
INERT = InertMark()
Inert = Annotated[T, INERT]
Name = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "float64", "bfloat16"]
Values = Annotated[tuple[T, ...], Strict(False)]  # from a TOML list; a tuple, to stay frozen
Multipliers = Annotated[
    dict[str, Annotated[float, Field(gt=0)]],
    Wanted(
        'a table from quoted patterns to numbers above 0, such as { "output.*" = 0.5 }',
        brief="table from pattern to float > 0",
    ),
]
CountOrMinusOne = Annotated[
    int,
    AfterValidator(_count_or_minus_one),
    Wanted("an integer of at least 1, or -1", brief="int >= 1, or -1"),
]
BatchSizes = Annotated[
    tuple[Annotated[tuple[PositiveInt, PositiveInt], Strict(False)], ...],
    Strict(False),
    AfterValidator(_in_order),
    Wanted(
        "a list of [step, sequences] with ascending steps, such as [[1001, 64]]",
        brief="list of [step, sequences]",
    ),
]
BlockIntervalOrOp = Annotated[
    str,
    Field(pattern="^(op|0*[1-9][0-9]*)$"),
    Wanted('"op", or a positive integer as a string such as "2"', brief='"op" | "1" | "2" | ...'),
]

OWN = "titanlite's own"


def key(
    default: Any,
    text: str,
    *,
    torchtitan: Any = ...,
    lacking: tuple[str, ...] = (),
    instead: str = "",
    **limits: Any,
) -> Any:
    """A key with its default, one line of text, and the limits that pydantic's Field takes.

    `torchtitan` is TorchTitan's default if it differs, or OWN if TorchTitan has no such key.
    `lacking` are values that TorchTitan accepts and titanlite does not. `instead` is the advice for
    a key that titanlite does not have, if there is more to do than to remove it.
    """
    extra = {"torchtitan": torchtitan, "lacking": lacking, "instead": instead}
    return Field(default, description=text, json_schema_extra=extra, **limits)


def extra_key(default: Any, text: str, **limits: Any) -> Any:
    """A key that TorchTitan does not have."""
    return key(default, text, torchtitan=OWN, **limits)


class Section(BaseModel):
    """One table of the job file: immutable, no other keys, no conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_what_titanlite_lacks(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if NOT_YET in field.metadata:
            extra = field.json_schema_extra
            theirs = extra["torchtitan"] if isinstance(extra, dict) else ...
            if value not in (field.default, theirs):
                raise PydanticCustomError("not_yet", "titanlite does not have this feature")
        return value


MODEL = "the model"
"""The name of the model's own configuration in `reads`."""

Job = TypeVar("Job", contravariant=True)


@dataclass(frozen=True)
class Check(Generic[Job]):
    """A check of keys against each other, with the keys and sections that it reads."""

    problems: Callable[[Job], Iterator[str]]
    reads: tuple[str, ...]

    @property
    def purpose(self) -> str:
        """What the check requires, for docs/configuration.md."""
        return self.problems.__doc__ or ""


def reads(*names: str) -> Callable[[Callable[[Job], Iterator[str]]], Check[Job]]:
    """Make a check of a function, which yields problems of a job (titanlite/config/draft.py).

    It is skipped while one of `names`, keys and sections, has an invalid or unknown value.
    """
    return lambda problems: Check(problems, names)
