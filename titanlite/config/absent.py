"""Sections of TorchTitan's that titanlite does not act on.

What turns a feature on (`enable`, or model.converters for [quantize]) is refused; the keys that
only say more about it have no effect without it, in TorchTitan either, and are accepted.
"""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from titanlite.config.fields import Inert, NotYet, Section, Values, key


class MXLinear(Section):
    """Linear layers in MX formats"""

    mxfp8_dim1_cast_kernel_choice: Inert[str] = key("triton", "which kernel casts")
    recipe_name: Inert[str] = key("mxfp8_cublas", "which format")
    filter_fqns: Inert[Values[str]] = key(("output",), "layers left as they are, by name")


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
