"""Learning-rate schedule, loss, and what a model without an opinion starts with."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.errors import TitanliteError
from titanlite.modules.batch import make_batch
from titanlite.training.initial_weights import initialize
from titanlite.training.loss import IGNORE_INDEX, BatchLoss, batch_dims, token_loss_sum
from titanlite.training.norm import gradient_norm
from titanlite.training.optimizer import build_optimizer, build_scheduler, lr_factor


def schedule(total=10, warmup=3, decay=4, **shape) -> list[float]:
    return [
        lr_factor(step, warmup_steps=warmup, decay_steps=decay, total_steps=total, **shape)
        for step in range(total)
    ]


def test_warm_up_plateau_and_decay():
    expected = [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert schedule() == pytest.approx(expected)


def test_decay_shapes_end_above_the_floor():
    for decay_type, last in (
        ("linear", 0.25),
        ("sqrt", 1 - math.sqrt(0.75)),
        ("cosine", 0.5 * (1 + math.cos(0.75 * math.pi))),
    ):
        factors = schedule(decay_type=decay_type, min_lr_factor=0.1)
        assert factors[-1] == pytest.approx(0.1 + 0.9 * last)
        assert factors[6:] == sorted(factors[6:], reverse=True)


def test_no_decay_and_no_warm_up():
    assert schedule(warmup=0, decay=0) == [1.0] * 10


def test_the_optimizer_follows_the_schedule():
    optimizer = build_optimizer([nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = build_scheduler(optimizer, warmup_steps=3, decay_steps=4, total_steps=10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2 * factor for factor in schedule()])


@pytest.mark.parametrize(
    ("name", "kind"), [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)]
)
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_optimizers_do_what_pytorch_does(name, kind, implementation):
    ours, theirs = (nn.Parameter(torch.arange(4.0)) for _ in range(2))
    optimizer = build_optimizer([ours], name=name, lr=0.1, implementation=implementation)
    reference = kind([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        for parameter, stepper in ((ours, optimizer), (theirs, reference)):
            parameter.grad = parameter.detach() * 2 - 1
            stepper.step()
    torch.testing.assert_close(ours, theirs)


def test_the_loss_is_a_sum_over_valid_tokens_in_at_least_float32():
    logits = torch.randn(2, 5, 7, dtype=torch.bfloat16)
    targets = torch.randint(7, (2, 5))
    targets[0, 1:] = IGNORE_INDEX
    log_probabilities = logits.float().log_softmax(-1)
    expected = -sum(
        log_probabilities[b, t, targets[b, t]]
        for b in range(2)
        for t in range(5)
        if targets[b, t] != IGNORE_INDEX
    )
    loss = token_loss_sum(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert token_loss_sum(logits.double(), targets).dtype == torch.float64
    assert token_loss_sum(logits, torch.full_like(targets, IGNORE_INDEX)) == 0


def test_the_norm_of_gradients_in_bfloat16_is_that_of_their_values():
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (100, 7, 1000)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        norm = gradient_norm(parameters, mesh)
    finally:
        dist.destroy_process_group()
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(expected, rel=1e-6)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)


def test_a_model_that_says_nothing_gets_sensible_starting_values():
    with torch.device("meta"):
        model = Plain()
    initialize(model, 0, torch.device("cpu"))
    assert model.linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.linear.bias.any()
    assert (model.norm.weight == 1).all()
    assert not model.norm.bias.any()


def test_a_model_with_buffers_must_say_how_to_fill_them():
    class Buffered(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0))

    with torch.device("meta"):
        model = Buffered()
    with pytest.raises(TitanliteError, match=r"Buffered has buffers; give it init_buffers\(\)"):
        initialize(model, 0, torch.device("cpu"))
    Buffered.init_buffers = lambda self: self.table.copy_(torch.arange(4.0))
    initialize(model, 0, torch.device("cpu"))
    assert model.table.tolist() == [0, 1, 2, 3]


class Pair(nn.Module):
    def forward(self, tokens):
        x = tokens.double()
        return {"last": x.T, "one": x[:, 0], "scale": x.new_ones(1), "table": x.new_ones(3, 2)}


def test_the_dimension_of_samples_is_found_in_each_output():
    sample = make_batch(torch.zeros(1, 5, dtype=torch.long, device="meta"))
    assert batch_dims(Pair(), sample) == [1, 0, None, None]

    class Reads(nn.Module):
        def forward(self, tokens):
            return tokens[: int(tokens.sum())]

    assert batch_dims(Reads(), sample) is None


def test_a_validation_over_the_batch_leaves_padding_out():
    batch = make_batch(torch.arange(20).view(4, 5))
    batch = batch.leave_out(torch.tensor([False, False, True, True])[:, None])
    seen = []

    def total(outputs, batch):
        seen.append((outputs["last"].shape, outputs["scale"].shape, batch.num_sequences))
        return outputs["one"].sum()

    loss = BatchLoss(total, (), [1, 0, None, None])
    assert loss(Pair()(batch.tokens), batch) == 0 + 5 + 10 + 15
    with torch.no_grad():
        assert loss(Pair()(batch.tokens), batch) == 0 + 5
    assert seen == [((5, 4), (1,), 4), ((5, 2), (1,), 2)]
