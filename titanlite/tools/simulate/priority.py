"""Priorities: of several ready work items, a worker takes the one with the smallest key.

The key is computed from the frontier, the work item that has just ended and whose successor is
ready. Any callable from Work to a comparable value is a priority. The three below have a closed
formula, so the engine need not call them once per work item.
"""

from titanlite.tools.simulate.work import Direction, Work


class Lexicographic:
    """A priority with integer keys: `key_at_batch_zero(stage, direction) + per_batch * batch`."""

    per_batch: int

    def __init__(self, num_stages: int, num_batches: int) -> None:
        # A batch that has not started has its frontier at stage -1: one more value than stages.
        self.stages = num_stages + 1
        self.batches = num_batches

    def key_at_batch_zero(self, stage: int, direction: int) -> int:
        raise NotImplementedError

    def __call__(self, work: Work) -> int:
        return self.key_at_batch_zero(work.stage, work.direction) + self.per_batch * work.batch


class OldestBatchFirst(Lexicographic):
    """Order by batch, then forward before backward, then stage."""

    @property
    def per_batch(self) -> int:  # type: ignore[override]
        return 2 * self.stages

    def key_at_batch_zero(self, stage: int, direction: int) -> int:
        return direction * self.stages + stage + 1


class OldestStageFirst(Lexicographic):
    """Order by stage, then forward before backward, then batch."""

    per_batch = 1

    def key_at_batch_zero(self, stage: int, direction: int) -> int:
        return (2 * (stage + 1) + direction) * self.batches


class BackwardFirst(Lexicographic):
    """Order backward before forward, then by batch, then by stage."""

    @property
    def per_batch(self) -> int:  # type: ignore[override]
        return self.stages

    def key_at_batch_zero(self, stage: int, direction: int) -> int:
        forward = direction == Direction.FORWARD
        return forward * self.batches * self.stages + stage + 1


PRIORITIES = {
    "oldest-batch": OldestBatchFirst,
    "oldest-stage": OldestStageFirst,
    "backward": BackwardFirst,
}
