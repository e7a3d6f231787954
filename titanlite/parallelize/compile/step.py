"""torch.compile as a step: its row of the effective plan."""

from titanlite.parallelize.compile.apply import apply_compile
from titanlite.parallelize.part import FeatureStep, Part
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    section = part.config.compile
    requested = " + ".join(section.components)
    notes = []
    if "model" in section.components:
        report = apply_compile(part.model, backend=section.backend, plan=part.plan)
        notes.append(f"{len(report.blocks)} blocks")
    if "loss" in section.components:
        notes.append("the loss")
    return PlanRow("compile", requested, requested, f"{' and '.join(notes)} with {section.backend}")


STEP = FeatureStep(apply)
