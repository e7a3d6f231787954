"""The rotary model with tensors that no stage and no tensor-parallel style names."""

from dataclasses import replace

import torch
import torch.distributed as dist
from rotary_model.config import RotaryConfig
from rotary_model.model import Block, RotaryModel
from torch import Tensor, nn

from titanlite.modules.experts import ExpertLayer


class Adapter(nn.Module):
    """A wrapper with parameters of its own, one of which is called as one inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.module = nn.Linear(dim, dim, bias=False)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * self.weight


class ScaledBlock(Block):
    """A block with a LayerScale and an adapter."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.gamma = nn.Parameter(torch.ones(config.dim))
        self.adapter = Adapter(config.dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.gamma * self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.ffn_norm(x)) + 0.1 * self.adapter(x)


class Scaled(RotaryModel):
    """With a shift of the embeddings and a scalar factor on the logits, parameters of the root."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): ScaledBlock(config) for i in range(config.num_layers)})
        self.shift = nn.Parameter(torch.ones(config.dim))
        self.logit_scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.zeros(config.dim))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)
        x = tokens if self.tok_emb is None else self.tok_emb(tokens) + self.shift + self.offset
        for layer in self.layers.values():
            x = layer(x, positions)
        if self.output is None:
            return x
        assert self.norm is not None
        return self.output(self.norm(x)) * self.logit_scale

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if parameter.ndim < 2:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.3, generator=generator)

    def init_buffers(self) -> None:
        self.offset.fill_(0.5)


class ScaledSP(Scaled):
    """Cut with sequence parallelism; the plan says how the gradient of `shift` lies."""


class UndeclaredSP(Scaled):
    """The same, but the plan does not say it."""


class Uneven(Scaled):
    """With an initial value that depends on the rank."""

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        super().init_parameter(name, parameter, generator)
        if name == "shift":
            parameter += dist.get_rank()


class DeclaredWrong(Scaled):
    """Cut without sequence parallelism, with a plan that says so wrongly."""


class WrappedBlock(Block):
    """A block with a wrapper that has no parameters of its own."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.adapter = Adapter(config.dim)
        self.adapter.weight = None

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x + self.adapter.module(x), positions)


class Wrapped(RotaryModel):
    """With wrappers whose names without `module` are those of no other parameter."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        blocks = {str(i): WrappedBlock(config) for i in range(config.num_layers)}
        self.layers = nn.ModuleDict(blocks)


class MixedBlock(Block):
    """A block with experts."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        del self.feed_forward
        self.moe = ExpertLayer(config.dim, config.dim, num_experts=4, top_k=2)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.moe(self.ffn_norm(x).transpose(0, 1), positions).transpose(0, 1)


class Mixture(RotaryModel):
    """Experts, of which the configuration knows nothing."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({str(i): MixedBlock(config) for i in range(config.num_layers)})


class MixtureSP(Mixture):
    """Cut with sequence parallelism."""


class ConvolvedBlock(Block):
    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.mix = nn.Conv1d(config.dim, config.dim, 3, padding=1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x + self.mix(x.transpose(1, 2)).transpose(1, 2), positions)


class ConvolutionSP(RotaryModel):
    """A convolution over the tokens, without a style."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        blocks = {str(i): ConvolvedBlock(config) for i in range(config.num_layers)}
        self.layers = nn.ModuleDict(blocks)


class Unused(RotaryModel):
    """With a parameter that no stage uses."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.spare = nn.Parameter(torch.ones(config.dim))


class Statistics(RotaryModel):
    """With statistics of the batch, which differ between data-parallel ranks."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.seen = nn.BatchNorm1d(config.dim, affine=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        assert self.tok_emb is not None
        self.seen(self.tok_emb(tokens).detach().flatten(0, 1))
        return super().forward(tokens, positions)

    def init_buffers(self) -> None:
        self.seen.reset_running_stats()


class ManyHeads(RotaryModel):
    """With as many heads of keys as of queries."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(replace(config, num_kv_heads=config.num_heads))


class Drifting(RotaryModel):
    """With a buffer that each rank changes in its own way, though all read the same."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        self.mean += dist.get_rank()
        return super().forward(tokens, positions)

    def init_buffers(self) -> None:
        self.mean.zero_()


class Averaged(RotaryModel):
    """With a buffer that a forward pass changes by what its rank reads."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.training:
            self.mean.lerp_(tokens.float().mean().to(self.mean.dtype), 0.5)
        return super().forward(tokens, positions)

    def init_buffers(self) -> None:
        self.mean.zero_()


def count_call(block: nn.Module, _: object) -> None:
    block.calls += 1


class Counting(RotaryModel):
    """Each block counts its forward passes."""

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(config)
        for block in self.layers.values():
            block.register_buffer("calls", torch.zeros(()))
            block.register_forward_pre_hook(count_call)

    def init_buffers(self) -> None:
        for block in self.layers.values():
            block.calls.zero_()
