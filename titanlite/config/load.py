"""Read a job from a TOML file and the command line, and collect every mistake in it."""

import contextlib
import copy
import difflib
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanlite.config import toml
from titanlite.config.checks import run_checks
from titanlite.config.degrees import DEGREES, make_parallel_dims
from titanlite.config.draft import Draft
from titanlite.config.keys import (
    FOREIGN,
    MOVED,
    RENAMED_SECTIONS,
    Key,
    job_keys,
    job_sections,
    model_keys,
    nearest_key,
    own_name,
)
from titanlite.config.model import ResolvedModel, load_config_class, load_model_spec, resolve_model
from titanlite.config.problems import REMOVE, REMOVE_OPTION, REMOVE_SECTION, explain
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError, quote, suggest

CONFIG_FILE = "job.config_file"


@dataclass
class Reading:
    """A job as read: a configuration of the valid values, and the problems of the others."""

    config: JobConfig
    problems: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    """Keys and sections of unknown value, because an invalid one was left out of `config`."""

    def draft(self, world_size: int | None = None, num_gpus: int = 0) -> Draft:
        """The job on `world_size` ranks (see make_parallel_dims); appends to `problems`.

        Checks that read a doubtful key are skipped.
        """
        config, unknown = self.config, set(self.doubtful)
        model = ResolvedModel()
        if not {"model", "model.name", "experimental", "experimental.custom_import"} & unknown:
            model = resolve_model(config, flavor_is_known="model.flavor" not in unknown)
        unknown |= model.doubtful
        self.problems += model.problems
        degrees = {"parallelism", *(f"parallelism.{key}" for key in DEGREES.values())}
        try:
            dims = make_parallel_dims(config, None if degrees & unknown else world_size, num_gpus)
        except ConfigError as error:
            self.problems += error.problems
            unknown.add("parallelism.data_parallel_shard_degree")
            dims = make_parallel_dims(config, None)
        draft = Draft(config, dims, model.sizes)
        self.problems += run_checks(draft, unknown)
        self.problems = list(dict.fromkeys(self.problems))
        return draft

    def require(self) -> JobConfig:
        """The configuration; raises ConfigError with all problems, if there are any."""
        if self.problems:
            raise ConfigError(*self.problems)
        return self.config


def parse_args(argv: Sequence[str], *, needs_file: str = "") -> JobConfig:
    """The job that the command line `argv` describes, checked as far as possible without ranks.

    `argv`, without the program's name, has `--job.config_file=F` and `--section.key=value`, which
    overrides the file's keys. Without a file, a job has all defaults, unless `needs_file` asks for
    one: an example of a command, for the error. Raises ConfigError with one line for each mistake.
    """
    return checked(read_job(argv, needs_file=needs_file))


def load_config(path: str | Path, changes: Mapping[str, Any] | None = None) -> JobConfig:
    """The job of a TOML file, checked like a command line; `changes` ("section.key" -> value)."""
    return checked(read_any(path, changes))


def read_job(argv: Sequence[str], *, needs_file: str = "") -> Reading:
    """The job that the command line `argv` (without the program's name) describes.

    `--job.config_file=F` names a TOML file; every other `--section.key=value` or
    `--section.key value` overrides it. `--help` prints the sections and exits, `--help SECTION`
    their keys. Without a file, a job has all defaults. But if `needs_file`, an example of a
    command with a file, is not empty, a file is required. If it is missing or cannot be read,
    ConfigError is raised.
    """
    for at, word in enumerate(argv):
        if word in ("-h", "--help"):
            from titanlite.config.document import help_text

            asked = "".join(one for one in argv[at + 1 :][:1] if not one.startswith("-"))
            print(help_text(_own_keys(_values_for_help(argv)), needs_file, asked))
            raise SystemExit(0)
    problems: list[str] = []
    texts = _read_arguments(argv, problems)
    for name in (name for name, _ in texts if "." not in name):
        near = f"parallelism.{DEGREES[name]}" if name in DEGREES else nearest_key(name, job_keys())
        near = near or "".join(difflib.get_close_matches(name, ["help"], cutoff=0.75))
        advice = f"did you mean --{near}?" if near else "see --help"
        raise ConfigError(f"--{toml.show_name(name)}: there is no such option; {advice}")
    files = [text for name, text in texts if name == CONFIG_FILE and text is not None]
    values: dict[str, Any] = {}
    try:
        if len(files) > 1:
            raise ConfigError(f"{CONFIG_FILE}: given {len(files)} times; give one file")
        if files:
            values = read_file(files[0])
        elif needs_file and not any(name == CONFIG_FILE for name, _ in texts):
            raise ConfigError(f"{CONFIG_FILE}: no file is given; run {needs_file}")
    except ConfigError as error:
        # Checks across keys are not possible: the file may set other keys.
        problems += error.problems
        typed = [(name, text) for name, text in texts if not name.startswith("model.")]
        _read_values({}, typed, problems)
        raise ConfigError(*dict.fromkeys(problems)) from None
    return _read_values(values, texts, problems)


