"""Sections of TorchTitan's that titanlite does not act on: known by name, accepted at defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from titanlite.config.fields import NotYet, Section, Values, key


class Checkpoint(Section):
    """Saving and loading training state"""

    enable: NotYet[bool] = key(False, "save and load checkpoints")
    folder: NotYet[str] = key("checkpoint", "folder in dump_folder for checkpoints")
    interval: NotYet[PositiveInt] = key(500, "steps from one checkpoint to the next")
    initial_load_path: NotYet[str | None] = key(None, "checkpoint to start from")
    initial_load_model_only: NotYet[bool] = key(True, "of that, load the weights alone")
    initial_load_in_hf: NotYet[bool] = key(False, "it is in Hugging Face's format")
    initial_load_in_hf_quantized: NotYet[bool] = key(False, "it is quantized")
    last_save_model_only: NotYet[bool] = key(True, "the last checkpoint holds the weights alone")
    last_save_in_hf: NotYet[bool] = key(False, "the last one is in Hugging Face's format")
    export_dtype: NotYet[Literal["float32", "float16", "bfloat16"]] = key(
        "float32", "number format of the last one"
    )
    async_mode: NotYet[Literal["disabled", "async", "async_with_pinned_mem"]] = key(
        "disabled", "save while training goes on"
    )
    keep_latest_k: NotYet[NonNegativeInt] = key(10, "checkpoints kept; 0: all")
    load_step: NotYet[Annotated[int, Field(ge=-1)]] = key(-1, "step to load; -1: the latest")
    exclude_from_loading: NotYet[Values[str]] = key((), "parts of the state not to load")
    enable_first_step_checkpoint: NotYet[bool] = key(False, "save after the first step too")
    create_seed_checkpoint: NotYet[bool] = key(False, "save the initial weights and stop")
    load_only: NotYet[bool] = key(False, "load, never save")
    enable_ft_dataloader_checkpoints: NotYet[bool] = key(True, "data state of fault tolerance")


class Float8Linear(Section):
    """Linear layers in float8"""

    enable_fsdp_float8_all_gather: NotYet[bool] = key(False, "FSDP gathers weights in float8")
    precompute_float8_dynamic_scale_for_fsdp: NotYet[bool] = key(False, "scales of those at once")
    recipe_name: NotYet[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None] = key(
        None, "how values are scaled"
    )
    filter_fqns: NotYet[Values[str]] = key((), "layers left as they are, by name")
    emulate: NotYet[bool] = key(False, "compute on hardware without float8")


class MXLinear(Section):
    """Linear layers in MX formats"""

    mxfp8_dim1_cast_kernel_choice: NotYet[str] = key("triton", "which kernel casts")
    recipe_name: NotYet[str] = key("mxfp8_cublas", "which format")
    filter_fqns: NotYet[Values[str]] = key(("output",), "layers left as they are, by name")


class QuantizedLinear(Section):
    """Linear layers"""

    float8: Float8Linear = Float8Linear()
    mx: MXLinear = MXLinear()


class GroupedMMFloat8(Section):
    """Expert products in float8"""

    fqns: NotYet[Values[str]] = key((), "layers, by name")


class GroupedMMMX(Section):
    """Expert products in MX formats"""

    recipe_name: NotYet[str] = key("mxfp8", "which format")
    fqns: NotYet[Values[str]] = key((), "layers, by name")


class QuantizedGroupedMM(Section):
    """Products of experts"""

    float8: GroupedMMFloat8 = GroupedMMFloat8()
    mx: GroupedMMMX = GroupedMMMX()


class Quantize(Section):
    """Low-precision formats"""

    linear: QuantizedLinear = QuantizedLinear()
    grouped_mm: QuantizedGroupedMM = QuantizedGroupedMM()


class FaultTolerance(Section):
    """Replicas that come and go (TorchFT)"""

    enable: NotYet[bool] = key(False, "train on while replicas fail")
    process_group: NotYet[str] = key("gloo", "backend between replicas")
    process_group_timeout_ms: NotYet[PositiveInt] = key(10000, "longest wait between replicas")
    replica_id: NotYet[NonNegativeInt] = key(0, "which replica this is")
    group_size: NotYet[NonNegativeInt] = key(0, "most replicas")
    min_replica_size: NotYet[PositiveInt] = key(1, "fewest replicas")
    semi_sync_method: NotYet[str | None] = key(None, "replicas in step only now and then")


class MemoryEstimation(Section):
    """Memory of a job without running it"""

    enable: NotYet[bool] = key(False, "estimate and stop")
    disable_fake_mode: NotYet[bool] = key(False, "estimate with real tensors")
