"""Distributed training from scratch: every collective and every parallelism on real processes.

A virtual cluster of local processes, collectives built from send and receive, sharded operations,
and data, tensor and pipeline parallelism and ZeRO by hand. docs/lab/ explains the code;
`titanlite lab` runs it. Import names from here; torch is loaded on first use of a name.
"""

from typing import TYPE_CHECKING, Any

from titanlite.lazy import lazy

if TYPE_CHECKING:  # its names are many, and none of them is public

    def __getattr__(name: str) -> Any: ...


_HOME = {
    "cluster": ("VirtualCluster",),
    "device": ("VirtualDevice",),
    "channel": ("VirtualChannel", "DeviceChannel", "HostChannel"),
    "counts": ("Counts", "Collective"),
    "pictures": ("Record",),
    "record": ("Message", "Event", "TensorInfo"),
    "diagnosis": ("CommunicationError",),
    "link": ("Link",),
    "group": ("Group",),
    "mesh": ("Mesh", "MeshIndex", "MeshError"),
    "operation": ("Operation", "ShardedOperation"),
    "sharding": ("DimSharding", "TensorSharding", "ShardingError"),
    "resharding": ("reshard",),
    "matmul": ("MatMul", "MatMulBackward", "MatMulSharding", "MatMulShardingPolicy"),
    "feed_forward": (
        "FeedForward",
        "FeedForwardBackward",
        "FeedForwardSharding",
        "FeedForwardShardingPolicy",
    ),
    "lecture": (
        "TrainingRecord",
        "cleanup",
        "get_device",
        "get_init_params",
        "int_divide",
        "setup",
        "single_process_main",
        "spawn",
    ),
    "communicator": ("ChannelCommunicator", "Communicator", "TorchCommunicator", "over_channels"),
    "data_parallel": ("GradientBuckets", "data_parallelism_main"),
    "tensor_parallel": ("tensor_parallelism_main",),
    "pipeline_parallel": ("pipeline_parallelism_main", "gpipe", "one_forward_one_backward"),
    "zero": ("zero_parallelism_main",),
    "three_d_parallel": ("three_d_parallelism_main",),
    "pipelining": (
        "Pipeline",
        "PipelineError",
        "PipelineResult",
        "PipelineStage",
        "PipelinedOperation",
    ),
    "mlp": ("MLP",),
    "expert_parallel": ("Experts", "Load", "expert_parallel_layer", "single_process_layer"),
    "context_parallel": ("ring_attention", "shard_sequence", "unshard_sequence"),
    "bandwidth": ("Bandwidth", "measure_bandwidth"),
}

lazy(__name__, _HOME)
