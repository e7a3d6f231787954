"""One row of the effective plan, which every parallelize step returns; torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanRow:
    """A feature: the requested setting, the active one, and a note on details or the reason."""

    feature: str
    requested: str
    active: str
    note: str = ""

    @property
    def differs(self) -> bool:
        return self.requested != self.active
