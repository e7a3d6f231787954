"""Text as token streams: tokenized once, kept in files, and memory-mapped by every rank.

The tokens of a folder of text are kept in its folder `.titanlite`, or if that cannot be written,
in the dump folder of the job. One process writes them while the others wait for its lock, and they
appear by a rename, so they are either complete or not there. They are written anew if a file's
name, size or time of modification has changed.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titanlite.data.text.chat import manual_conversations, marked_tokens, read_conversations
from titanlite.data.text.documents import Document, python_manual, read_documents
from titanlite.data.text.packed import Stream
from titanlite.data.text.tokenizer import Messages, Tokenizer
from titanlite.errors import ConfigError
from titanlite.files import hold, read_bytes

TRAIN, HELD_OUT = "train", "held_out"
PARTS = (TRAIN, HELD_OUT)
FOLDER = ".titanlite"
FORMAT = 1
# In a larger set one document in HOLD_OUT_EVERY is held out, in a smaller one the end of each.
MANY_DOCUMENTS, HOLD_OUT_EVERY, HOLD_OUT_SHARE = 400, 50, 0.1
# Texts are tokenized in batches of this many characters, on all cores.
BATCH_CHARACTERS = 1 << 21
MOST_ABOUT_BYTES = 256 << 20

# A piece of text: the number of its document, whether it is held out, and the text.
Piece = tuple[int, bool, str]


@dataclass
class CorpusPart:
    """The tokens of one part of a corpus, [N] of an unsigned dtype, and counts of its text."""

    tokens: np.ndarray
    num_bytes: int
    num_documents: int
    sha256: str


def manual_corpus(tokenizer: Tokenizer) -> dict[str, CorpusPart]:
    """The parts of Python's manual, tokenized in memory."""
    pieces = ((number, held, text) for number, (text, held) in enumerate(python_manual()))
    sinks = {name: _Sink() for name in PARTS}
    _encode(pieces, tokenizer, sinks)
    return {name: sink.part() for name, sink in sinks.items()}


def text_corpus(
    files: Sequence[Path],
    path: str,
    path_key: str,
    selection: str,
    tokenizer: Tokenizer,
    dump_folder: str,
) -> dict[str, CorpusPart]:
    """The parts of the text of `files`, memory-mapped; tokenizes it if that has not been done.

    The tokens are kept beside `path`; `selection` says which of its files are read.
    """

    def build(folder: Path, report: Callable[[int], None]) -> dict[str, Any]:
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        first = itertools.islice(read_documents(files, path_key), MANY_DOCUMENTS)
        lengths = [sum(map(len, document)) for document in first]
        documents = read_documents(files, path_key, report)
        is_small = len(lengths) < MANY_DOCUMENTS
        pieces = _ends_held_out(documents, lengths) if is_small else _some_held_out(documents)
        with _file_sinks(folder, dtype) as sinks:
            _encode(pieces, tokenizer, sinks)
        return _about(sinks, dtype)

    name = _name("text", tokenizer.identity, selection)
    return _mapped_parts(*_kept(path, path_key, files, name, dump_folder, build, "tokenizing"))


def _mapped_parts(folder: Path, about: Mapping[str, Any]) -> dict[str, CorpusPart]:
    parts = {}
    for part in PARTS:
        known = about["parts"][part]
        parts[part] = CorpusPart(
            _mapped(folder / f"{part}.bin", np.dtype(about["dtype"]), known["num_tokens"]),
            known["num_bytes"],
            known["num_documents"],
            known["sha256"],
        )
    return parts


def chat_corpus(
    files: Sequence[Path], path: str, path_key: str, tokenizer: Tokenizer, dump_folder: str
) -> dict[str, CorpusPart]:
    """The parts of the conversations in `files`, as marked tokens (chat.py); without files, those
    about Python's manual."""

    def write(conversations: Iterable[tuple[Messages, bool]], sinks: "dict[str, _Sink]") -> None:
        for messages, held in conversations:
            tokens = marked_tokens(messages, tokenizer)
            sinks[PARTS[held]].write(tokens)
            sinks[PARTS[held]].num_documents += bool(len(tokens))

    if not files:
        sinks = {name: _Sink() for name in PARTS}
        write(manual_conversations(), sinks)
        return {name: sink.part() for name, sink in sinks.items()}

    def build(folder: Path, report: Callable[[int], None]) -> dict[str, Any]:
        with _file_sinks(folder, np.dtype(np.uint32)) as sinks:
            write(read_conversations(files, path_key, report), sinks)
        return _about(sinks, np.dtype(np.uint32))

    turns = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
    name = _name("chat", tokenizer.identity, tokenizer.render(turns, asks=True))
    return _mapped_parts(*_kept(path, path_key, files, name, dump_folder, build, "tokenizing"))


def stream_of(parts: Sequence[CorpusPart], source: str) -> Stream:
    """One stream of some parts of a corpus; `source` opens its fingerprint."""
    num_bytes, num_tokens = sum(p.num_bytes for p in parts), sum(len(p.tokens) for p in parts)
    digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
    return Stream(
        [part.tokens for part in parts],
        f"{source}, {num_tokens:,} tokens, {digest[:12]}",
        num_tokens / num_bytes if num_bytes else None,
    )


