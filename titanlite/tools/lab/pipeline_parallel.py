"""Pipeline parallelism by hand: every rank has some of the layers; microbatches pass through them.

A rank runs a list of actions, each the forward or backward of a microbatch. GPipe (Huang et al.
2019, https://arxiv.org/abs/1811.06965) runs all forwards, then all backwards. 1F1B
(PipeDream-Flush, Narayanan et al. 2021, https://arxiv.org/abs/2006.09503) runs each backward as
early as possible. It takes the same time, but stage s of W holds at most W - s microbatches.
"""

from collections.abc import Callable, Sequence

import torch
from torch.profiler import record_function

from titanlite.tools.lab import lecture
from titanlite.tools.lab.communicator import Communicator, Pending, TorchCommunicator

FORWARD, BACKWARD = "forward", "backward"
Action = tuple[str, int]


def pipeline_parallelism_main(
    rank: int,
    world_size: int,
    data: torch.Tensor,
    num_layers: int,
    num_micro_batches: int,
    *,
    num_steps: int = 1,
    schedule: str = "1f1b",
    overlap: bool = False,
    communicator: Communicator | None = None,
) -> lecture.TrainingRecord:
    """Train on all of `data` (batch, num_dim) with this rank's num_layers / world_size layers.

    W ranks and M microbatches take (W-1) M sends forward and as many backward. With `overlap`, the
    receive for the next action is posted before the current one computes. Only the last rank's
    record has losses. Raises ValueError if layers or batch do not divide evenly, KeyError for a
    schedule other than "gpipe" and "1f1b".
    """
    lecture.setup(rank, world_size)
    communicator = communicator or TorchCommunicator()
    data = data.to(lecture.get_device(rank))
    local_num_layers = lecture.int_divide(num_layers, world_size)
    lecture.int_divide(data.size(0), num_micro_batches)
    params = lecture.get_layers(
        data, range(rank * local_num_layers, (rank + 1) * local_num_layers), rank
    )
    actions = SCHEDULES[schedule](rank, world_size, num_micro_batches)
    record = lecture.TrainingRecord()

    def forward_and_backward() -> float | None:
        return run_stage(
            actions,
            lambda x: lecture.chain(x, params.values()),
            # Only the first stage reads the data; the others use only its shape.
            data.chunk(num_micro_batches),
            communicator,
            previous_rank=rank - 1 if rank > 0 else None,
            next_rank=rank + 1 if rank + 1 < world_size else None,
            record=record,
            overlap=overlap,
        )

    lecture.train(record, params, num_steps, forward_and_backward)
    lecture.cleanup()
    return record


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """All forwards, then all backwards."""
    order = range(num_micro_batches)
    return [(FORWARD, m) for m in order] + [(BACKWARD, m) for m in order]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """One forward per later stage, then alternating forwards and backwards, then backwards."""
    num_ahead = min(num_stages - 1 - stage, num_micro_batches)
    actions = [(FORWARD, m) for m in range(num_ahead)]
    for m in range(num_micro_batches - num_ahead):
        actions += [(FORWARD, m + num_ahead), (BACKWARD, m)]
    return actions + [
        (BACKWARD, m) for m in range(num_micro_batches - num_ahead, num_micro_batches)
    ]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def run_stage(
    actions: Sequence[Action],
    forward: Callable[[torch.Tensor], torch.Tensor],
    micro_batches: Sequence[torch.Tensor],
    communicator: Communicator,
    *,
    previous_rank: int | None,
    next_rank: int | None,
    record: lecture.TrainingRecord,
    overlap: bool,
) -> float | None:
    """Run the actions of one stage; return the loss on the last stage.

    Gradients of all microbatches accumulate on the parameters. Each loss is divided by the number
    of microbatches, so the sum is the gradient of the mean over the whole batch.
    """
    receiving: dict[Action, tuple[torch.Tensor, Pending]] = {}
    sending: list[tuple[Pending, torch.Tensor]] = []
    live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    total_loss = 0.0

    def post_receive(action: Action) -> None:
        kind, m = action
        source = previous_rank if kind == FORWARD else next_rank
        if source is not None and action not in receiving:
            buffer = torch.empty_like(micro_batches[m])
            receiving[action] = (buffer, communicator.irecv(buffer, source))

    def received(action: Action) -> torch.Tensor:
        post_receive(action)
        buffer, work = receiving.pop(action)
        with record.waiting():
            work.wait()
        return buffer

    def send(tensor: torch.Tensor, target: int) -> None:
        # Do not wait here: two neighbours that both wait for their send first would deadlock.
        tensor = tensor.detach()
        sending.append((communicator.isend(tensor, target), tensor))

    for position, action in enumerate(actions):
        kind, m = action
        if overlap:
            # Post in the order of use, because messages between two ranks keep their order.
            for needed in actions[position : position + 2]:
                post_receive(needed)
        if kind == FORWARD:
            x = micro_batches[m] if previous_rank is None else received(action).requires_grad_()
            with record_function(f"F{m}"):
                y = forward(x)
            live[m] = (x, y)
            record.peak_micro_batches = max(record.peak_micro_batches, len(live))
            if next_rank is not None:
                with record_function(f"y{m}"):
                    send(y, next_rank)
        else:
            x, y = live.pop(m)
            if next_rank is None:
                with record_function(f"B{m}"):
                    loss = y.square().mean() / len(micro_batches)
                    total_loss += loss.item()
                    loss.backward()
            else:
                dy = received(action)
                with record_function(f"B{m}"):
                    y.backward(dy)
            if previous_rank is not None:
                assert x.grad is not None
                with record_function(f"dy{m}"):
                    send(x.grad, previous_rank)
    with record.waiting():
        for work, _ in sending:
            work.wait()
    return total_loss if next_rank is None else None
