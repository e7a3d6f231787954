"""What titanlite knows of any nn.Module, whatever the plan.

batch.py            the fields of a batch, and how a model is called with them
attention/ experts/ dropout.py keyed.py    layers and random numbers that models are made of
names.py tied.py shards.py                 names of tensors, which are one, which part is here
draws.py            which modules draw from torch's own generators
gradient_sums.py    marks gradients that the step has to sum
"""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.modules.attention import Layout as Layout
    from titanlite.modules.attention import make_layout as make_layout
    from titanlite.modules.batch import Batch as Batch
    from titanlite.modules.batch import FieldDims as FieldDims
    from titanlite.modules.batch import call_model as call_model
    from titanlite.modules.batch import make_batch as make_batch
    from titanlite.modules.dropout import TokenDropout as TokenDropout
    from titanlite.modules.keyed import keyed_normal as keyed_normal
    from titanlite.modules.keyed import keyed_uniform as keyed_uniform
    from titanlite.modules.keyed import sample_keys as sample_keys
    from titanlite.modules.tied import find_tied as find_tied

PUBLIC = {
    "batch": ("make_batch", "Batch", "FieldDims", "call_model"),
    "attention": ("make_layout", "Layout"),
    "keyed": ("keyed_normal", "keyed_uniform", "sample_keys"),
    "dropout": ("TokenDropout",),
    "tied": ("find_tied",),
}
"""The public names, by module."""

lazy(__name__, PUBLIC)
