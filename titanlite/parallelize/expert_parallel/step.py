"""Expert parallelism as a step: its row of the effective plan."""

from titanlite.modules.experts import expert_layers
from titanlite.parallelize.expert_parallel.apply import apply_ep
from titanlite.parallelize.part import FeatureStep, Part
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    meshes, dims, feature = part.meshes, part.dims, "expert parallel"
    report = apply_ep(part.model, meshes.ep, tp_mesh=meshes.tp, cp_mesh=meshes.cp, plan=part.plan)
    known = expert_layers([part.whole or part.model])
    if not known or meshes.experts is None:
        return PlanRow(feature, "off", "off")
    number = next(iter(known.values())).num_experts
    notes = [f"{len(report.layers)} blocks of {number} experts"]
    notes.append(f"{number // dims.ep} on each rank of ep" if dims.ep_enabled else "not cut by tp")
    if dims.num_expert_shards > 1:
        notes.append(f"each expert sharded {dims.num_expert_shards} ways by FSDP2")
    if dims.num_replicas > 1:
        notes.append(f"{dims.num_replicas} replicas")
    name = f"EP {dims.ep}" if dims.ep_enabled else "off"
    # A stage may have no experts.
    return PlanRow(feature, name, name if report.layers or part.whole else "off", "; ".join(notes))


STEP = FeatureStep(apply)
