"""The modules that the fork server imports once for all local ranks; only it imports this file.

Garbage collection is off during the imports, which makes them a third cheaper. The imported objects
are then frozen: no rank scans them for garbage, or copies the pages shared with the fork server.
"""

import gc
from importlib import import_module

MODULES = (
    "torch",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed._composable.replicate",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.optim",
    "torch._dynamo",  # imported by optimizers and dispatch modes at their first call
    "titanlite.job",
    # The modules that a training run imports on its ranks.
    "titanlite.run",
    "titanlite.checkpoint.run",
    "titanlite.reporter",
    "titanlite.data.images.build",
)

gc.disable()
for name in MODULES:
    import_module(name)
gc.freeze()
gc.enable()
