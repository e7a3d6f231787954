"""Sequences cut from one long stream of tokens, in which an end-of-text token ends each document.

Sequence `i` has the tokens [i * T, (i + 1) * T) of the stream, and as targets those one place
later. Sequences are cut anywhere: mostly they begin and end inside a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from titanlite.data.keyed_random import Orders, Permutation
from titanlite.data.text.chat import ANSWER, FIRST

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """Tokens of documents in order, in pieces [N] that may be memory-mapped files."""

    pieces: Sequence[np.ndarray]
    fingerprint: str = ""
    """Text for people that differs if the tokens differ."""
    tokens_per_byte: float | None = None
    """Tokens per UTF-8 byte of text; None if the text is not known."""

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` - 1, int64; reads nothing else."""
        parts = []
        for piece in self.pieces:
            if start < len(piece) and stop > 0:
                parts.append(piece[max(start, 0) : stop])
            start, stop = start - len(piece), stop - len(piece)
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


class PackedText:
    """The sequences of a stream; sample `i` is sequence `order[i mod N]` of epoch `i // N`.

    Each sample has "tokens" and "targets", int64 [T]. With `end_of_text`, it also has "documents"
    [T], the number of each token's document within the sequence, from 0, and "positions" [T], which
    start at 0 in each document. An end-of-text token belongs to the document that it ends. With
    `shuffle_seed` None the order is that of the stream, in every epoch. The tokens after the last
    whole sequence are not used.

    With `has_marks`, tokens have the marks of conversations (chat.py): targets are -100 but for
    answers, and a document is a conversation.
    """

    def __init__(
        self,
        stream: Stream,
        seq_len: int,
        *,
        shuffle_seed: int | None = None,
        end_of_text: int | None = None,
        has_marks: bool = False,
    ) -> None:
        self.num_samples = max(0, len(stream) - 1) // seq_len
        self.fingerprint, self.tokens_per_byte = stream.fingerprint, stream.tokens_per_byte
        self._stream, self._seq_len = stream, seq_len
        self._end_of_text, self._has_marks = end_of_text, has_marks
        self._orders = Orders(Permutation, shuffle_seed, self.num_samples)

    def sample(self, index: int) -> "dict[str, Tensor]":
        # The launcher packs too, to check the text, and must not load torch.
        import torch

        start = self._orders.place(index) * self._seq_len
        tokens = self._stream.read(start, start + self._seq_len + 1)
        targets, is_first = tokens[1:], np.append(False, tokens[:-2] == self._end_of_text)
        if self._has_marks:
            is_first = tokens[:-1] & int(FIRST) > 0
            is_target, tokens = tokens[1:] & int(ANSWER) > 0, tokens & int(FIRST) - 1
            targets = np.where(is_target, tokens[1:], -100)
        fields = {"tokens": tokens[:-1], "targets": targets}
        if self._end_of_text is not None:
            fields |= number_documents(is_first)
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in fields.items()}


def number_documents(is_first: np.ndarray) -> dict[str, np.ndarray]:
    """The fields "documents" and "positions" of a sequence, int64 [T] each.

    `is_first` says which of its tokens begin a document; the very first always does.
    """
    places = np.arange(len(is_first), dtype=np.int64)
    is_first = is_first & (places > 0)
    starts = np.maximum.accumulate(np.where(is_first, places, 0))
    return {"documents": np.cumsum(is_first, dtype=np.int64), "positions": places - starts}
