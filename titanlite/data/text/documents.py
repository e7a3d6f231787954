"""Documents: the texts of a data set, one after another, from Python's manual or from files.

A document is an iterable of pieces of text, so that a file of many gigabytes is never held whole.
Files of a folder are read in the order of their paths.
"""

import contextlib
import fnmatch
import gzip
import importlib.util
import io
import json
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.errors import ConfigError
from titanlite.files import open_regular, shown

Document = Iterable[str]

# Longer documents are tokenized in pieces.
PIECE_CHARACTERS = 1 << 20
# Topics repeat paragraphs of each other. A paragraph of at least this length says that they do.
PARAGRAPH_CHARACTERS = 80
HOLD_OUT_EVERY = 8


def python_manual() -> Iterator[tuple[str, bool]]:
    """The topics of Python's own `help()`, and whether each is held out.

    Topics with a paragraph in common form a group. Every eighth group is held out, in the order of
    their first names, so no paragraph is in both parts.
    """
    from pydoc_data.topics import topics

    first_with: dict[str, str] = {}
    group_of: dict[str, list[str]] = {}
    for name in sorted(topics):
        group = group_of[name] = [name]
        for paragraph in map(str.strip, topics[name].split("\n\n")):
            if len(paragraph) < PARAGRAPH_CHARACTERS:
                continue
            other = group_of[first_with.setdefault(paragraph, name)]
            if other is not group:
                other += group
                group_of.update(dict.fromkeys(group, other))
                group = other
    groups = sorted(group_of.values(), key=min)
    distinct = list({id(group): group for group in groups}.values())
    for number, group in enumerate(distinct):
        for name in sorted(group):
            yield topics[name], number % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1


def python_name() -> str:
    """The Python whose manual this is: it differs between versions."""
    return f"Python {platform.python_version()}"


# Files that `Dataset.save_to_disk` writes beside the text.
DESCRIPTIONS = ("dataset_info.json", "state.json")


def find_files(path: str, path_key: str, pattern: str) -> list[Path]:
    """The files of text at `path`, a file or a folder, in the order of their paths.

    In a folder, those whose names match `pattern` and whose suffix is known; hidden files and
    folders are left out. Raises ConfigError if there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        if reader_of(root) is None:
            raise ConfigError(f"{path_key}: {root} is not a file of text; give {SUFFIXES}")
        return [root]
    found = [
        file
        for file in sorted(root.rglob("*"))
        if reader_of(file) is not None
        and file.name not in DESCRIPTIONS
        and fnmatch.fnmatch(file.name, pattern)
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
        and file.is_file()
    ]
    if not found:
        named = "" if pattern == "*" else f" named {pattern}"
        raise ConfigError(f"{path_key}: there are no files{named} in {root}; put {SUFFIXES} there")
    return found


def read_documents(
    files: Iterable[Path], path_key: str, on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[Document]:
    """The documents of all files; read each to its end before the next.

    `on_bytes` is called with the number of bytes that were read since its last call. Raises
    ConfigError, with file and line, if a file cannot be read.
    """
    for where, opened, read in opened_files(files, path_key, on_bytes):
        for document in read(opened, where):
            yield _explained(document, where)


def opened_files(
    files: Iterable[Path], path_key: str, on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[tuple[str, Any, "Reader"]]:
    """Each file's name for messages, the open file, and the reader of its documents."""
    for file in files:
        read = reader_of(file)
        assert read is not None
        where = f"{path_key}: {file}"
        with (
            _explaining(where),
            open_regular(file) as raw,
            io.BufferedReader(_Counted(raw, on_bytes)) as counted,
        ):
            opened: Any = gzip.GzipFile(fileobj=counted) if file.suffix == ".gz" else counted
            yield where, opened, read


def _explained(document: Document, where: str) -> Iterator[str]:
    # The rest of a document is read by whoever goes through it, out of reach of its file's reader.
    with _explaining(where):
        yield from document


@contextlib.contextmanager
def _explaining(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where} cannot be read ({why}); repair or remove it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8 ({error.reason}); convert it, or remove it"
        ) from error


class _Counted(io.RawIOBase):
    """A file that reports how much is read from it; parquet also needs to seek."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes = file, on_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._on_bytes(len(data))
        return len(data)


def _read_text(file: BinaryIO, where: str) -> Iterator[Document]:
    """One document."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")

    def pieces() -> Iterator[str]:
        held = ""
        while block := text.read(PIECE_CHARACTERS):
            *whole, held = split_long(held + block)
            yield from whole
        yield held

    yield pieces()


def _read_json_lines(file: BinaryIO, where: str) -> Iterator[Document]:
    """One document per line: {"text": "..."}."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["text"]
            text.encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = "" if not isinstance(error, ValueError) else f" ({shown(str(error))})"
            raise ConfigError(
                f'{where}: line {number} is not {{"text": "..."}}{what}; correct or remove the line'
            ) from error
        yield split_long(text)


def _read_parquet(file: BinaryIO, where: str) -> Iterator[Document]:
    """One document per row of the column `text`."""

    def batches() -> Iterator[Any]:
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise KeyError("text")
        yield from table.iter_batches(columns=["text"], batch_size=1024)

    return _read_columns(batches, where)


def _read_arrow(file: BinaryIO, where: str) -> Iterator[Document]:
    """One document per row, as `Dataset.save_to_disk` of the package `datasets` writes them."""

    def batches() -> Iterator[Any]:
        import pyarrow.ipc

        yield from pyarrow.ipc.open_stream(file)

    return _read_columns(batches, where)


def _read_columns(batches: Callable[[], Iterator[Any]], where: str) -> Iterator[Document]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"{where} needs the package pyarrow, which is not installed; "
            'pip install "titanlite[text]"'
        )
    import pyarrow

    row = 0
    try:
        for batch in batches():
            for text in batch.column("text").to_pylist():
                if not isinstance(text, str):
                    raise ConfigError(f"{where}: row {row} has no text; correct or remove the row")
                row += 1
                yield split_long(text)
    except KeyError as error:
        raise ConfigError(f"{where} has no column `text`; rename the column of the text") from error
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{where} is damaged ({shown(str(error))}); download it again") from error


Reader = Callable[[BinaryIO, str], Iterator[Document]]
_READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
SUFFIXES = '.txt, .jsonl, .json (lines of {"text": ...}; these also as .gz), .parquet or .arrow'


def reader_of(file: Path) -> Reader | None:
    """The reader for a file's suffix; None if it is not known."""
    *rest, last = ["", *file.suffixes][-2:]
    suffix = rest[0] if last == ".gz" and rest and rest[0] in (".txt", ".jsonl", ".json") else last
    return _READERS.get(suffix)


def split_long(text: str) -> list[str]:
    """`text` in pieces of at most PIECE_CHARACTERS, cut before a single space between two words.

    There the pre-tokenizers of byte-level BPE cut too, so the tokens are those of the whole text.
    A piece without such a place is cut anywhere.
    """
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = text.rfind(" ", start + 1, start + PIECE_CHARACTERS)
        while cut != -1 and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.rfind(" ", start + 1, cut)
        cut = start + PIECE_CHARACTERS if cut == -1 else cut
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]
