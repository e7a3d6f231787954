"""Prints a sampled text while it is sampled."""

from __future__ import annotations

import sys
from typing import Any, TextIO

# Tokens that are decoded again with each new one.
CONTEXT = 32


class TextWriter:
    """Prints a sampled text token by token, after its `prompt`, up to the end-of-text token.

    A character is printed once all its bytes are there.
    """

    def __init__(self, tokenizer: Any, prompt: str, stream: TextIO | None = None) -> None:
        self._tokenizer = tokenizer
        self._stream = sys.stdout if stream is None else stream
        # The text of a token can depend on the one before it, so the prompt's are kept.
        self._tokens: list[int] = tokenizer.encode([prompt])[0].tolist()
        self._has_ended = False
        self._shown = 0
        self._show()

    def add(self, token: int) -> None:
        if token == self._tokenizer.end_of_text:
            self._has_ended = True
        if not self._has_ended:
            self._tokens.append(token)
            self._show()

    def close(self) -> None:
        self._show(is_last=True)
        print(file=self._stream, flush=True)

    def _show(self, *, is_last: bool = False) -> None:
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\ufffd") and not is_last:
            return
        print(text[self._shown :], end="", file=self._stream, flush=True)
        self._shown = len(text)
        if len(self._tokens) > 2 * CONTEXT:
            self._tokens = self._tokens[-CONTEXT:]
            self._shown = len(self._tokenizer.decode(self._tokens))
