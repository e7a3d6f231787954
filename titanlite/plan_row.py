"""A row of the effective plan: what each part of titanlite says of what it did; torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanRow:
    """One feature: as the job asks for it, as it runs, and a note on how, or why not."""

    feature: str
    requested: str
    active: str
    note: str = ""

    @property
    def differs(self) -> bool:
        return self.requested != self.active
