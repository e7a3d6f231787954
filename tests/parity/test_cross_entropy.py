"""The cross-entropy with label smoothing and z-loss: by rows, of sharded logits, in every plan."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import CP, FEW_STEPS, PP, REPLICATE, SHARD, TP, debug_config, differences, train

from titanlite.data.spec import DatasetSpec
from titanlite.errors import ConfigError, TitanliteError
from titanlite.modules.batch import IGNORE_INDEX, make_batch
from titanlite.ranks.allocations import Allocations
from titanlite.ranks.world import World
from titanlite.registry import DATASETS, LOSSES, LossSpec
from titanlite.tools.verify.verify import Verifier
from titanlite.training.loss import NEXT_TOKEN, next_token_loss, squared_error, token_loss_sum

KEYS = {"label_smoothing": 0.1, "z_loss": 0.01}
CHUNK = "titanlite.training.loss.LARGEST_CHUNK"
COMPILED = {"compile": {"enable": True, "backend": "aot_eager", "components": ["loss"]}}


def example(dtype: torch.dtype, vocab: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(vocab, (3, 40), generator=generator)
    targets[0, :9] = IGNORE_INDEX
    logits = 4 * torch.randn(3, 40, vocab, dtype=torch.float64, generator=generator)
    return logits.to(dtype).requires_grad_(), targets


def by_definition(logits: Tensor, targets: Tensor, label_smoothing=0.0, z_loss=0.0) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    own = targets.flatten()
    loss = cross_entropy(wide, own, reduction="sum", label_smoothing=label_smoothing)
    return loss + z_loss * wide[own != IGNORE_INDEX].logsumexp(-1).square().sum()


def with_gradient(function: Any, logits: Any, *rest: Any, **keys: Any) -> list[Tensor]:
    loss = function(logits, *rest, **keys)
    return [loss.detach(), *torch.autograd.grad(0.3 * loss, logits)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [{}, KEYS], ids=["plain", "keys"])
def test_some_rows_at_a_time_are_as_all(monkeypatch, dtype, keys):
    logits, targets = example(dtype)
    expected = with_gradient(by_definition, logits, targets, **keys)
    for chunk in (1 << 28, 7 * 50 * 8):
        monkeypatch.setattr(CHUNK, chunk)
        torch.testing.assert_close(with_gradient(token_loss_sum, logits, targets, **keys), expected)
        for wrong in (-1, 50):
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                token_loss_sum(logits, torch.full_like(targets, wrong), **keys)


def test_a_validation_reports_the_plain_cross_entropy():
    logits, targets = example(torch.float64)
    batch = make_batch(targets).replace(targets=targets)
    plain = NEXT_TOKEN.total(logits, batch)
    assert next_token_loss(logits, batch, **KEYS) > plain
    with torch.no_grad():
        assert next_token_loss(logits, batch, **KEYS) == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
def test_the_peak_is_two_chunks_besides_the_gradient(monkeypatch, dtype, is_sharded):
    logits, targets = example(dtype, vocab=6000)
    chunk = 3 * 6000 * 4
    monkeypatch.setattr(CHUNK, chunk)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        given: Any = logits
        if is_sharded:
            mesh = init_device_mesh("cpu", (2,))
            given = DTensor.from_local(logits.detach(), mesh, [Shard(2)]).requires_grad_()
        allocations = Allocations()
        allocations.start()
        with_gradient(token_loss_sum, given, targets, **KEYS)
        allocations.stop()
    finally:
        dist.destroy_process_group()
    beside = allocations.peak_bytes - logits.nbytes
    # And some numbers for each row.
    assert 0 < beside <= 2 * chunk + 20 * targets.nbytes < logits.nbytes / 2


def of_shards(world: World) -> list[float]:
    """How far loss and gradient of DTensors are from those of whole logits."""
    logits, targets = example(torch.float64)
    with torch.no_grad():
        logits[..., :17] = -torch.inf  # all that the first of three ranks has
    targets = targets.where(targets == IGNORE_INDEX, 17 + targets % 33)
    mesh = init_device_mesh("cpu", (world.size,))
    expected = with_gradient(token_loss_sum, logits, targets, z_loss=0.01)
    found = []
    for placement in (Shard(-1), Shard(1), Replicate()):
        cut = distribute_tensor(logits.detach(), mesh, [placement]).requires_grad_()
        loss, gradient = with_gradient(token_loss_sum, cut, targets, z_loss=0.01)
        pairs = zip((loss, gradient.full_tensor()), expected, strict=True)
        found += [float((a - b).abs().max()) for a, b in pairs]
    return found


def test_shards_have_the_loss_of_the_whole(verifier: Verifier) -> None:
    assert max(max(of_rank) for of_rank in verifier.pool(3).call(of_shards)) < 1e-11


def test_every_plan_trains_alike() -> None:
    keys = {"training": {**KEYS, "steps": FEW_STEPS}}
    (reference,) = train([debug_config(keys)])
    plans = [TP | {"disable_loss_parallel": True}, CP, PP, REPLICATE, SHARD]
    jobs = [debug_config(keys, {"parallelism": TP}, COMPILED)]
    trained = train(jobs + [debug_config(keys, {"parallelism": plan}) for plan in plans])
    split = TP | PP | {"pipeline_parallel_schedule": "ZBVZeroBubble"}
    trained += train([debug_config(keys, {"parallelism": split})])
    for number, training in enumerate(trained):
        for what, difference in differences(training, reference).items():
            assert difference < 1e-11, f"plan {number}: {what}: {difference:.1e}"


def test_other_losses_refuse_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "summed", LossSpec("summed", "somewhere:total", None))
    with pytest.raises(ConfigError) as caught:
        debug_config({"training": {**KEYS, "loss": "summed"}})
    assert caught.value.problems == tuple(
        f'training.{key}: "summed" has a loss of its own; remove this key' for key in KEYS
    )


@pytest.mark.parametrize("keys", [{}, KEYS], ids=["plain", "keys"])
def test_each_target_counts_with_its_weight(monkeypatch, keys):
    logits, targets = example(torch.float64)
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1))
    expected = [
        sum(
            weights[b, t] * by_definition(logits[b : b + 1, [t]], targets[b : b + 1, [t]], **keys)
            for b, t in (targets != IGNORE_INDEX).nonzero().tolist()
        )
    ]
    expected += torch.autograd.grad(0.3 * expected[0], logits)
    for chunk in (1 << 28, 7 * 50 * 8):
        monkeypatch.setattr(CHUNK, chunk)
        found = with_gradient(token_loss_sum, logits, targets, weights_BT=weights, **keys)
        torch.testing.assert_close(found, expected)


class Weighted:
    """Random sequences whose targets have weights, some of them 0; a third has no target."""

    num_samples, fingerprint = None, "weighted"

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len

    def sample(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens, targets = torch.randint(16, (2, self._seq_len), generator=generator)
        weights = torch.rand(self._seq_len, generator=generator).mul(1.2).sub(0.2).clamp_min(0)
        targets[index % 3 :: 3] = IGNORE_INDEX
        return {"tokens": tokens, "targets": targets, "weights": weights}


def weighted(*, seq_len: int, **_: Any) -> Weighted:
    return Weighted(seq_len)


WEIGHTED = {
    "training": {"dataset": "weighted", "loss": "weighted_cross_entropy", "steps": FEW_STEPS},
    "optimizer": {"eps": 1e-3},
}


def test_weights_count_alike_under_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"targets": 0, "weights": 0}
    spec = DatasetSpec("weighted", "weighted targets", weighted, fields=fields)
    monkeypatch.setitem(DATASETS, "weighted", spec)
    (reference,) = train([debug_config(WEIGHTED)])
    plans = [TP, CP, PP, REPLICATE, SHARD, TP | SHARD]
    trained = [train([debug_config(WEIGHTED, {"parallelism": plan})])[0] for plan in plans]
    for plan, training in zip(plans, trained, strict=True):
        for what, difference in differences(training, reference).items():
            assert difference < 1e-11, f"{plan}: {what}: {difference:.1e}"


def test_weights_are_asked_of_the_data() -> None:
    with pytest.raises(ConfigError, match=r'needs the field weights, which "digits" has not'):
        debug_config({"training": {"loss": "weighted_cross_entropy"}})


def test_squared_errors() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([0.5, -100.0, 3.0])
    batch = make_batch(torch.zeros(3, 1, dtype=torch.long)).replace(targets=targets)
    assert squared_error(outputs, batch).item() == 0.25 + 4
    assert batch.count_targets().item() == 2
    with pytest.raises(
        TitanliteError, match=r"shape of the targets, \[3\], but they have \[3, 2\]"
    ):
        squared_error(torch.zeros(3, 2), batch)
