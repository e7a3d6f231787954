"""Build a Hugging Face causal language model of one of the families in config.py.

The model's own code runs. Added to it: its attention calls a submodule of each attention layer,
which context parallelism can replace; a pipeline stage has a forward that skips what the stage does
not have; and GPT-2's joined projection has a dimension for q, k and v, so that each can be sharded.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from titanlite.models.hf.config import HFConfig
from titanlite.models.hf.experts import adopt
from titanlite.modules.attention import CausalAttention
from titanlite.parallelize.context_parallel.huggingface import no_mask, scoring

if TYPE_CHECKING:
    from titanlite.modules.batch import Batch

ATTENTION = "titanlite_attention"

# transformers imports torchao if it is installed, which logs libraries built for other machines,
# and what torch deprecates of it.
logging.getLogger("torchao").addFilter(
    lambda record: not record.getMessage().startswith("Failed to load")
)
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant() on Enum subclasses" not in record.getMessage()
)


class JoinedConv1D(Conv1D):
    """GPT-2's Conv1D that computes q, k and v, [B, T, 3 x E], with a weight [E, 3, E].

    The three are a dimension of their own, so sharding the last dimension gives every rank the same
    heads of q, k and v. In memory, in a Hugging Face folder and for Muon, it is [E, 3 x E].
    """

    is_one_matrix = True

    def __init__(self, joined: Conv1D) -> None:
        nn.Module.__init__(self)
        self.nf, self.nx = joined.nf, joined.nx
        self.weight = nn.Parameter(joined.weight.detach().unflatten(-1, (3, -1)))
        self.bias = nn.Parameter(joined.bias.detach().unflatten(-1, (3, -1)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.flatten(-2) + self.bias.flatten()


def configuration(sizes: HFConfig) -> Any:
    """The configuration of transformers for a folder's config.json, or of a configuration class."""
    if sizes.path is not None:
        # from_pretrained would look for a missing folder on the network.
        given = sizes.given
        return transformers.CONFIG_MAPPING[given.pop("model_type")].from_dict(given)
    return getattr(transformers, str(sizes.config_class))(**sizes.values)


def build(sizes: HFConfig) -> nn.Module:
    """The model of a folder's config.json or of a configuration class, with its own classes."""
    config = configuration(sizes)
    config.use_cache = False
    transformers.AttentionInterface.register(ATTENTION, _attend)
    # None: the attention itself is causal, and positions need not be consecutive.
    AttentionMaskInterface.register(ATTENTION, no_mask)
    config._experts_implementation = "eager"  # of experts that `adopt` leaves as they are
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for module in list(model.modules()):
        if type(module).__name__.endswith("Attention"):
            module.add_module(ATTENTION, CausalAttention())
            if isinstance(getattr(module, "c_attn", None), Conv1D):
                module.c_attn = JoinedConv1D(module.c_attn)
    adopt(model)
    return model


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scaling: float | None = None,
    documents: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; the output is [B, T, H, E]."""
    keys = scoring(type(module).__name__, more)
    attention: nn.Module = getattr(module, ATTENTION)
    return attention(q, k, v, scale=scaling, documents=documents, **keys).transpose(1, 2), None


def inputs(batch: "Batch") -> dict[str, Any]:
    """The arguments of forward besides the tokens."""
    positions = batch.positions
    found = {"position_ids": positions.view(-1, positions.size(-1)), "use_cache": False}
    if positions.is_meta:
        # Without a mask, transformers reads the values of positions. Attention takes none.
        found["attention_mask"] = positions.new_ones(1, 1, 1, 1)
    if "documents" in batch.fields:
        found["documents"] = batch["documents"]
    return found


def output(result: Any) -> Tensor:
    """The logits in the result of forward."""
    return result.logits


def gpt2_stage_forward(
    self: Any, x: Tensor, position_ids: Tensor, use_cache: bool = False, **more: Any
) -> Tensor:
    """The same for GPT-2, which adds its table of positions to the embeddings."""
    inner = self.transformer
    if inner.wte is not None:
        x = inner.drop(inner.wte(x) + inner.wpe(position_ids))
    for block in inner.h:
        if block is not None:
            x = block(x, position_ids=position_ids, **more)
    if inner.ln_f is not None:
        x = inner.ln_f(x)
    return x if self.lm_head is None else self.lm_head(x)


def stage_forward(
    self: Any, x: Tensor, position_ids: Tensor, use_cache: bool = False, **more: Any
) -> Tensor:
    """The forward pass of a pipeline stage: the layers that it has, in order."""
    inner = self.model
    if inner.embed_tokens is not None:
        x = inner.embed_tokens(x)
    # Gemma 3 has a table of rotary embeddings for each type of layer.
    kinds = getattr(inner.rotary_emb, "layer_types", None)
    tables = {
        kind: inner.rotary_emb(x, position_ids, *([kind] if kinds else ()))
        for kind in kinds or [None]
    }
    for layer in inner.layers:
        if layer is not None:
            table = tables[layer.self_attn.layer_type if kinds else None]
            x = layer(x, position_ids=position_ids, position_embeddings=table, **more)
    if inner.norm is not None:
        x = inner.norm(x)
    if self.lm_head is None:
        return x
    logits: Tensor = self.lm_head(x)
    cap = getattr(self.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap
