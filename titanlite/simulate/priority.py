"""Which of several works that could start at once a worker takes: the smallest key.

A priority is a function of a frontier work, the one that has just ended and whose successor is
waiting. Any callable from Work to something comparable will do; the three below know a formula
for theirs, so that they cost nothing.
"""

from __future__ import annotations

from titanlite.simulate.work import Direction, Work


class Lexicographic:
    """Keys as integers: `key_at_batch_zero(stage, direction) + per_batch * batch`."""

    per_batch: int

    def __init__(self, num_stages: int, num_batches: int) -> None:
        # Stage -1 is the frontier of a batch that has not begun: num_stages + 1 stages in all.
        self.stages = num_stages + 1
        self.batches = num_batches

    def key_at_batch_zero(self, stage: int, direction: int) -> int:
        raise NotImplementedError

    def __call__(self, work: Work) -> int:
        return self.key_at_batch_zero(work.stage, work.direction) + self.per_batch * work.batch


class OldestBatchFirst(Lexicographic):
    """By batch, then forward before backward, then stage."""

    @property
    def per_batch(self) -> int:  # type: ignore[override]
        return 2 * self.stages

    def key_at_batch_zero(self, stage: int, direction: int) -> int:
        return direction * self.stages + stage + 1


class OldestStageFirst(Lexicographic):
    """By stage, then forward before backward, then batch."""

    per_batch = 1

    def key_at_batch_zero(self, stage: int, direction: int) -> int:
        return (2 * (stage + 1) + direction) * self.batches


class BackwardFirst(Lexicographic):
    """Backward before forward, then by batch, then by stage."""

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
