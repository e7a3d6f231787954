"""A job from the config.json of a Hugging Face model, for `titanlite plan --hf`. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from titanlite.config.toml import show
from titanlite.errors import ConfigError

CONFIG = "config.json"
LENGTHS = ("max_position_embeddings", "n_positions")
MOST_TOKENS = 8192
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout")


def hf_job(path: str) -> tuple[list[str], list[str]]:
    """The keys of a job, as words of a command line, and notes; `path` is a folder or a file.

    A sequence has as many tokens as the model takes, at most 8,192. A rank computes one at a time
    in bfloat16. Other keys are the defaults.
    """
    file = Path(path).expanduser()
    file = file / CONFIG if file.is_dir() else file
    if file.name != CONFIG:
        raise ConfigError(f"--hf: {path} is not called {CONFIG}; give that file, or its folder")
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--hf: {file} cannot be read ({error.strerror}); give another file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--hf: {file} is not JSON ({error}); repair it") from error
    if not isinstance(given, dict) or "model_type" not in given:
        raise ConfigError(f"--hf: {file} has no model_type; give one that transformers wrote")
    tokens = next((given[key] for key in LENGTHS if isinstance(given.get(key), int)), MOST_TOKENS)
    names = DROPOUTS[:3] if given["model_type"] == "gpt2" else ()
    dropped = [name for name in DROPOUTS if given.get(name) or name in names]
    values = dict.fromkeys(dropped, 0.0)
    words = [
        "--model.name=hf",
        f"--model.path={file.parent}",
        "--training.dataset=synthetic",
        f"--training.seq_len={min(tokens, MOST_TOKENS)}",
        "--training.local_batch_size=1",
        "--training.mixed_precision_param=bfloat16",
        *([f"--model.values={show(values)}"] if values else []),
    ]
    notes = [f"dropout: planned without; titanlite refuses {', '.join(dropped)}"] if dropped else []
    return words, notes
