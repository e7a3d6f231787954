"""Sections of TorchTitan's that titanlite does not act on.

What turns a feature on (`enable`, or model.converters for [quantize]) is refused; the keys that
only say more about it have no effect without it, in TorchTitan either, and are accepted.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from titanlite.config.fields import Inert, NotYet, Section, Values, key


class Float8Linear(Section):
    """Linear layers in float8"""

    enable_fsdp_float8_all_gather: Inert[bool] = key(False, "FSDP gathers weights in float8")
    precompute_float8_dynamic_scale_for_fsdp: Inert[bool] = key(False, "scales of those at once")
    recipe_name: Inert[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None] = key(
        None, "how values are scaled"
    )
    filter_fqns: Inert[Values[str]] = key((), "layers left as they are, by name")
    emulate: Inert[bool] = key(False, "compute on hardware without float8")


class MXLinear(Section):
    """Linear layers in MX formats"""

    mxfp8_dim1_cast_kernel_choice: Inert[str] = key("triton", "which kernel casts")
    recipe_name: Inert[str] = key("mxfp8_cublas", "which format")
    filter_fqns: Inert[Values[str]] = key(("output",), "layers left as they are, by name")


class QuantizedLinear(Section):
    """Linear layers"""

    float8: Float8Linear = Float8Linear()
    mx: MXLinear = MXLinear()


class GroupedMMFloat8(Section):
    """Expert products in float8"""

    fqns: Inert[Values[str]] = key((), "layers, by name")


class GroupedMMMX(Section):
    """Expert products in MX formats"""

    recipe_name: Inert[str] = key("mxfp8", "which format")
    fqns: Inert[Values[str]] = key((), "layers, by name")


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
    process_group: Inert[str] = key("gloo", "backend between replicas")
    process_group_timeout_ms: Inert[PositiveInt] = key(10000, "longest wait between replicas")
    replica_id: Inert[NonNegativeInt] = key(0, "which replica this is")
    group_size: Inert[NonNegativeInt] = key(0, "most replicas")
    min_replica_size: Inert[PositiveInt] = key(1, "fewest replicas")
    semi_sync_method: Inert[str | None] = key(None, "replicas in step only now and then")


class MemoryEstimation(Section):
    """Memory of a job without running it"""

    enable: NotYet[bool] = key(False, "estimate and stop")
    disable_fake_mode: Inert[bool] = key(False, "estimate with real tensors")
