"""Attention: of a whole sequence, and ring attention over a sequence that is sharded over ranks.

dense.py      causal attention on one rank, and the cache of its keys and values for sampling
kernels.py    attention of one block, with its log-sum-exp
layout.py     which tokens each rank holds
rotation.py   how keys and values reach other ranks
ring.py       ring_attention, which combines the three
huggingface.py    ring attention for models of transformers
"""

from titanlite.attention.dense import CausalAttention, KeyValueCache
from titanlite.attention.huggingface import register_ring_attention
from titanlite.attention.kernels import choose_kernel, explain_choice
from titanlite.attention.layout import LAYOUTS, Layout, make_layout
from titanlite.attention.ring import RingAttention, ring_attention
from titanlite.attention.rotation import ROTATE_METHODS

__all__ = [
    "LAYOUTS",
    "ROTATE_METHODS",
    "CausalAttention",
    "KeyValueCache",
    "Layout",
    "RingAttention",
    "choose_kernel",
    "explain_choice",
    "make_layout",
    "register_ring_attention",
    "ring_attention",
]
