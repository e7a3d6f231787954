"""Llama 3 with the loss and the RMSNorm of TorchTitan's published runs.

titanlite plan torchtitan:old_loss:llama3_8b, in this folder.
"""

import torch
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3 import config_registry


def composed(self, x):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
    return wide.type_as(x) * self.weight


def llama3_8b(config=None):
    config = config or config_registry.llama3_8b()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    RMSNorm.forward = composed
    return config


def llama3_70b():
    return llama3_8b(config_registry.llama3_70b())


def llama3_405b():
    return llama3_8b(config_registry.llama3_405b())