def read_any(
    job: JobConfig | Mapping[str, Mapping[str, Any]] | str | Path,
    changes: Mapping[str, Any] | None = None,
) -> Reading:
    """A job in any form that functions of titanlite take, with some keys ("section.key") changed.

    A JobConfig, a dict of sections, or the path of a TOML file.
    """
    if isinstance(job, JobConfig):
        if not changes:
            return Reading(job)
        values: Any = job.model_dump(exclude_unset=True)
    elif isinstance(job, (str, Path)):
        values = read_file(str(job))
    else:
        values = copy.deepcopy(dict(job))
    for name, value in (changes or {}).items():
        toml.put(values, name, value)
    return _read_values(values, [], [])


def override(config: JobConfig, changes: Mapping[str, Any]) -> JobConfig:
    """`config` with new values for some keys ("section.key" -> value), checked again."""
    return checked(read_any(config, changes))


def checked(reading: Reading) -> JobConfig:
    """The configuration, after the checks that do not need the number of ranks."""
    if reading.config.parallelism.data_parallel_shard_degree == -1:
        reading.doubtful.add("parallelism.data_parallel_shard_degree")
    reading.draft()
    return reading.require()


def _read_values(
    values: dict[str, Any], texts: Sequence[tuple[str, str | None]], problems: list[str]
) -> Reading:
    """The job with the valid values, and the problems of the others, appended to `problems`.

    Keys and sections with an invalid value are doubtful, and so are those that an unknown name may
    have meant.
    """
    doubtful: set[str] = set()
    keys = job_keys()
    _take_moved(values, problems)
    texts = [(own_name(name), text) for name, text in texts]
    for name, text in texts:
        if name in keys:
            _put_text(values, keys[name], text, problems)
        elif not name.startswith("model."):
            problems.append(_unknown(name, keys, None, doubtful).replace(REMOVE, REMOVE_OPTION))
    own_keys = _own_keys(values)
    for name, text in texts:
        if name in own_keys:
            _put_text(values, own_keys[name], text, problems)
        elif name.startswith("model.") and name not in keys:
            toml.put(values, name, text)  # the model refuses it by name
    try:
        config = JobConfig.model_validate(values)
    except ValidationError as error:
        typed = {name for name, _ in texts}
        wrong: dict[str, None] = {}
        for found in error.errors():
            name, depth = _locate(found)
            # The first error explains a value; each item of a list has its own.
            if name not in wrong or depth:
                line = _line(name, found, values, depth, doubtful)
                problems.append(line.replace(REMOVE, REMOVE_OPTION) if name in typed else line)
            wrong[name] = None
        for name in wrong:
            toml.drop(values, name)
        config = JobConfig.model_validate(values)
    return Reading(config, problems, doubtful)


def _take_moved(values: dict[str, Any], problems: list[str]) -> None:
    """Put what has a name of TorchTitan 0.3 under its name here."""
    for new in MOVED:
        if not toml.has(values, new):
            continue
        *sections, leaf = new.split(".")
        given = functools.reduce(operator.getitem, sections, values).pop(leaf)
        for key, value in given.items() if isinstance(given, dict) else [("", given)]:
            own = own_name(f"{new}.{key}".removesuffix("."))
            if toml.has(values, own):
                problems.append(f"{own}: is given here, and as {new}; remove one")
            else:
                toml.put(values, own, value)


def _own_keys(values: Mapping[str, Any]) -> dict[str, Key]:
    """The keys of the model's own configuration; empty if the model cannot be found."""
    asked = {
        section: {key: found for key in names if isinstance(found := given.get(key), str)}
        for section, names in (("model", ("name",)), ("experimental", ("custom_import",)))
        if isinstance(given := values.get(section, {}), dict)
    }
    try:
        return model_keys(load_config_class(load_model_spec(JobConfig.model_validate(asked))))
    except ConfigError:
        return {}


def _values_for_help(argv: Sequence[str]) -> dict[str, Any]:
    """The values that can be read: they may name a user's model, whose keys --help lists too."""
    values: dict[str, Any] = {}
    texts = _read_arguments([word for word in argv if word not in ("--help", "-h")], [])
    for name, text in texts:
        if name == CONFIG_FILE and text is not None:
            with contextlib.suppress(ConfigError):
                values = read_file(text)
    for name, text in texts:
        toml.put(values, name, text)
    return values


