"""How GPT-2 is stored in a Hugging Face folder: GPT2LMHeadModel; torch-free.

Its Conv1D layers store weights as [in, out], and c_attn joins q, k and v.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.models.gpt2.config import GPT2Config
from titanlite.models.hf_format import HFFormat, HFTensor, require

OUTER = {
    "tok_embeddings": "transformer.wte",
    "pos_embeddings": "transformer.wpe",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}
NORMS = {"attention_norm": "ln_1", "ffn_norm": "ln_2"}
JOINED = {"attention.wq": 0, "attention.wk": 1, "attention.wv": 2}
LINEAR = {
    "attention.wo": "attn.c_proj",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}


def tensor(name: str, shape: Sequence[int], _: GPT2Config) -> HFTensor:
    """Where a parameter is stored."""
    module, leaf = name.rsplit(".", 1)
    if module in OUTER:
        return HFTensor(f"{OUTER[module]}.{leaf}")
    number, inner = module.split(".", 2)[1:]
    block = f"transformer.h.{number}"
    if inner in NORMS:
        return HFTensor(f"{block}.{NORMS[inner]}.{leaf}")
    is_matrix = leaf == "weight"
    if inner in JOINED:
        rows = JOINED[inner] * shape[0], 3 * shape[0]
        return HFTensor(f"{block}.attn.c_attn.{leaf}", rows=rows, is_transposed=is_matrix)
    return HFTensor(f"{block}.{LINEAR[inner]}.{leaf}", is_transposed=is_matrix)


def config(sizes: GPT2Config) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": sizes.dim,
        "n_layer": sizes.n_layers,
        "n_head": sizes.n_heads,
        "n_positions": sizes.max_seq_len,
        "n_ctx": sizes.max_seq_len,
        "vocab_size": sizes.vocab_size,
        "layer_norm_epsilon": sizes.norm_eps,
        "embd_pdrop": sizes.dropout,
        "resid_pdrop": sizes.dropout,
        "attn_pdrop": 0.0,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def sizes(found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [model] for a config.json; raises ValueError for what this model lacks.

    Dropout is not among them: it does not change what the weights mean.
    """
    dim = found.get("n_embd", 768)
    require(found, "model_type", "gpt2")
    require(found, "activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    require(found, "n_inner", 4 * dim, None, default=None)
    require(found, "scale_attn_weights", True, default=True)
    require(found, "scale_attn_by_inverse_layer_idx", False, default=False)
    require(found, "tie_word_embeddings", True, default=True)
    return {
        "dim": dim,
        "n_layers": found.get("n_layer", 12),
        "n_heads": found.get("n_head", 12),
        "vocab_size": found.get("vocab_size", 50257),
        "max_seq_len": found.get("n_positions", 1024),
        "norm_eps": found.get("layer_norm_epsilon", 1e-5),
    }


FORMAT = HFFormat(
    tensor=tensor,
    config=config,
    sizes=sizes,
    prefix="transformer.",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
