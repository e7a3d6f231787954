"""Sizes of the plain model; torch-free."""

from dataclasses import dataclass

from titanlite.mesh.parallel_dims import ParallelDims


@dataclass(frozen=True)
class PlainConfig:
    """A few blocks over 8 x 8 images."""

    dim: int = 32
    hidden_dim: int = 64
    num_layers: int = 2
    vocab_size: int = 17
    image_height: int = 8
    image_width: int = 8
    image_channels: int = 1

    @property
    def seq_len(self) -> int:
        return self.image_height * self.image_width * self.image_channels

    def problems(self, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
        if self.hidden_dim % dims.tp:
            message = f"{dims.tp} does not divide model.hidden_dim {self.hidden_dim}"
            return [("parallelism.tensor_parallel_degree", message)]
        return []


FLAVORS = {"small": PlainConfig()}
