"""Which Hugging Face model to build, and checks of its sizes; needs no torch.

[model]
name = "hf"
path = "my_llama"                       # a folder with config.json
# or
config_class = "LlamaConfig"            # a class of transformers
values = { hidden_size = 256, num_hidden_layers = 4 }
"""

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.sizes import share_problems

FAMILIES = {
    "GPT2Config": "gpt2",
    "LlamaConfig": "llama",
    "MistralConfig": "mistral",
    "Qwen2Config": "qwen2",
    "Qwen3Config": "qwen3",
}
"""Configuration classes whose sizes are checked without torch, and their `model_type`."""

TP_TABLE = "base_model_tp_plan"
"""The attribute of a configuration that maps module names to tensor-parallel styles."""


@dataclass(frozen=True)
class HFConfig:
    """A folder with config.json, or a configuration class and its values."""

    path: Annotated[
        str | None, Field(description="folder with config.json, whose sizes the model gets")
    ] = None
    config_class: Annotated[
        str | None, Field(description="configuration class of transformers, such as LlamaConfig")
    ] = None
    values: Annotated[
        dict[str, Any], Field(description="values of that configuration, such as hidden_size")
    ] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.path, self.config_class))

    @property
    def given(self) -> dict[str, Any]:
        """The values of config.json, overridden by `values`."""
        found: dict[str, Any] = {}
        if self.path is not None:
            found = json.loads((Path(self.path).expanduser() / "config.json").read_text())
        return {**found, **self.values}

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size; None if neither the file nor `values` give it."""
        try:
            return self.given.get("vocab_size")
        except (OSError, ValueError):
            return None

    @property
    def num_experts(self) -> int:
        """The experts of a block that can be spread over ranks; 0 if it has none."""
        with contextlib.suppress(OSError, ValueError, ImportError):
            if not self._is_known(self.given):
                from titanlite.models.hf.families import num_experts

                return num_experts(self)
        return 0

    def problems(self, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
        """What is wrong with the folder, the class or the sizes, as (key, message)."""
        if importlib.util.find_spec("transformers") is None:
            message = '"hf" needs transformers; install titanlite[hf], or another model'
            return [("model.name", message)]
        if (self.path is None) == (self.config_class is None):
            return [("model.path", "give either path, a folder with config.json, or config_class")]
        try:
            given = self.given
        except OSError as error:
            wrong = f'"{self.path}" has no config.json that can be read ({error})'
            return [("model.path", f"{wrong}; give a folder that from_pretrained reads")]
        except ValueError as error:
            return [("model.path", f'"{self.path}/config.json" is not JSON ({error}); repair it')]
        table = given.get(TP_TABLE, {})
        if not isinstance(table, dict) or not all(isinstance(e, str) for e in table.values()):
            message = f"{TP_TABLE} is not a table of module names and styles; correct it"
            return [("model.values", message)]
        if self._is_known(given):
            return self._size_problems(given, dims)
        # Other families are judged by the model itself, which needs torch.
        from titanlite.models.hf.families import missing

        return missing(self, dims.tp, dims.pp, dims.cp)

    def _is_known(self, given: dict[str, Any]) -> bool:
        if TP_TABLE in given and not self._is_gpt2(given):
            return False
        if self.config_class is not None:
            return self.config_class in FAMILIES
        return given.get("model_type") in FAMILIES.values()

    def _is_gpt2(self, given: dict[str, Any]) -> bool:
        return "gpt2" in (FAMILIES.get(self.config_class or ""), given.get("model_type"))

    def _gpt2_problems(
        self, given: dict[str, Any], dims: ParallelDims
    ) -> Iterator[tuple[str, str]]:
        if TP_TABLE in given:
            yield (
                "model.values",
                f"GPT-2 is sharded by titanlite's own plan, which ignores {TP_TABLE}; remove it, "
                "or register a plan of your own (docs/huggingface.md)",
            )
        # GPT-2's own defaults are 12 heads, 768 features, and dropout of 0.1.
        inner = given.get("n_inner") or 4 * given.get("n_embd", 768)
        yield from share_problems(dims.tp, {"n_head": given.get("n_head", 12), "n_inner": inner})
        names = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
        if dropped := ", ".join(name for name in names if given.get(name, 0.1)):
            message = f"GPT-2 drops out differently under each plan; set {dropped} to 0"
            yield "model.values", message

    def _size_problems(self, given: dict[str, Any], dims: ParallelDims) -> list[tuple[str, str]]:
        if self._is_gpt2(given):
            return list(self._gpt2_problems(given, dims))
        heads = given.get("num_attention_heads")
        kv_heads = given.get("num_key_value_heads") or heads
        numbers = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        known = {name: number for name, number in numbers.items() if isinstance(number, int)}
        found = share_problems(dims.tp, known)
        if dropout := given.get("attention_dropout"):
            message = f"attention_dropout {dropout} differs between plans; set it to 0"
            found.append(("model.values", message))
        return found


FLAVORS = {"config": HFConfig()}
