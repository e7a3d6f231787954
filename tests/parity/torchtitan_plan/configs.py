"""Jobs of TorchTitan's Llama 3 debug model under plans of our own; two have a wrong line."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from torchtitan.models.common.decoder_sharding import dense_activation_placement
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def right() -> Any:
    return llama3_debugmodel()


def unreduced_embedding() -> Any:
    return _job(_unreduced_embedding)


def divided_block() -> Any:
    return _job(_divided_block)


def stopped() -> Any:
    return _job(_stopped)


def _job(parallelize: Any) -> Any:
    config = llama3_debugmodel()
    config.model_spec.parallelize_fn = parallelize
    return config


def _stopped(model: Any, **options: Any) -> Any:
    def stop(*_: Any) -> None:
        if dist.get_rank() == 1:
            breakpoint()

    model = parallelize_llama(model, **options)
    model.layers["1"].register_forward_pre_hook(stop)
    return model


def _unreduced_embedding(model: Any, **options: Any) -> Any:
    replicated = dense_activation_placement(tp=spmd.R)
    model.tok_embeddings._sharding_config.out_src_shardings = replicated
    return parallelize_llama(model, **options)


def _divided_block(model: Any, **options: Any) -> Any:
    model = parallelize_llama(model, **options)
    model.layers["1"].set_gradient_divide_factor(2.0)
    return model
