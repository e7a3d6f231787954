"""The modules that the fork server imports once for all local ranks; only it imports this file.

Garbage collection is off during the imports, which makes them a third cheaper. The imported objects
are then frozen: no rank scans them for garbage, or copies the pages shared with the fork server.

The fork server ends without unloading PyTorch, which takes as long as a fifth of importing it. It
ends early if the launcher is gone, for instance because the job has a mistake.
"""

import atexit
import gc
import os
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
    "titanlite.observe.reporter",
    "titanlite.data.images.digits",
)

FORK_SERVER, LAUNCHER = os.getpid(), os.getppid()


def _end_at_once() -> None:
    # Ranks inherit this function, and end in their own way.
    if os.getpid() == FORK_SERVER:
        os._exit(0)


gc.disable()
for name in MODULES:
    if os.getppid() != LAUNCHER:
        os._exit(0)
    import_module(name)
# The functions that are registered last run first.
atexit.register(_end_at_once)
gc.freeze()
gc.enable()
