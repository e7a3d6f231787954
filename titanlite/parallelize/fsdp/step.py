"""Data parallelism as a step: FSDP2 or DDP, and the row of the effective plan."""

from titanlite.mesh.parallel_dims import axes_where
from titanlite.parallelize.fsdp.apply import apply_fsdp, can_pin
from titanlite.parallelize.part import DTYPES, FeatureStep, Part
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    model, config, dims, meshes = part.model, part.config, part.dims, part.meshes
    training, parallelism = config.training, config.parallelism
    param, reduce = training.param_dtype, training.reduce_dtype
    is_mixed = training.is_mixed
    asked = dims.degree_of(axes_where(batch="samples", weights="sharded"))
    requested = _data_parallel_name(dims.num_replicas, asked)
    is_plain = not is_mixed and not training.enable_cpu_offload
    if not dims.uses_fsdp(is_plain=is_plain, has_experts=meshes.experts is not None):
        if dims.num_replicas == 1:
            return PlanRow("data parallel", requested, "off")
        report = part.ddp(model, meshes.dp[dims.replica_dim], compiled=config.compile.enable)
        note = f"buckets of {report.bucket_cap_mb} MB"
        return PlanRow("data parallel", requested, requested, note)
    own_shards = meshes.experts is not None and dims.num_expert_shards > 1
    pins = training.cpu_offload_pin_memory and can_pin(meshes.world.device_type)
    units = apply_fsdp(
        model,
        meshes.dp,
        param_dtype=DTYPES[param] if is_mixed else None,
        reduce_dtype=DTYPES[reduce] if is_mixed else None,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        pipelined=dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        pin_memory=pins,
        expert_mesh=meshes.expert_dp,
        plan=part.plan,
    ).num_units
    num_shards = dims.num_weight_shards
    active = _data_parallel_name(dims.num_replicas, num_shards)
    notes = [f"{units} unit{'s' * (units != 1)}"]
    notes.append(f"reshard after forward: {parallelism.fsdp_reshard_after_forward}")
    if dims.cp_enabled:
        reason = f"the {dims.cp} ranks of cp share one set of weights, so FSDP2 shards over them"
        notes.insert(0, reason)
    if num_shards == 1:
        active = f"HSDP {dims.num_replicas} x 1" if dims.num_replicas > 1 else "FSDP 1"
        reasons = {
            "replicas of tensor-parallel shards": dims.num_replicas > 1 and dims.tp > 1,
            "replicas of stages": dims.num_replicas > 1 and dims.pp > 1 and dims.tp == 1,
            "mixed precision": is_mixed,
            "CPU offload": training.enable_cpu_offload,
            f"experts sharded over the {dims.num_expert_shards} ranks of efsdp": own_shards,
        }
        why = ", ".join(reason for reason, applies in reasons.items() if applies)
        notes.insert(0, f"FSDP2 with one shard, for {why}")
    if is_mixed:
        notes.append(f"computes in {param}, reduces in {reduce}")
    if training.enable_cpu_offload:
        notes.append(f"parameters on the CPU, {'pinned' if pins else 'not pinned'}")
    return PlanRow("data parallel", requested, active, "; ".join(notes))


def _data_parallel_name(num_replicas: int, num_shards: int) -> str:
    if num_shards == 1:
        return "off" if num_replicas == 1 else f"DDP {num_replicas}"
    return f"FSDP {num_shards}" if num_replicas == 1 else f"HSDP {num_replicas} x {num_shards}"


STEP = FeatureStep(apply)
