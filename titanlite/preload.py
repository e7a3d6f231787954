"""What the fork server imports once for all local ranks; nothing else imports this module.

Garbage collection is off meanwhile, which makes the imports a third cheaper. What they leave is
then frozen: no rank scans it for garbage, nor copies the pages it shares with the fork server.
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
    "torch._dynamo",  # which optimizers and dispatch modes import at their first call
    "titanlite.job",
    # What a training run imports on its ranks.
    "titanlite.train",
    "titanlite.checkpoint.run",
    "titanlite.reporter",
    "titanlite.data.images.build",
)

gc.disable()
for name in MODULES:
    import_module(name)
gc.freeze()
gc.enable()
