"""Data parallelism by hand: every rank has the whole model and its own part of the batch.

The only difference from training in one process is that gradients are averaged over the ranks. They
are packed into buckets, in the order in which the backward pass computes them, and each bucket is
all-reduced at once. With `overlap`, the all-reduce of a full bucket runs while the backward pass
goes on, as in DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704,
section 3.2).
"""

from collections.abc import Callable, Sequence

import torch
from torch.profiler import record_function

from titanlite.tools.lab import lecture
from titanlite.tools.lab.communicator import Communicator, Pending, TorchCommunicator


def data_parallelism_main(
    rank: int,
    world_size: int,
    data: torch.Tensor,
    num_layers: int,
    num_steps: int,
    *,
    overlap: bool = False,
    bucket_bytes: int = 0,
    communicator: Communicator | None = None,
) -> lecture.TrainingRecord:
    """Train on this rank's equal share of the rows of `data` (batch, num_dim); average gradients.

    A bucket is full when it holds `bucket_bytes` or more; with 0, every gradient is a bucket. The
    mean of the ranks' gradients is the gradient of the global mean only if all parts have the same
    size. Raises ValueError if the batch does not divide evenly.
    """
    lecture.setup(rank, world_size)
    communicator = communicator or TorchCommunicator()
    local_batch_size = lecture.int_divide(data.size(0), world_size)
    data = data.split(local_batch_size)[rank].to(lecture.get_device(rank))
    params = lecture.get_layers(data, range(num_layers), rank)
    weights = list(params.values())
    gradients = GradientBuckets(weights, bucket_bytes, communicator, overlap=overlap)
    record = lecture.TrainingRecord()
    record.held_bytes["parameters"] = sum(param.nbytes for param in weights)

    def forward_and_backward() -> torch.Tensor:
        # The names of blocks appear in the record of a run and in profiles.
        with record_function("forward"):
            loss = lecture.chain(data, weights).square().mean()
        with record_function("backward"):
            loss.backward()
        with record.waiting():
            gradients.wait()
        record.held_bytes["gradients"] = sum(bucket.flat.nbytes for bucket in gradients.buckets)
        return loss.detach()

    lecture.train(record, params, num_steps, forward_and_backward)
    lecture.cleanup()
    return record


class Bucket:
    """Gradients that are all-reduced together: one flat tensor, and each parameter's view of it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = params
        self.flat = torch.cat([torch.zeros_like(param).detach().flatten() for param in params])
        sizes = [param.numel() for param in params]
        self.views = [
            part.view_as(param) for part, param in zip(self.flat.split(sizes), params, strict=True)
        ]
        self.num_missing = len(params)
        self.pending: Pending | None = None


class GradientBuckets:
    """Averages the gradients of `params` over the ranks, bucket by bucket.

    The backward pass computes the gradient of the last parameter first, so the first bucket has the
    last parameters. A hook copies each gradient into its bucket. With `overlap`, the all-reduce of
    a bucket starts when the bucket and all buckets before it are full: ranks may compute gradients
    in different orders, but must start their all-reduces in the same one. `wait` starts what has
    not been started and waits for everything; then `param.grad` is the average. Every parameter
    must get one gradient per step.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        bucket_bytes: int,
        communicator: Communicator,
        *,
        overlap: bool,
    ) -> None:
        self._communicator = communicator
        self._overlap = overlap
        self.buckets = [Bucket(part) for part in pack(params, bucket_bytes)]
        self._num_started = 0
        for bucket in self.buckets:
            for position, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self._make_hook(bucket, position))

    def wait(self) -> None:
        """Wait until every gradient is averaged. Raises RuntimeError if one was not computed."""
        missing = sum(bucket.num_missing for bucket in self.buckets)
        if missing:
            raise RuntimeError(
                f"{missing} parameters have no gradient, so their buckets are not full"
            )
        self._start_full_buckets()
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending = None
            bucket.num_missing = len(bucket.params)
        self._num_started = 0

    def _make_hook(self, bucket: Bucket, position: int) -> Callable[[torch.Tensor], None]:
        view = bucket.views[position]

        def fill(param: torch.Tensor) -> None:
            assert param.grad is not None
            # The mean is a sum of what each rank divides.
            torch.div(param.grad, self._communicator.size, out=view)
            param.grad = view
            bucket.num_missing -= 1
            if self._overlap:
                self._start_full_buckets()

        return fill

    def _start_full_buckets(self) -> None:
        for bucket in self.buckets[self._num_started :]:
            if bucket.num_missing:
                return
            bucket.pending = self._communicator.all_reduce(bucket.flat)
            self._num_started += 1


def pack(params: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    """`params` from last to first, in buckets that are closed at `bucket_bytes` or more."""
    buckets: list[list[torch.Tensor]] = []
    num_bytes = 0
    for param in reversed(params):
        if not buckets or num_bytes >= bucket_bytes:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(param)
        num_bytes += param.nbytes
    return buckets
