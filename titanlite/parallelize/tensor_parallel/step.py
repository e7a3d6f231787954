"""Tensor parallelism as a step: its row of the effective plan."""

from titanlite.parallelize.part import FeatureStep, Part
from titanlite.parallelize.plan import match_modules
from titanlite.parallelize.tensor_parallel.apply import apply_tp
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    config, meshes, plan, whole = part.config, part.meshes, part.plan, part.whole
    degree = config.parallelism.tensor_parallel_degree
    assert meshes.tp is not None
    loss_parallel = not config.parallelism.disable_loss_parallel
    elsewhere = {
        pattern
        for pattern in (*plan.tensor_parallel, *plan.loss_parallel)
        if whole is not None and match_modules(whole, pattern)
    }
    report = apply_tp(
        part.model,
        meshes.tp,
        plan,
        loss_parallel=loss_parallel,
        rings=config.parallelism.overlap_backend(meshes.tp.device_type) == "ring",
        known_unmatched=frozenset(elsewhere),
    )
    part.rings = report.rings
    unmatched = [pattern for pattern in report.unmatched if pattern not in elsewhere]
    notes = [f"{len(report.parallelized)} modules"]
    if plan.sequence_dim is not None:
        notes[0] += ", sequence parallel"
    notes.append("loss parallel" if loss_parallel else "logits gathered")
    if report.replicated:
        notes.append(f"replicated, with fewer rows than ranks: {', '.join(report.replicated)}")
    if unmatched:
        notes.append(f"plan keys without a module: {', '.join(unmatched)}")
    return PlanRow("tensor parallel", f"TP {degree}", f"TP {meshes.tp.size()}", "; ".join(notes))


STEP = FeatureStep(apply)
