"""The two V-shaped schedules: rank r of p holds stage r (way down) and stage 2p-1-r (way up).

The first and the last stage are both on rank 0, so the backward pass of a microbatch starts on the
rank that ran its first forward. Both schedules are written as phases, in the order of execution.
"""

from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    Action,
)


def zbv(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """ZB-V: the same peak memory as 1F1B, and no bubble if F = B = W.

    Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 6.
    """
    # The phases assume a full pipeline; with fewer microbatches, the surplus actions are dropped.
    full = max(2 * ranks - 1, microbatches)
    down, up = _Chunk(rank), _Chunk(2 * ranks - 1 - rank)
    row: list[Action] = []

    for _ in range(2 * (ranks - rank) - 1):
        row.append(down.forward())
    for _ in range(rank):
        row += (up.forward(), down.forward())
    for _ in range(ranks - rank):
        row += (up.forward(), up.backward_input(), up.backward_weight())

    while up.forwards < down.forwards or down.forwards < full:
        if down.forwards < full:
            row.append(down.forward())
        row += (down.backward_input(), down.backward_weight())
        row += (up.forward(), up.backward_input(), up.backward_weight())

    for _ in range(rank):
        row += (down.backward_input(), up.backward_input())
    for _ in range(ranks - rank):
        row += (down.backward_input(), down.backward_weight())
    for chunk in (up, down):
        while chunk.weights < chunk.backwards:
            row.append(chunk.backward_weight())

    if full == microbatches:
        return row
    return [action for action in row if action.microbatch < microbatches]  # type: ignore[operator]


def dual_pipe_v(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """DualPipeV: a forward and a backward of different microbatches run as an overlapped pair.

    The V-shaped half of DeepSeek-V3's DualPipe, https://arxiv.org/abs/2412.19437 and
    https://github.com/deepseek-ai/DualPipe.
    """
    down, up = _Chunk(rank), _Chunk(2 * ranks - 1 - rank)
    after = ranks - rank - 1  # ranks behind this one in the V
    row: list[Action] = []
    owed: list[Action] = []  # deferred weight gradients, oldest first

    def split_backward(chunk: _Chunk) -> Action:
        action = chunk.backward_input()
        owed.append(chunk.backward_weight())
        return action

    def pay_weight() -> None:
        if owed:
            row.append(owed.pop(0))

    for _ in range(2 * after):
        row.append(down.forward())
    for _ in range(rank + 1):
        row += (down.forward(), up.forward())
    for _ in range(after):
        row.append(split_backward(up))
        pay_weight()
        row.append(up.forward())

    for i in range(microbatches - 2 * ranks + rank + 1):
        if i == 0 and after == 0:
            # On the last rank these two run separately: the forward then need not wait for the
            # gradient, and the bubble is smaller.
            row += (down.forward(), up.full_backward())
        else:
            row.append(_pair(down, up))
        row.append(_pair(up, down))
    for _ in range(after):
        row += (up.full_backward(), _pair(up, down))

    # In the second half of the drain, weight gradients are deferred to fill the bubble.
    drain = [up, down] * (rank + 1)
    for i, chunk in enumerate(drain):
        row.append(split_backward(chunk) if i > rank else chunk.full_backward())
    for _ in range(after):
        pay_weight()
        row.append(split_backward(down))
    while owed:
        pay_weight()
    return row


def _pair(forward: "_Chunk", backward: "_Chunk") -> Action:
    return Action(-1, OVERLAP_F_B, None, (forward.forward(), backward.full_backward()))


class _Chunk:
    """One stage of a rank, with the number of actions generated so far for each kind of work."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.forwards = self.backwards = self.weights = 0

    def forward(self) -> Action:
        self.forwards += 1
        return Action(self.stage, FORWARD, self.forwards - 1)

    def backward_input(self) -> Action:
        self.backwards += 1
        return Action(self.stage, BACKWARD_INPUT, self.backwards - 1)

    def backward_weight(self) -> Action:
        self.weights += 1
        return Action(self.stage, BACKWARD_WEIGHT, self.weights - 1)

    def full_backward(self) -> Action:
        self.backwards += 1
        self.weights += 1
        return Action(self.stage, FULL_BACKWARD, self.backwards - 1)
