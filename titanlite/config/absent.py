"""Sections of TorchTitan's that titanlite does not act on: known by name, accepted at defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from titanlite.config.fields import NotYet, Section, Values, key


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
