"""TorchTitan's feed-forward module under its tensor-parallel plan, with gpt_oss's output layer."""

import sys

import spmd_types as spmd
import torch
from torch.nn.functional import mse_loss
from torchtitan.distributed import parallel_dims
from torchtitan.models.common import FeedForward, Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common import decoder_sharding as plans
from torchtitan.models.gpt_oss.sharding import scaled_bias_rowwise_config

import titanlite

parallel_dims.device_type = "cpu"  # TorchTitan asks for CUDA if there is no accelerator
DEGREES = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "world_size": 2}


def config(linear=Linear):
    w1, w3 = (Linear.Config(in_features=8, out_features=32) for _ in range(2))
    return FeedForward.Config(
        w1=w1, w3=w3, w2=linear.Config(in_features=32, out_features=8, bias=True)
    )


def model():
    return config().build()


def with_plan(mesh):
    is_corrected = "--corrected" in sys.argv
    parallel = config(Linear if is_corrected else ScaledBiasRowwiseLinear)
    whole = plans.dense_activation_placement(tp=spmd.I)
    plans.set_dense_ffn_sharding(parallel, attn_x_layout=whole, enable_sp=False)
    if not is_corrected:
        parallel.w2.sharding_config = scaled_bias_rowwise_config(output_sp=False)
    dims = parallel_dims.ParallelDims(**DEGREES, spmd_backend="partial_dtensor")
    dims.build_mesh()
    module = parallel.build()
    module.parallelize(dims)
    return module


def loss(model, x):
    y = model(x)
    return mse_loss(y if type(y) is torch.Tensor else y.full_tensor(), x)


torch.manual_seed(1)
batch = torch.randn(4, 6, 8)
options = {"batches": [batch], "loss": loss, "ranks": {"tp": 2}, "threads": True}
print(titanlite.compare(model, with_plan, **options))
