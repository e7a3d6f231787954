"""Conversations: read, rendered by a chat template, and marked with what to learn. No torch.

    messages -> segments of text, each a question or an answer -> tokens with two marks

Only answers are targets. A token is kept as uint32, whose two highest bits are marks: ANSWER for a
target, FIRST for the first token of a conversation.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.text.documents import opened_files, python_manual
from titanlite.data.text.tokenizer import KEY, Messages, Tokenizer
from titanlite.errors import ConfigError

ANSWER, FIRST = np.uint32(1 << 31), np.uint32(1 << 30)
# Every tenth conversation is held out.
HOLD_OUT_EVERY = 10
# Of a conversation about a topic of Python's manual; what is longer is a table.
TURNS, LEAST_CHARACTERS, MOST_CHARACTERS = 3, 80, 800


def segments(messages: Messages, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The text of a conversation up to its last answer, in parts, and whether each is an answer.

    Raises ConfigError if the chat template renders the turns before an answer otherwise once it is
    there, since then they are not what the model reads before it answers.
    """
    done = ""
    for count, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.render(messages[:count], asks=True)
        whole = tokenizer.render(messages[: count + 1])
        if not (asked.startswith(done) and whole.startswith(asked)):
            raise ConfigError(
                f"{KEY}: the chat template renders earlier turns otherwise once an answer is "
                "there, so what precedes an answer is not known; give another chat_template.jinja"
            )
        yield asked[len(done) :], False
        yield whole[len(asked) :], True
        done = whole


def marked_tokens(messages: Messages, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of a conversation with their marks, uint32 [N]; empty without an answer."""
    parts = list(segments(messages, tokenizer))
    if not parts:
        return np.empty(0, np.uint32)
    encoded = tokenizer.encode_template([text for text, _ in parts])
    marks = [ANSWER if is_answer else np.uint32(0) for _, is_answer in parts]
    tokens = [one.astype(np.uint32) | mark for one, mark in zip(encoded, marks, strict=True)]
    found = np.concatenate(tokens)
    if int(encoded[-1][-1]) != tokenizer.end_of_text:
        found = np.append(found, np.uint32(tokenizer.end_of_text) | ANSWER)
    found[0] |= FIRST
    return found


def manual_conversations() -> Iterator[tuple[Messages, bool]]:
    """Questions about the topics of Python's own `help()`, and whether each is held out."""
    for text, held in python_manual():
        title, *paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
        title = title.rstrip("*=-~ ")
        prose = [one for one in paragraphs if LEAST_CHARACTERS <= len(one) <= MOST_CHARACTERS]
        for start in range(0, len(prose), TURNS):
            questions = [f"{'Tell me more' if start else 'Tell me'} about: {title}", "Go on."]
            messages = []
            for number, answer in enumerate(prose[start : start + TURNS]):
                messages += [
                    {"role": "user", "content": questions[min(number, 1)]},
                    {"role": "assistant", "content": answer},
                ]
            yield messages, held


def read_conversations(
    files: Iterable[Path], path_key: str, on_bytes: Callable[[int], None]
) -> Iterator[tuple[Messages, bool]]:
    """The conversations in lines of JSON, and whether each is held out.

    A line is {"messages": [{"role": "user", "content": "..."}, ...]}, or {"prompt": ...,
    "completion": ...}, each a text or a list of messages. Raises ConfigError.
    """
    for where, file, _ in opened_files(files, path_key, on_bytes):
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                messages = _messages_of(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise ConfigError(
                    f'{where}: line {number} is not {{"messages": [{{"role": ..., "content": ...}},'
                    ' ...]} or {"prompt": ..., "completion": ...}; correct or remove the line'
                ) from None
            digest = hashlib.blake2b(line.strip(), digest_size=8).digest()
            yield messages, int.from_bytes(digest, "little") % HOLD_OUT_EVERY == 0


def _messages_of(record: Any) -> Messages:
    if "messages" in record:
        found = record["messages"]
    else:
        found = []
        for key, role in (("prompt", "user"), ("completion", "assistant")):
            part = record[key]
            found += [{"role": role, "content": part}] if isinstance(part, str) else part
    messages = [{"role": one["role"], "content": one["content"]} for one in found]
    for one in messages:
        if not (isinstance(one["role"], str) and isinstance(one["content"], str)):
            raise TypeError
        one["content"].encode()
    return messages
