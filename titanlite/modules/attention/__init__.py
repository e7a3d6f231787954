"""Attention of a whole sequence, and which tokens each rank holds of a sequence that is sharded.

dense.py      causal attention on one rank, and the cache of its keys and values for sampling
documents.py  what the host knows of a batch's documents
kernels.py    attention of one block, with its log-sum-exp
layout.py     which tokens each rank holds
"""

from titanlite.modules.attention.dense import CausalAttention as CausalAttention
from titanlite.modules.attention.dense import KeyValueCache as KeyValueCache
from titanlite.modules.attention.kernels import choose_kernel as choose_kernel
from titanlite.modules.attention.kernels import explain_choice as explain_choice
from titanlite.modules.attention.layout import LAYOUTS as LAYOUTS
from titanlite.modules.attention.layout import Layout as Layout
from titanlite.modules.attention.layout import make_layout as make_layout
