"""ZeRO by hand: data parallelism that shards optimizer state, gradients and parameters.

Stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 also the parameters
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). Stages 1 and 2 send as many bytes as
data parallelism: an all-reduce is a reduce-scatter and an all-gather, and the optimizer steps
between the two. Stage 3 gathers every layer twice and sends 1.5 times as much. FSDP is stage 3.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from titanlite.tools.lab import lecture
from titanlite.tools.lab.communicator import Communicator, Pending, TorchCommunicator


def zero_parallelism_main(
    rank: int,
    world_size: int,
    data: torch.Tensor,
    num_layers: int,
    num_steps: int,
    *,
    stage: int,
    overlap: bool = False,
    communicator: Communicator | None = None,
) -> lecture.TrainingRecord:
    """Train on this rank's equal share of the rows of `data` (batch, num_dim) with ZeRO 1, 2 or 3.

    The record's gradients and params are this rank's flat shards. `held_bytes` has the bytes of
    parameters, gradients and optimizer state at the optimizer step, and of one gathered layer. With
    `overlap`, layers are gathered one ahead, and reduce-scatters overlap the backward pass
    (stages 2 and 3). Raises ValueError if the batch does not divide evenly, or for another stage.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage: {stage} is not a ZeRO stage; use 1, 2 or 3")
    lecture.setup(rank, world_size)
    communicator = communicator or TorchCommunicator()
    local_batch_size = lecture.int_divide(data.size(0), world_size)
    num_global = data.numel()
    data = data.split(local_batch_size)[rank].to(lecture.get_device(rank))
    record = lecture.TrainingRecord()
    # One whole weight at a time.
    layers = [
        ShardedLayer(
            lecture.get_layers(data, [i], rank)[i].detach(),
            communicator,
            record,
            stage=stage,
            overlap=overlap,
        )
        for i in range(num_layers)
    ]

    def forward_and_backward() -> torch.Tensor:
        inputs, products = [], []
        x = data
        for i, layer in enumerate(layers):
            with record_function(f"W{i}"):
                weight = layer.gather()
            if overlap and i + 1 < num_layers:
                with record_function(f"W{i + 1}"):
                    layers[i + 1].start_gather()
            with record_function(f"F{i}"):
                inputs.append(x)
                products.append(x @ weight)
                x = F.gelu(products[-1])
            layer.free()
        loss = x.square().sum() / num_global

        # d loss / d x of the global mean, so gradients are summed over ranks, not averaged.
        dx = 2 * x / num_global
        for i in reversed(range(num_layers)):
            with record_function(f"W{i}"):
                weight = layers[i].gather()
            if overlap and i > 0:
                with record_function(f"W{i - 1}"):
                    layers[i - 1].start_gather()
            with record_function(f"B{i}"):
                dproduct = torch.ops.aten.gelu_backward(dx, products.pop())
                gradient = inputs.pop().T @ dproduct
            with record_function(f"dW{i}"):
                layers[i].reduce_gradient(gradient)
            if i > 0:
                dx = dproduct @ weight.T
            layers[i].free()
        for layer in layers:
            layer.finish_gradient()
        record.held_bytes["parameters"] = sum(layer.parameter_bytes for layer in layers)
        record.held_bytes["gradients"] = sum(layer.gradient_bytes for layer in layers)
        for layer in layers:
            layer.full_gradient = None
        # The losses of all ranks sum to the loss of the whole batch.
        return loss.detach()

    def publish() -> None:
        for layer in layers:
            layer.publish()

    shards = {i: layer.shard for i, layer in enumerate(layers)}
    lecture.train(record, shards, num_steps, forward_and_backward, publish)
    lecture.cleanup()
    return record


class ShardedLayer:
    """The weight of one layer, of which this rank updates a flat shard; one unit per collective.

    `shard` is a parameter of ceil(n / W) elements; the last rank's is padded with zeros. In stages
    1 and 2 it is a view of the whole weight. In stage 3 the whole weight is gathered when needed
    and freed afterwards.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        communicator: Communicator,
        record: lecture.TrainingRecord,
        *,
        stage: int,
        overlap: bool,
    ) -> None:
        self.shape = weight.shape
        self.communicator = communicator
        self.world_size = communicator.size
        self.record = record
        self.stage = stage
        self.overlap = overlap
        self.full_gradient: torch.Tensor | None = None
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._flat: torch.Tensor | None = self._padded(weight)
        shard = self._flat.chunk(self.world_size)[communicator.rank]
        if stage == 3:
            shard, self._flat = shard.clone(), None
        self.shard = nn.Parameter(shard)

    @property
    def parameter_bytes(self) -> int:
        return (self.shard if self._flat is None else self._flat).nbytes

    @property
    def gradient_bytes(self) -> int:
        gradient = self.shard.grad if self.full_gradient is None else self.full_gradient
        return 0 if gradient is None else gradient.nbytes

    def start_gather(self) -> None:
        """Start to all-gather the weight, unless it is present or in flight."""
        if self._flat is None:
            self._flat = self.shard.new_empty(self.world_size * self.shard.numel())
            self._all_gather(self._flat)
            self.record.held_bytes["gathered layer"] = self._flat.nbytes

    def gather(self) -> torch.Tensor:
        """The whole weight."""
        self.start_gather()
        if self._gathering is not None:
            with self.record.waiting():
                self._gathering.wait()
            self._gathering = None
        assert self._flat is not None
        return self._flat[: self.shape.numel()].view(self.shape)

    def free(self) -> None:
        """Free a gathered weight (stage 3)."""
        if self.stage == 3:
            self._flat = None

    def publish(self) -> None:
        """All-gather the updated shards, if this rank keeps the whole weight (stages 1 and 2)."""
        if self._flat is not None:
            self._all_gather(self._flat)
            self.gather()

    def reduce_gradient(self, gradient: torch.Tensor) -> None:
        """Keep this rank's gradient of the whole weight (stage 1), or reduce-scatter it."""
        if self.stage == 1:
            self.full_gradient = gradient
        else:
            self._start_reduce(gradient)
            if not self.overlap:
                self._wait_reduce()

    def finish_gradient(self) -> None:
        """Wait until `shard.grad` is the summed gradient; stage 1 reduce-scatters it here."""
        if self.stage == 1:
            assert self.full_gradient is not None
            self._start_reduce(self.full_gradient)
        self._wait_reduce()

    def _all_gather(self, flat: torch.Tensor) -> None:
        parts = list(flat.chunk(self.world_size))
        self._gathering = self.communicator.all_gather(parts, self.shard.detach().clone())

    def _start_reduce(self, gradient: torch.Tensor) -> None:
        self.shard.grad = torch.empty_like(self.shard)
        parts = list(self._padded(gradient).chunk(self.world_size))
        self._reducing = self.communicator.reduce_scatter(self.shard.grad, parts)

    def _wait_reduce(self) -> None:
        if self._reducing is not None:
            with self.record.waiting():
                self._reducing.wait()
            self._reducing = None

    def _padded(self, whole: torch.Tensor) -> torch.Tensor:
        """`whole`, flattened and padded with zeros so that it splits into equal parts."""
        size = -(-whole.numel() // self.world_size) * self.world_size
        return F.pad(whole.flatten(), (0, size - whole.numel()))
