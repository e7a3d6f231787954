"""The cross-entropy with label smoothing and z-loss: memory, sharded logits, every plan."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import CP, FEW_STEPS, PP, REPLICATE, SHARD, TP, debug_config, differences, train

from titanlite.modules.batch import IGNORE_INDEX, make_batch
from titanlite.ranks.allocations import Allocations
from titanlite.ranks.world import World
from titanlite.tools.verify.verify import Verifier
from titanlite.training.loss import NEXT_TOKEN, next_token_loss, token_loss_sum

KEYS = {"label_smoothing": 0.1, "z_loss": 1e-2}
CHUNK = "titanlite.training.loss.LARGEST_CHUNK"
VOCAB = 50
ZBV = PP | TP | {"pipeline_parallel_schedule": "ZBVZeroBubble"}
PLANS: dict[str, list[dict[str, Any]]] = {
    "TP": [TP],
    "TP, logits gathered": [TP | {"disable_loss_parallel": True}],
    "CP": [CP],
    "PP": [PP],
    "DDP": [REPLICATE],
    "FSDP": [SHARD],
}
COMPILED = {"compile": {"enable": True, "backend": "aot_eager", "components": ["loss"]}}


def example(dtype: torch.dtype, num_rows: int = 120, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(vocab, (3, num_rows // 3), generator=generator)
    targets[0, :9] = IGNORE_INDEX
    logits = 4 * torch.randn(*targets.shape, vocab, dtype=torch.float64, generator=generator)
    return logits.to(dtype).requires_grad_(), targets


def by_definition(logits: Tensor, targets: Tensor, smoothing: float, z_loss: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    loss = cross_entropy(wide, targets.flatten(), reduction="sum", label_smoothing=smoothing)
    squares = wide.logsumexp(-1).square()[targets.flatten() != IGNORE_INDEX]
    return loss + z_loss * squares.sum()


def with_gradient(function: Callable[..., Tensor], logits: Any, *rest: Any, **keys: Any) -> Any:
    loss = function(logits, *rest, **keys)
    return loss, *torch.autograd.grad(0.3 * loss, logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [{}, KEYS], ids=["plain", "keys"])
def test_some_rows_at_a_time_are_as_all(monkeypatch, dtype, keys):
    logits, targets = example(dtype)
    values = keys.get("label_smoothing", 0.0), keys.get("z_loss", 0.0)
    expected = with_gradient(by_definition, logits, targets, *values)
    torch.testing.assert_close(with_gradient(token_loss_sum, logits, targets, **keys), expected)
    monkeypatch.setattr(CHUNK, 7 * VOCAB * 8)
    torch.testing.assert_close(with_gradient(token_loss_sum, logits, targets, **keys), expected)
    for wrong in (-1, VOCAB):
        with pytest.raises(RuntimeError, match="out of bounds"):
            token_loss_sum(logits, torch.full_like(targets, wrong), **keys)


def test_a_validation_reports_the_plain_cross_entropy():
    logits, targets = example(torch.float64)
    batch = make_batch(targets).replace(targets=targets)
    with torch.no_grad():
        assert next_token_loss(logits, batch, **KEYS) == NEXT_TOKEN.total(logits, batch)
    assert next_token_loss(logits, batch, **KEYS) > NEXT_TOKEN.total(logits, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("num_chunks", [4, 40])
def test_the_peak_is_two_chunks_besides_the_gradient(monkeypatch, dtype, is_sharded, num_chunks):
    vocab = 6000
    logits, targets = example(dtype, vocab=vocab)
    chunk = 120 // num_chunks * vocab * 4
    monkeypatch.setattr(CHUNK, chunk)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        whole: Any = logits
        if is_sharded:
            mesh = init_device_mesh("cpu", (2,))
            whole = DTensor.from_local(logits.detach(), mesh, [Shard(2)]).requires_grad_()
            targets = targets + vocab * (targets != IGNORE_INDEX)
        allocations = Allocations()
        allocations.start()
        with_gradient(token_loss_sum, whole, targets, **KEYS)
        allocations.stop()
    finally:
        dist.destroy_process_group()
    vectors = 20 * 120 * 8
    assert logits.nbytes + chunk <= allocations.peak_bytes
    assert allocations.peak_bytes <= logits.nbytes + 2 * chunk + vectors


def sharded(world: World, dtype: torch.dtype) -> tuple[float, float]:
    """The largest differences of loss and gradient of sharded logits from whole ones."""
    logits, targets = example(dtype)
    mesh = init_device_mesh("cpu", (world.size,))
    with torch.no_grad():
        logits[..., :20] = -torch.inf  # all that one of the ranks has
        targets[targets != IGNORE_INDEX] %= 30
        targets[targets != IGNORE_INDEX] += 20
    cut = distribute_tensor(logits.detach(), mesh, [Shard(-1)]).requires_grad_()
    loss, gradient = with_gradient(token_loss_sum, cut, targets, z_loss=1e-2)
    assert not isinstance(loss, DTensor)
    expected = with_gradient(token_loss_sum, logits, targets, z_loss=1e-2)
    found = (loss, gradient.full_tensor())
    return tuple(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sharded_logits_are_as_whole_ones(verifier: Verifier, num_ranks: int) -> None:
    for differs in verifier.pool(num_ranks).call(sharded, torch.float64):
        assert max(differs) < 1e-11


def test_every_plan_trains_alike() -> None:
    (reference,) = train([debug_config({"training": KEYS | {"steps": FEW_STEPS}})])
    plans = {
        name: debug_config({"parallelism": plan}, {"training": KEYS | {"steps": FEW_STEPS}})
        for name, (plan,) in PLANS.items()
    }
    plans["TP, compiled"] = debug_config(
        {"parallelism": TP}, {"training": KEYS | {"steps": FEW_STEPS}}, COMPILED
    )
    for name, training in zip(plans, train(list(plans.values())), strict=True):
        for what, difference in differences(training, reference).items():
            assert difference < 1e-11, f"{name}: {what}: {difference:.1e}"