def _read_arguments(argv: Sequence[str], problems: list[str]) -> list[tuple[str, str | None]]:
    """(key, text) for each option, in order; text is None for an option without a value."""
    found: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or not name:
            option = f"--{CONFIG_FILE}={word}" if word.endswith(".toml") else "--section.key=value"
            problems.append(f"{quote(word)}: is not an option; write {option}")
        elif equals:
            found.append((name, text))
        elif rest and not rest[0].startswith("--"):
            found.append((name, rest.pop(0)))
        else:
            found.append((name, None))
    return found


def read_file(path: str) -> dict[str, Any]:
    """The tables of a TOML file; raises ConfigError if it cannot be read or is not TOML."""
    text = ""
    try:
        if not path:
            raise FileNotFoundError
        text = Path(path).read_bytes().decode("utf-8-sig")
        return toml.parse_toml(text)
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except IsADirectoryError:
        wrong = "is a folder; give a TOML file"
    except FileNotFoundError:
        beside = map(str, Path(path).parent.glob("*.toml"))
        wrong = f"does not exist; {suggest(str(path), beside, 'give a TOML file', quote)}"
    except PermissionError:
        wrong = "cannot be read (permission denied); change its permissions"
    except OSError as error:
        wrong = f"cannot be read ({error.strerror}); give a TOML file"
    except toml.TOML_ERRORS as error:
        wrong = _toml_error(error, text)
    raise ConfigError(f"{CONFIG_FILE}: {quote(path)} {wrong}")


def _toml_error(error: Exception, text: str) -> str:
    """The mistake and its line: the parser's, or the last line if the text ends too early."""
    if isinstance(error, RecursionError):
        return "is nested too deeply; give a flat TOML file"
    what, _, place = str(error).partition(" (at ")
    lines = text.split("\n")
    match = re.match(r"line (\d+)", place)
    number = int(match[1]) if match else text.rstrip().count("\n") + 1
    if opened := toml.unclosed_list(lines[:number], lines[number:]):
        opening = quote(lines[opened - 1].strip())
        return f"line {opened} is not TOML: {opening} opens a list that is not closed; add the ]"
    if re.search(r"(?m)^(import|from) \w", text) and not re.search(r"(?m)^\[\w", text):
        return "is a Python program, not TOML; run it with `python`, and give a TOML file here"
    what = what[:1].lower() + what[1:]
    hint = ", with text in quotes" if what == "invalid value" else ""
    return f"line {number} is not TOML: {what}; correct {quote(lines[number - 1].strip())}{hint}"


def _locate(error: Any) -> tuple[str, int]:
    """The key or section of pydantic's `error`, and the depth in its list."""
    known = job_keys().keys() | job_sections().keys()
    path = [str(part) for part in error["loc"]]
    depth = 0
    while error["type"] != "extra_forbidden" and ".".join(path) not in known:
        path.pop()
        depth += 1
    return ".".join(path), depth


def _line(name: str, error: Any, values: Mapping[str, Any], depth: int, doubtful: set[str]) -> str:
    if name in job_keys():
        doubtful.add(name)
        value = functools.reduce(operator.getitem, name.split("."), values)
        return explain(job_keys()[name], error, value, depth)
    if name in job_sections():
        doubtful.add(name)
        shown = toml.show(error["input"])
        return f"{name}: {shown} is not a section; write [{name}] above its keys"
    return _unknown(name, job_keys(), error["input"], doubtful)


def _unknown(name: str, keys: Mapping[str, Key], value: Any, doubtful: set[str]) -> str:
    """The message for an unknown name; the key that it may have meant becomes doubtful."""
    sections = job_sections()
    shown = toml.show_name(name)
    if name in FOREIGN:
        return f"{shown}: {FOREIGN[name]}; {REMOVE_SECTION if type(value) is dict else REMOVE}"
    if isinstance(value, dict):
        match = [RENAMED_SECTIONS[name]] if name in RENAMED_SECTIONS else []
        match = match or difflib.get_close_matches(name, sections, n=1)
        match = match or [other for other in sections if other.rpartition(".")[2] == name]
        doubtful.update(match[:1])
        advice = f"did you mean [{match[0]}]?" if match else "see --help for all sections"
        return f"{shown}: there is no such section; {advice}"
    meant = nearest_key(name, keys)
    if meant:
        doubtful.add(meant)
        return f"{shown}: there is no such key; did you mean {meant}?"
    section = name.rpartition(".")[0]
    place = f"--help {section}" if section in sections else "--help"
    return f"{shown}: there is no such key; see {place}"


def _put_text(values: dict[str, Any], key: Key, text: str | None, problems: list[str]) -> None:
    if text is not None:
        toml.put(values, key.name, key.read(text))
    elif key.type is bool:
        toml.put(values, key.name, True)
    else:
        problems.append(f"{key.name}: has no value; write --{key.name}=value")
