"""What activation checkpointing keeps and repeats, counted; gradients stay the same to the bit."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.config import make_config
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.image_transformer.config import FLAVORS
from titanlite.models.image_transformer.model import ImageTransformer
from titanlite.names import canonical_name
from titanlite.parallelize import ParallelPlan, apply_ac
from titanlite.parallelize.steps import Part, activation_checkpoint
from titanlite.training.initialize import initialize

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
    config = make_config({"activation_checkpoint": {"mode": "full", **keys}})
    meshes = None  # activation checkpointing needs none
    activation_checkpoint(Part(model, config, ParallelDims(), meshes, plan, None))
    x = torch.ones(1, 64, requires_grad=True)
    y = model["blocks"]["0"](x)
    y.sum().backward()
    # The gradient of a bias is 2 where its output was kept, and 0 where it was dropped.
    assert torch.equal(linear.bias.grad != 0, y[0] != 0) == bool(is_same)
