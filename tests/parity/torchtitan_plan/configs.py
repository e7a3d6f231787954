"""Jobs of TorchTitan's Llama 3 debug model under plans of our own; two have a wrong line."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.flex_shard import BlockShard, BucketConfig, ComputeLayout, Owned
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


def muon() -> Any:
    """DistMuon for two weights of each block: one matrix, and one for each 128 rows."""
    config = llama3_debugmodel()
    kinds = {"w1": Owned(), "w3": BlockShard(dim=0, block_size=128)}
    layouts = {
        f"layers.{number}.feed_forward.{name}.weight": ComputeLayout(
            shardings_by_mesh_axis={"dp_shard": kind, "fsdp": kind}
        )
        for number in range(len(config.model_spec.model.layers))
        for name, kind in kinds.items()
    }
    buckets = tuple(BucketConfig(name=name, patterns=(name,)) for name in layouts)
    names = {r"w[13]\.weight": "DistMuon", ".*": "AdamW"}
    config.optimizer = OptimizersContainer.Config(
        implementation="foreach",
        param_groups=[
            ParamGroupConfig(pattern=of, optimizer_name=name, optimizer_kwargs={"foreach": False})
            for of, name in names.items()
        ],
        optimizer_factory_kwargs_by_name={
            "DistMuon": {"bucket_configs": buckets, "compute_sharding_by_fqn": layouts}
        },
    )
    return config


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
