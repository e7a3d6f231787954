"""TorchTitan sections whose features titanlite does not have.

The key that turns a feature on (`enable`, or model.converters for [quantize]) is refused. The keys
that only configure the feature are accepted: without it they have no effect in TorchTitan either.
"""

from pydantic import NonNegativeInt, PositiveInt

from titanlite.fields import Inert, NotYet, Section, Values, key


class MXLinear(Section):
    """Linear layers in MX formats"""

    mxfp8_dim1_cast_kernel_choice: Inert[str] = key("triton", "kernel that casts")
    recipe_name: Inert[str] = key("mxfp8_cublas", "MX format")
    filter_fqns: Inert[Values[str]] = key(("output",), "names of layers that are not converted")


class GroupedMMFloat8(Section):
    """Expert matrix products in float8"""

    fqns: Inert[Values[str]] = key((), "names of layers")


class GroupedMMMX(Section):
    """Expert matrix products in MX formats"""

    recipe_name: Inert[str] = key("mxfp8", "MX format")
    fqns: Inert[Values[str]] = key((), "names of layers")


class QuantizedGroupedMM(Section):
    """Expert matrix products"""

    float8: GroupedMMFloat8 = GroupedMMFloat8()
    mx: GroupedMMMX = GroupedMMMX()


class FaultTolerance(Section):
    """Replicas that join and leave (TorchFT)"""

    enable: NotYet[bool] = key(False, "continue training when replicas fail")
    process_group: Inert[str] = key("gloo", "backend between replicas")
    process_group_timeout_ms: Inert[PositiveInt] = key(10000, "timeout between replicas")
    replica_id: Inert[NonNegativeInt] = key(0, "number of this replica")
    group_size: Inert[NonNegativeInt] = key(0, "largest number of replicas")
    min_replica_size: Inert[PositiveInt] = key(1, "smallest number of replicas")
    semi_sync_method: Inert[str | None] = key(
        None, "how replicas synchronize, if not at every step"
    )