def tokens_corpus(
    path: str, path_key: str, vocab_size: int | None, dump_folder: str
) -> tuple[dict[str, list[np.ndarray]], dict[str, Any]]:
    """The arrays of files of tokens by part, and what is known of all of them.

    Files with the word `val` or `validation` in their names are held out.
    """
    files = _find_token_files(path, path_key)
    wide = np.dtype(np.uint32 if (vocab_size or 0) > 1 << 16 else np.uint16)
    arrays = [_open_tokens(file, path_key, wide) for file in files]

    def build(folder: Path, report: Callable[[int], None]) -> dict[str, Any]:
        return {"files_about": [_survey(array, report) for array in arrays]}

    name = _name("tokens", wide.name)
    _, about = _kept(path, path_key, files, name, dump_folder, build, "checking")
    by_part: dict[str, list[np.ndarray]] = {name: [] for name in PARTS}
    digests: dict[str, list[str]] = {name: [] for name in PARTS}
    for file, array, known in zip(files, arrays, about["files_about"], strict=True):
        if vocab_size is not None and known["largest"] >= vocab_size:
            raise ConfigError(
                f"{path_key}: {file} has the token {known['largest']:,}, but the vocabulary of the "
                f"model has {vocab_size:,}; set model.vocab_size to at least "
                f"{known['largest'] + 1:,}, or give other tokens"
            )
        part = HELD_OUT if _is_held_out(file) else TRAIN
        by_part[part].append(array)
        digests[part].append(known["sha256"])
    return by_part, digests


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer, sinks: "dict[str, _Sink]") -> None:
    """Tokenize pieces into the sinks of their parts, with the end-of-text token after each text."""
    end, start = (
        np.array(list(tokens), dtype=np.uint32)
        for tokens in ((tokenizer.end_of_text,), tokenizer.start)
    )
    current: tuple[int, bool] | None = None
    for batch in _batches(pieces):
        for (number, held, text), tokens in zip(
            batch, tokenizer.encode([text for _, _, text in batch]), strict=True
        ):
            if not len(tokens):
                continue
            sink = sinks[PARTS[held]]
            if (number, held) != current:
                if current is not None:
                    sinks[PARTS[current[1]]].write(end)
                current = number, held
                sink.write(start)
                sink.num_documents += 1
            sink.write(tokens)
            sink.num_bytes += len(text.encode())
    if current is not None:
        sinks[PARTS[current[1]]].write(end)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[2])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


class _Sink:
    """Collects tokens, in memory or in a file."""

    def __init__(self, dtype: np.dtype | None = None, file: BinaryIO | None = None) -> None:
        self.num_bytes = self.num_documents = self.num_tokens = 0
        self._dtype = dtype or np.dtype(np.uint32)
        self._file, self._held = file, [np.empty(0, self._dtype)]
        self._digest = hashlib.sha256()

    def write(self, tokens: np.ndarray) -> None:
        tokens = tokens.astype(self._dtype)
        self.num_tokens += len(tokens)
        # The same tokens have the same digest, whatever the width in which they are kept.
        self._digest.update(tokens.astype("<u4").tobytes())
        if self._file is None:
            self._held.append(tokens)
        else:
            self._file.write(tokens.tobytes())

    def part(self) -> CorpusPart:
        tokens = np.concatenate(self._held)
        return CorpusPart(tokens, self.num_bytes, self.num_documents, self._digest.hexdigest())

    def about(self) -> dict[str, Any]:
        names = ("num_tokens", "num_bytes", "num_documents")
        return {**{name: getattr(self, name) for name in names}, "sha256": self._digest.hexdigest()}


@contextlib.contextmanager
def _file_sinks(folder: Path, dtype: np.dtype) -> "Iterator[dict[str, _Sink]]":
    with contextlib.ExitStack() as exits:
        yield {
            name: _Sink(dtype, exits.enter_context((folder / f"{name}.bin").open("wb")))
            for name in PARTS
        }


def _about(sinks: "Mapping[str, _Sink]", dtype: np.dtype) -> dict[str, Any]:
    return {"dtype": dtype.name, "parts": {name: sink.about() for name, sink in sinks.items()}}


def _ends_held_out(documents: Iterable[Document], lengths: Sequence[int]) -> Iterator[Piece]:
    """The last tenth of each document is held out."""
    for number, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        left = length - math.ceil(length * HOLD_OUT_SHARE)
        for text in document:
            yield number, False, text[:left]
            yield number, True, text[left:]
            left = max(0, left - len(text))


def _some_held_out(documents: Iterable[Document]) -> Iterator[Piece]:
    """Documents are held out by a hash of their text, so copies of a text are all in one part."""
    for number, document in enumerate(documents):
        pieces = iter(document)
        first = next(pieces, "")
        digest = hashlib.blake2b(first.encode(), digest_size=8).digest()
        held = int.from_bytes(digest, "little") % HOLD_OUT_EVERY == 0
        for text in itertools.chain((first,), pieces):
            yield number, held, text


