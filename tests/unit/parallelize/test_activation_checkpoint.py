"""What activation checkpointing keeps and repeats, counted; gradients stay the same to the bit.

Buffers too: recomputing a block uses their old values and changes none.
"""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.config import JobConfig
from titanlite.errors import TitanliteError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.image_transformer.config import FLAVORS
from titanlite.models.image_transformer.model import ImageTransformer
from titanlite.modules.names import canonical_name
from titanlite.parallelize import ParallelPlan, apply_ac, apply_compile
from titanlite.parallelize.activation_checkpoint.step import apply as activation_checkpoint
from titanlite.parallelize.part import Part
from titanlite.training.initial_weights import initialize

NUM_LAYERS, NUM_MM = 4, 7  # matrix multiplications in a block: q, k, v, o and three of SwiGLU
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """The storages that operators have made, and how many bytes of them are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


@functools.cache
def run(mode: str, option: str = "op", **arguments):
    """What a step reports, calls in its backward pass, keeps and computes; run once for each."""
    config = replace(FLAVORS["debug"], num_layers=NUM_LAYERS, zero_init_output=False)
    with torch.device("meta"):
        model = ImageTransformer(config)
    initialize(model, 0, torch.device("cpu"))
    report = apply_ac(model, mode, selective_option=option, **arguments)
    tokens = torch.arange(2 * 64).reshape(2, 64) % 17
    with Allocations() as allocations:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    kept_bytes = allocations.live_bytes()
    with Operators() as operators:
        loss.backward()
    gradients = {canonical_name(n): p.grad for n, p in model.named_parameters()}
    return report, operators.counts, kept_bytes, gradients


# The backward pass itself multiplies twice for each multiplication of the forward pass, and the
# output layer adds its own two.
OWN = 2 * NUM_MM * NUM_LAYERS + 2


@pytest.mark.parametrize(
    ("mode", "option", "mm_again", "attention_again", "wrapped"),
    [
        ("none", "op", 0, 0, 0),
        ("full", "op", NUM_MM * NUM_LAYERS, NUM_LAYERS, NUM_LAYERS),
        ("selective", "1", NUM_MM * NUM_LAYERS, NUM_LAYERS, NUM_LAYERS),
        ("selective", "2", NUM_MM * NUM_LAYERS // 2, NUM_LAYERS // 2, NUM_LAYERS // 2),
        ("selective", "3", NUM_MM, 1, 1),
        ("selective", "9", 0, 0, 0),
        ("selective", "op", 3 * NUM_LAYERS, 0, NUM_LAYERS),  # every second of seven
    ],
)
def test_what_is_computed_again(mode, option, mm_again, attention_again, wrapped):
    report, counts, _, gradients = run(mode, option)
    assert counts["aten.mm.default"] == OWN + mm_again
    assert counts[ATTENTION] == attention_again
    assert len(report.wrapped) == wrapped
    *_, expected = run("none")
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_what_is_kept_shrinks_with_what_is_repeated():
    kept = [run(*mode)[2] for mode in (("none",), ("selective", "op"), ("full",))]
    assert kept[0] > kept[1] > kept[2]
    halves = run("selective", "2")[2]
    assert kept[0] > halves > kept[2]


def test_the_operators_saved_and_repeated_are_told():
    report, *_ = run("selective", "op")
    assert report.tally is not None
    assert report.tally.describe() == (
        "saves 1 _scaled_dot_product_flash_attention_for_cpu, 4 mm; recomputes 3 mm"
    )
    assert report.wrapped == tuple(f"layers.{layer}" for layer in range(NUM_LAYERS))


def test_named_layers_are_always_repeated():
    _, counts, _, gradients = run("selective", "op", recompute_mm_of=("feed_forward.w2",))
    # w2's product is one of its own shape: repeated, and left out of the count of the others.
    assert counts["aten.mm.default"] == OWN + (3 + 1) * NUM_LAYERS
    *_, expected = run("none")
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("keys", "is_same"), [({}, True), ({"preserve_rng_state": False}, False), ({"mode": "none"}, 1)]
)
def test_recomputation_draws_the_random_numbers_of_the_forward_pass(keys, is_same):
    linear = nn.Linear(64, 64)
    model = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Sequential(linear, nn.Dropout())})})
    plan = ParallelPlan(blocks="blocks")
    config = JobConfig.from_dict({"activation_checkpoint": {"mode": "full", **keys}})
    meshes = None  # activation checkpointing needs none
    activation_checkpoint(Part(model, config, ParallelDims(), meshes, plan, None))
    x = torch.ones(1, 64, requires_grad=True)
    y = model["blocks"]["0"](x)
    y.sum().backward()
    # The gradient of a bias is 2 where its output was kept, and 0 where it was dropped.
    assert torch.equal(linear.bias.grad != 0, y[0] != 0) == bool(is_same)


class Buffered(nn.Module):
    """A block whose forward pass changes buffers in one of the ways that models do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.out = kind, nn.Linear(6, 6), nn.Linear(6, 6)
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(6)
        if kind == "spectral norm":
            self.linear = nn.utils.parametrizations.spectral_norm(self.linear)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.ones(6))

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "batch norm":
            return x + self.out(self.norm(y).tanh()).sin()
        self.calls += 1
        # Every second call changes the average, which the output uses.
        new = 0.9 * self.average + 0.1 * y.detach().mean(0)
        if self.kind == "assigned":
            self.average = new
        elif self.kind == "written" or (self.kind == "sometimes" and self.calls % 2 == 0):
            self.average = self.average.clone()
            self.average.copy_(new)
        elif self.kind == "data":
            self.average.data = self.average.data.clone()
            self.average.data.copy_(new)
        return x + self.out((y * self.average).tanh()).sin()


class BufferedNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): Buffered(kind) for i in range(2)})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


BLOCKS = ParallelPlan(tensor_parallel={}, blocks="blocks")


def train_buffered(kind: str, mode: str, in_flight: int, **arguments):
    """Gradients and buffers after two steps, each with several forward passes before a backward."""
    torch.manual_seed(0)
    model = BufferedNet(kind)
    apply_ac(model, mode, plan=BLOCKS, **arguments)
    for _ in range(2):
        losses = [model(torch.randn(8, 6)).square().sum() for _ in range(in_flight)]
        for loss in losses:
            loss.backward()
    named = (*model.named_buffers(), *((n, p.grad) for n, p in model.named_parameters()))
    return {canonical_name(name): value for name, value in named if value is not None}


@pytest.mark.parametrize(
    "kind", ["batch norm", "spectral norm", "assigned", "written", "sometimes"]
)
@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        ("full", {}),
        ("full", {"early_stop": True}),
        ("selective", {"selective_option": "2"}),
        ("selective", {"selective_option": "op"}),
    ],
)
def test_recomputation_sees_old_buffers_and_changes_none(kind, mode, arguments):
    for in_flight in (1, 3):
        expected = train_buffered(kind, "none", in_flight)
        found = train_buffered(kind, mode, in_flight, **arguments)
        assert found.keys() == expected.keys()
        unlike = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not unlike
        if kind == "batch norm":
            assert found["blocks.0.norm.num_batches_tracked"] == 2 * in_flight


def test_what_is_written_through_data_is_seen_too():
    expected, found = (train_buffered("data", mode, 1) for mode in ("none", "full"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_buffers_stay_the_same_tensors_and_blocks_without_any_cost_nothing():
    model = BufferedNet("batch norm")
    before = dict(model.named_buffers())
    apply_ac(model, "full", plan=BLOCKS)
    model(torch.randn(8, 6)).sum().backward()
    after = {canonical_name(name): buffer for name, buffer in model.named_buffers()}
    assert all(after[name] is before[name] for name in before)
    plain = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Linear(2, 2)})})
    apply_ac(plain, "full", plan=BLOCKS)
    assert plain["blocks"]["0"].checkpoint_fn.func is torch.utils.checkpoint.checkpoint


@pytest.mark.parametrize("mode", ["full", "memory_budget"])
def test_compile_refuses_a_buffer_that_it_would_recompute_from(mode):
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        model = BufferedNet("plain")
        apply_ac(model, mode, memory_budget=0.0, plan=BLOCKS)
        apply_compile(model, backend="aot_eager", plan=BLOCKS)
        with pytest.raises(
            TitanliteError, match=r"compile.enable: the forward pass changes .* blocks.0.calls,"
        ):
            model(torch.randn(8, 6))
