"""The loss of TorchTitan in 2024 and June 2025: of all logits at once, in float32.

train.py at commit 9dec370, where it is not compiled; components/loss.py at 820504e.
"""

import torch.nn.functional as F
from torch import Tensor

import titanlite
from titanlite.modules.batch import IGNORE_INDEX, Batch


def total(logits: Tensor, batch: Batch) -> Tensor:
    logits, targets = logits.flatten(0, -2).float(), batch.targets.flatten()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


titanlite.register_loss("loss_2024", total)