TOKEN_SUFFIXES = (".npy", ".bin")


def _find_token_files(path: str, path_key: str) -> list[Path]:
    root = Path(path).expanduser()
    found = [root] if root.is_file() else sorted(root.glob("*"))
    found = [file for file in found if file.suffix in TOKEN_SUFFIXES and file.is_file()]
    if not found:
        raise ConfigError(
            f"{path_key}: there are no tokens in {root}; give a .npy or .bin file of uint16 or "
            "uint32, or a folder of them"
        )
    return found


def _is_held_out(file: Path) -> bool:
    words = "".join(c if c.isalnum() else " " for c in file.stem.lower()).split()
    return not {"val", "validation"}.isdisjoint(words)


def _open_tokens(file: Path, path_key: str, dtype: np.dtype) -> np.ndarray:
    try:
        if file.suffix == ".npy":
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype not in (np.dtype(np.uint16), np.dtype(np.uint32)):
                raise ValueError(f"it is {array.dtype}{list(array.shape)}")
            return array
        if file.stat().st_size % dtype.itemsize:
            raise ValueError(f"its size is not a multiple of {dtype.itemsize} bytes")
        return _mapped(file, dtype, file.stat().st_size // dtype.itemsize)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path_key}: {file} does not hold tokens of {dtype.name}, one after another "
            f"({error}); write it again"
        ) from error


def _survey(array: np.ndarray, report: Callable[[int], None]) -> dict[str, Any]:
    """The largest token of a file, and a digest of all."""
    digest, largest, block = hashlib.sha256(), -1, 1 << 22
    for start in range(0, len(array), block):
        tokens = array[start : start + block]
        largest = max(largest, int(tokens.max()))
        digest.update(tokens.astype("<u4").tobytes())
        report(tokens.nbytes)
    return {"largest": largest, "sha256": digest.hexdigest()}


def _mapped(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    # A memory map of an empty file is an error.
    return np.memmap(file, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def _name(kind: str, *of_content: str) -> str:
    return f"{kind}-{hashlib.sha256(repr(of_content).encode()).hexdigest()[:16]}"


Build = Callable[[Path, Callable[[int], None]], dict[str, Any]]


def _kept(
    path: str,
    path_key: str,
    files: Sequence[Path],
    name: str,
    dump_folder: str,
    build: Build,
    doing: str,
) -> tuple[Path, dict[str, Any]]:
    """The folder `name` of what `build` has made of `files`, and its description.

    `build(folder, report)` writes files to a folder and returns a description of them; it calls
    `report` with numbers of bytes. It is called only if there is no such folder, or if a file has
    changed. Raises ConfigError if nothing can be written.
    """
    root = Path(path).expanduser().absolute()
    beside = (root if root.is_dir() else root.parent) / FOLDER
    of_root = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    name = name if root.is_dir() else f"{root.name}-{name}"
    places = [beside / name, Path(dump_folder).absolute() / "data" / f"{of_root}-{name}"]
    stamp = _stamp(files, root)
    problems = []
    for place in places:
        if (about := _valid(place, stamp)) is not None:
            return place, about
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with (place.parent / f"{name}.lock").open("w") as lock:
                hold(lock.fileno(), math.inf)
                if (about := _valid(place, stamp)) is not None:
                    return place, about
                return place, _write(place, stamp, files, build, doing)
        except OSError as error:
            problems.append(f"{place.parent}: {error.strerror or error}")
    raise ConfigError(
        f"{path_key}: its tokens cannot be written ({'; '.join(problems)}); make room, or give "
        "another job.dump_folder"
    )


def _write(
    place: Path, stamp: list[Any], files: Sequence[Path], build: Build, doing: str
) -> dict[str, Any]:
    new = place.with_name(f"{place.name}.new-{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        size = sum(file.stat().st_size for file in files)
        with _progress(f"{doing} {len(files)} file{'s' * (len(files) > 1)}", size) as report:
            about = {"format": FORMAT, "files": stamp, **build(new, report)}
        (new / "about.json").write_text(json.dumps(about), encoding="utf-8")
        old = place.with_name(f"{place.name}.old-{os.getpid()}")
        if place.exists():
            # Running jobs keep what they have mapped.
            place.rename(old)
        new.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return about


def _valid(place: Path, stamp: list[Any]) -> dict[str, Any] | None:
    """The description of a folder that was made of the files as they are now; else None."""
    try:
        about = json.loads(read_bytes(place / "about.json", most_bytes=MOST_ABOUT_BYTES))
        if about["format"] != FORMAT or about["files"] != stamp:
            return None
        for name, part in about.get("parts", {}).items():
            wanted = part["num_tokens"] * np.dtype(about["dtype"]).itemsize
            if (place / f"{name}.bin").stat().st_size != wanted:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return about


def _stamp(files: Sequence[Path], root: Path) -> list[Any]:
    """What changes if a file changes: names, sizes and times."""
    known = [(os.path.relpath(file.absolute(), root), file.stat()) for file in files]
    return [[name, about.st_size, about.st_mtime_ns] for name, about in known]


@contextlib.contextmanager
def _progress(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; yields a function of bytes done."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)
