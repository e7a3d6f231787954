"""Tokenizers: text to token numbers and back. No torch.

Bytes are the default and need no file. Any other vocabulary comes from a `tokenizer.json`, read by
the package `tokenizers`.
"""

import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titanlite.errors import ConfigError
from titanlite.files import open_regular, shown

KEY = "model.hf_assets_path"
# Names of the end-of-text token, tried in this order if tokenizer_config.json names none.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


Messages = Sequence[Mapping[str, str]]
"""The turns of a conversation, each with its role and its content."""


class Tokenizer(Protocol):
    """What reading and sampling need of a tokenizer."""

    vocab_size: int
    """The largest token number + 1."""
    end_of_text: int
    """The token after each document."""
    start: Sequence[int]
    """The tokens before each document; mostly none."""
    identity: str
    """Changes if any text may get other tokens."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, without special tokens. Raises UnicodeEncodeError."""

    def encode_template(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same for text of a chat template, in which special tokens are spelled out."""

    def render(self, messages: Messages, *, asks: bool = False) -> str:
        """A conversation as text; with `asks`, up to where the next answer begins."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """A token is a UTF-8 byte; 256 is the end of a text."""

    vocab_size = 257
    end_of_text = 256
    start: Sequence[int] = ()
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    encode_template = encode

    def render(self, messages: Messages, *, asks: bool = False) -> str:
        lines = [f"{one['role']}: {one['content']}\n" for one in messages]
        return "".join(lines) + "assistant: " * asks

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a folder with tokenizer.json and, if there is one, tokenizer_config.json.

    The end-of-text token is the `eos_token` of the configuration, or else the first of END_NAMES in
    the vocabulary. A document starts with the `bos_token` if the tokenizer itself adds it. A
    special token that is spelled out in a text is read as plain text.
    Raises ConfigError if a file is missing or damaged, or there is no end-of-text token.
    """

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError(
                f"{KEY}: reading a tokenizer.json needs the package tokenizers, which is not "
                'installed; pip install "titanlite[text]", or remove this key to train on bytes'
            )
        from tokenizers import Tokenizer as FromFile

        content = _read(folder / "tokenizer.json")
        try:
            self._tokenizer: Any = FromFile.from_str(content.decode())
        except Exception as error:  # the package raises a plain Exception
            raise ConfigError(
                f"{KEY}: {folder / 'tokenizer.json'} is not a tokenizer ({error}); download it "
                "again"
            ) from error
        self._folder = folder
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _settings(folder / "tokenizer_config.json")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        names = [settings["eos_token"]] if "eos_token" in settings else list(END_NAMES)
        ends = [vocabulary[name] for name in names if name in vocabulary]
        if not ends:
            raise ConfigError(
                f"{KEY}: the tokenizer in {folder} has no end-of-text token "
                f"({', '.join(names)}); name one as eos_token in tokenizer_config.json"
            )
        self.end_of_text = ends[0]
        added = self._tokenizer.encode("", add_special_tokens=True).ids
        first = vocabulary.get(settings.get("bos_token", ""))
        adds_first = settings.get("add_bos_token") == "True" or first in added[:1]
        self.start: Sequence[int] = (first,) if first is not None and adds_first else ()
        about = f"{self.end_of_text} {self.start}".encode()
        self.identity = hashlib.sha256(about + content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            text.encode()  # the package replaces lone surrogates in silence
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def encode_template(self, texts: Sequence[str]) -> list[np.ndarray]:
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(texts)
        finally:
            self._tokenizer.encode_special_tokens = True

    @functools.cached_property
    def _of_transformers(self) -> Any:
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                f"{KEY}: a chat template needs the package transformers, which is not installed; "
                'pip install "titanlite[hf]"'
            )
        from transformers import PreTrainedTokenizerFast

        found = PreTrainedTokenizerFast.from_pretrained(self._folder)
        if not found.chat_template:
            raise ConfigError(
                f"{KEY}: the tokenizer in {self._folder} has no chat template; put one there as "
                "chat_template.jinja"
            )
        return found

    def render(self, messages: Messages, *, asks: bool = False) -> str:
        template, more = self._of_transformers, {"tokenize": False, "add_generation_prompt": asks}
        try:
            return str(template.apply_chat_template(list(messages), **more))
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"{KEY}: the chat template in {self._folder} refuses a conversation "
                f"({shown(' '.join(str(error).split()), 200)}); correct the data, or the template"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def load_tokenizer(folder: str | None) -> Tokenizer:
    """The tokenizer in `folder` (model.hf_assets_path); bytes if it is None or empty."""
    if not folder:
        return ByteTokenizer()
    path = Path(folder).expanduser()
    try:
        changed = (path / "tokenizer.json").stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(
            f"{KEY}: {path / 'tokenizer.json'} cannot be read ({error.strerror}); give the folder "
            f"of a tokenizer.json, or --{KEY}= (empty) for bytes"
        ) from error
    return _load(path, changed)


@functools.lru_cache(maxsize=2)
def _load(folder: Path, changed: int) -> Tokenizer:
    return FileTokenizer(folder)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} cannot be read ({error.strerror or error})") from error


def _settings(path: Path) -> dict[str, str]:
    """The values of tokenizer_config.json as text; a token may be a table with its content."""
    if not path.exists():
        return {}
    try:
        values = json.loads(_read(path))
        if not isinstance(values, dict):
            raise ValueError("it is not a table")
    except ValueError as error:
        raise ConfigError(
            f"{KEY}: {path} is not valid JSON ({error}); download it again"
        ) from error
    plain = {k: v.get("content") if isinstance(v, dict) else v for k, v in values.items()}
    return {key: str(value) for key, value in plain.items() if value is not None}
