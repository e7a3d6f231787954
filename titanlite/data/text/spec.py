"""The specs of the text data sets. No torch.

Tokens are bytes, or those of the tokenizer.json in model.hf_assets_path. A model may have a larger
vocabulary than the tokenizer; its upper entries are padding, which is never sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.data.spec import Dataset, DatasetSpec, JobKeys, Misfit
from titanlite.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from titanlite.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextSpec(DatasetSpec):
    """A data set of text; `pattern` selects the files of a folder by name.

    `for_job` sets the vocabulary, and the fields of a sample.
    """

    build: str | Callable[..., Dataset] = "titanlite.data.text.build:build_text"
    fields: Mapping[str, int | None] = field(default_factory=lambda: {"targets": 0})
    pattern: str = "*"
    hub_split: str | None = None
    """The split that the package `datasets` loads; None if it loads nothing."""
    hub_name: str = ""
    """What it loads if no path is given; "" if the path names it."""
    sample_name: str = "text"
    accepts_file: bool = True
    sampled_as: str | None = "pydoc"
    reads_tokenizer: bool = True
    keys: JobKeys | None = None
    """The keys of the job, once `for_job` has set them."""

    def for_job(self, keys: JobKeys) -> DatasetSpec:
        names = ["targets"]
        if not keys.attend_across_documents:
            names += ["documents", "positions"]
        spec = replace(self, keys=keys, fields=dict.fromkeys(names, 0))
        tokenizer = spec.tokenizer
        return spec if tokenizer is None else replace(spec, vocab_size=tokenizer.vocab_size)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if the tokens' text is not known."""
        from titanlite.data.text.tokenizer import load_tokenizer

        return load_tokenizer(None if self.keys is None else self.keys.hf_assets_path)

    @property
    def end_token(self) -> int | None:
        tokenizer = self.tokenizer
        return None if tokenizer is None else tokenizer.end_of_text

    def misfit(self, model: Any, seq_len: int) -> Misfit | None:
        if hasattr(model, "image_height"):
            change = "model.name to a language model"
            return Misfit("text", "images", (change,))
        return super().misfit(model, seq_len)

    def hub_source(self, path: str) -> str | None:
        """What the package `datasets` loads for this path; None if files are read without it."""
        if self.hub_split is None or (self.hub_name and path and Path(path).expanduser().exists()):
            return None
        return path or self.hub_name

    def prepare(self, **arguments: Any) -> None:
        """Load and tokenize the text, unless that has been done, and check it; see build_text."""
        self.make(**arguments, refresh=True)

    def make(self, *, model: Any, seq_len: int, **arguments: Any) -> Dataset:
        return self.builder(self, model=model, seq_len=seq_len, **arguments)

    def measures(self, loss_nats: float, dataset: Dataset) -> Mapping[str, float]:
        """Perplexity and, where the text is known, bits per UTF-8 byte."""
        bits, density = loss_nats / math.log(2), getattr(dataset, "tokens_per_byte", None)
        of_bits = {"bits_per_token": bits} if density is None else {"bits_per_byte": bits * density}
        # exp overflows above 709 nats.
        return {"perplexity": math.exp(min(loss_nats, 700.0)), **of_bits}

    def save_samples(
        self, path: Path, sampled: Tensor, real: Tensor, *, model: Any, title: str
    ) -> None:
        """Write the texts, one after another; of tokens without a tokenizer, the numbers."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            super().save_samples(path, sampled, real, model=model, title=title)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{title}\n"]
        for number, text in enumerate(self.texts(sampled), start=1):
            lines += [f"--- sample {number} ---", text, ""]
        path.write_text("\n".join(lines), encoding="utf-8")

    def texts(self, sampled: Tensor) -> list[str]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        return [tokenizer.decode(cut(tokens, tokenizer)) for tokens in sampled.tolist()]

    def start_tokens(self, prompt: str) -> list[int] | None:
        """The tokens of `prompt` at the start of a document: after the start tokens, or an end."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return super().start_tokens(prompt)
        start = list(tokenizer.start) or [tokenizer.end_of_text]
        try:
            return [*start, *tokenizer.encode([prompt])[0].tolist()]
        except UnicodeEncodeError:
            raise ConfigError("sampling.prompt: it is not UTF-8; correct it") from None


@dataclass(frozen=True)
class TokensSpec(TextSpec):
    """Files of tokens. Without model.hf_assets_path, their text is not known."""

    sample_name: str = "sequence"
    sampled_as: str | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        if self.keys is None or not self.keys.hf_assets_path:
            return None
        return super().tokenizer


@dataclass(frozen=True)
class ChatSpec(TextSpec):
    """Conversations, of which only the answers are targets; without a path, about Python's manual.

    A prompt for samples is a question.
    """

    takes_path: bool = True
    sampled_as: str | None = "chat"

    def start_tokens(self, prompt: str) -> list[int] | None:
        tokenizer = self.tokenizer
        if tokenizer is None or not prompt:
            return super().start_tokens(prompt)
        text = tokenizer.render([{"role": "user", "content": prompt}], asks=True)
        found: list[int] = tokenizer.encode_template([text])[0].tolist()
        return found


def cut(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a sampled document: up to its end-of-text token, without its start."""
    start = list(tokenizer.start) or [tokenizer.end_of_text]
    tokens = tokens[len(start) :] if tokens[: len(start)] == start else tokens
    end = tokenizer.end_of_text
    return tokens[: tokens.index(end)] if end in tokens else tokens


PYDOC = TextSpec("pydoc", "the manual in Python's own help(), which differs between versions")
CHAT = ChatSpec("chat", "conversations: lines of JSON with messages, or about Python's manual")
TEXT = TextSpec("text", "text files: .txt, .jsonl, .parquet or .arrow", needs_path=True)
TOKENS = TokensSpec("tokens", "files of tokens: .npy or .bin of uint16 or uint32", needs_path=True)
C4_TEST = TextSpec(
    "c4_test",
    "TorchTitan's sample of C4, from its folder",
    needs_path=True,
    default_path="tests/assets/c4_test",
)
C4 = TextSpec(
    "c4",
    "C4 in English, by the package datasets or from local files",
    pattern="c4-train.*",
    takes_path=True,
    accepts_name=True,
    hub_split="train",
    hub_name="allenai/c4:en",
)
C4_VALIDATION = replace(C4, name="c4_validation", pattern="c4-validation.*", hub_split="validation")
HF = TextSpec(
    "hf",
    "the split `train` of a data set that Hugging Face's package datasets loads",
    needs_path=True,
    accepts_file=False,
    accepts_name=True,
    hub_split="train",
)
HF_VALIDATION = replace(
    HF,
    name="hf_validation",
    description="the split `validation` of such a data set",
    hub_split="validation",
)
TEXTS = (PYDOC, TEXT, CHAT, TOKENS, HF, HF_VALIDATION, C4, C4_TEST, C4_VALIDATION)
