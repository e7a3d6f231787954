"""Attention over a sequence that is shared out over ranks: ring attention and its layouts."""

from titanlite.attention.kernels import choose_kernel, explain_choice
from titanlite.attention.layout import LAYOUTS, Layout, make_layout
from titanlite.attention.ring import RingAttention, ring_attention
from titanlite.attention.rotation import ROTATE_METHODS

__all__ = [
    "LAYOUTS",
    "ROTATE_METHODS",
    "Layout",
    "RingAttention",
    "choose_kernel",
    "explain_choice",
    "make_layout",
    "ring_attention",
]
