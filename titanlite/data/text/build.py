"""Build a text data set: find its tokens, choose the part of a split, and pack it."""

import hashlib
from typing import Any

from titanlite.data.text.corpus import (
    HELD_OUT,
    PARTS,
    TRAIN,
    chat_corpus,
    manual_corpus,
    stream_of,
    text_corpus,
    tokens_corpus,
)
from titanlite.data.text.documents import find_files, python_name
from titanlite.data.text.hub import arrow_files
from titanlite.data.text.packed import PackedText, Stream
from titanlite.data.text.spec import ChatSpec, TextSpec
from titanlite.errors import ConfigError


def build_text(
    spec: TextSpec,
    *,
    model: Any,
    seq_len: int,
    path: str = "",
    split: str = "train",
    seed: int,
    path_key: str = "training.dataset_path",
    refresh: bool = False,
) -> PackedText:
    """The sequences of a split: "train" or "validation"; the two share no document.

    If the job validates on other data, each split has all documents of its own data. With
    `refresh`, a data set of the package `datasets` is loaded anew; see arrow_files. Raises
    ConfigError if a file cannot be read, or the text is shorter than one sequence.
    """
    assert spec.keys is not None, "for_job comes first"
    parts: tuple[str, ...] = (TRAIN,) if split == "train" else (HELD_OUT,)
    if spec.keys.validates_elsewhere:
        parts = PARTS
    tokenizer, folder = spec.tokenizer, spec.keys.dump_folder
    source, hub_split = spec.hub_source(path), spec.hub_split
    key = path_key if path else f"{path_key.partition('.')[0]}.dataset"
    if spec.name == "tokens":
        stream = _stream_of_tokens(spec, model, path, path_key, parts)
    else:
        assert tokenizer is not None
        if isinstance(spec, ChatSpec):
            files = find_files(path, path_key, spec.pattern) if path else []
            corpus = chat_corpus(files, path, path_key, tokenizer, folder)
            name = "conversations" if path else f"conversations, {python_name()}"
        elif source is not None and hub_split is not None:
            files = arrow_files(source, hub_split, key, folder, refresh=refresh)
            corpus = text_corpus(files, str(files[0].parent), key, hub_split, tokenizer, folder)
            name = f"{source}, {hub_split}"
        elif spec.needs_path or path:
            files = find_files(path, path_key, spec.pattern)
            corpus = text_corpus(files, path, path_key, spec.pattern, tokenizer, folder)
            name = "text"
        else:
            corpus, name = manual_corpus(tokenizer), python_name()
        stream = stream_of([corpus[part] for part in parts], name)
    end = None
    if not spec.keys.attend_across_documents:
        if tokenizer is None:
            raise ConfigError(
                "training.attend_across_documents: the end of a document in these tokens is not "
                "known; give the tokenizer's folder as model.hf_assets_path, or set it to true"
            )
        end = tokenizer.end_of_text
    if len(stream) <= seq_len:
        what = "held-out text" if parts == (HELD_OUT,) else "text"
        other = ", or other data as validation.dataset_path" if parts == (HELD_OUT,) else ""
        raise ConfigError(
            f"{key}: the {what} has {len(stream):,} tokens, but a sequence needs {seq_len + 1:,}; "
            f"set training.seq_len to at most {max(1, len(stream) - 1):,}, or give more text{other}"
        )
    return PackedText(
        stream,
        seq_len,
        shuffle_seed=seed if split == "train" else None,
        end_of_text=end,
        has_marks=isinstance(spec, ChatSpec),
    )


def _stream_of_tokens(
    spec: TextSpec, model: Any, path: str, path_key: str, parts: tuple[str, ...]
) -> Stream:
    assert spec.keys is not None
    vocab_size = getattr(model, "vocab_size", None)
    arrays, digests = tokens_corpus(path, path_key, vocab_size, spec.keys.dump_folder)
    pieces = [array for part in parts for array in arrays[part]]
    if not pieces:
        if parts == (HELD_OUT,):
            raise ConfigError(
                f"{path_key}: no file in {path} is held out (a name with the word `val`); give "
                "validation tokens as validation.dataset_path"
            )
        raise ConfigError(f"{path_key}: every file in {path} is for validation; add others")
    digest = hashlib.sha256("".join(d for part in parts for d in digests[part]).encode())
    num_tokens = sum(map(len, pieces))
    return Stream(pieces, f"tokens, {num_tokens:,}, {digest.hexdigest()[:12]}")
