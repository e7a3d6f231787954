"""What a model draws from torch's generators: who draws, and how the ranks of a job do."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite import register_dataset, register_model
from titanlite.config import JobConfig, load_model_spec, resolve_job
from titanlite.job import Job, build_job
from titanlite.models.build import build_model
from titanlite.modules.batch import FieldDims, call_model, make_batch
from titanlite.modules.draws import find_draws
from titanlite.modules.dropout import TokenDropout
from titanlite.modules.keyed import keyed_normal, sample_keys
from titanlite.modules.names import canonical_name
from titanlite.parallelize import ParallelPlan
from titanlite.ranks.world import World

SHAPE = (4, 8, 16)


@dataclass(frozen=True)
class Sizes:
    p: float = 0.5
    frozen: bool = False


class Block(nn.Module):
    """Dropout of replicated activations and of shards; attention with dropout in a function."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.p = nn.LayerNorm(16), p
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.hidden, self.residual = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(self.up(self.norm(x)))
        q = y.unflatten(-1, (-1, 8)).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(q, q, q, dropout_p=self.p).transpose(1, 2).flatten(2)
        return x + self.residual(self.down(y))


class Net(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleDict({"0": Block(sizes.p)})
        self.head = nn.Linear(16, 4)
        self.noise: Tensor | None = None

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """By name, so that no rank waits for values of another."""
        parameter.normal_(generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.blocks["0"].p > 0:
            self.noise = torch.randn_like(x)
            x = x + self.noise
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x).mean(1)


class Data:
    def __init__(self, **_: Any) -> None:
        self.num_samples = 64

    def sample(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full(SHAPE[1:], float(index)), "targets": torch.tensor(index % 3)}


COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
REPLICATED = ParallelPlan(
    tensor_parallel={"blocks.*.up": COLUMNS, "blocks.*.down": ROWS},
    blocks="blocks",
    sequence_dim=None,
)
SEQUENCE = ParallelPlan(
    tensor_parallel={
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(sequence_dim=1),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
    blocks="blocks",
    sequence_dim=1,
)


@pytest.fixture(autouse=True)
def _registered() -> None:
    for name, plan in (("replicated", REPLICATED), ("sequence", SEQUENCE)):
        register_model(f"net_{name}", Net, Sizes, plan=plan)
    register_dataset("full", Data, has_tokens=False, fields={"x": None, "targets": None})


@contextmanager
def built(
    rank: int = 0, net: str = "replicated", num_ranks: int = 1, **sections: Any
) -> Iterator[Job]:
    """The job of one rank; the others are not there, and its collectives do nothing."""
    changes: dict[str, Any] = {
        "model": {"name": f"net_{net}"},
        "training": {
            "dataset": "full",
            "steps": 9,
            "local_batch_size": SHAPE[0],
            "global_batch_size": 8,
        },
        "activation_checkpoint": {"mode": "none"},
        "parallelism": {"data_parallel_shard_degree": 1},
    }
    for name, section in sections.items():
        changes[name] = {**changes.get(name, {}), **section}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        world = World(rank, num_ranks, 0, num_ranks, torch.device("cpu"))
        yield build_job(resolve_job(JobConfig.from_dict(changes), num_ranks), world)
    finally:
        dist.destroy_process_group()


def noise_of(job: Job, steps: int = 1) -> list[dict[str, Tensor]]:
    """What each step draws first: the mask of each dropout, and the noise of the model."""
    found: list[dict[str, Tensor]] = []
    (part,) = job.parts
    modules = {canonical_name(name): module for name, module in part.named_modules()}
    hooks: list[Any] = []
    for name in ("hidden", "residual"):
        module = modules[f"blocks.0.{name}"]

        def keep(_: Any, __: Any, output: Tensor, name: str = name) -> None:
            found[-1].setdefault(name, output.detach().clone())

        hooks.append(module.register_forward_pre_hook(lambda _, args: (1 + 0 * args[0],)))
        hooks.append(module.register_forward_hook(keep))
    for _ in range(steps):
        found.append({})
        job.trainer.compute_gradients(job.draw())
        found[-1]["noise"] = part.noise
        found[-1]["python"] = torch.tensor([random.random(), np.random.random()])
        job.trainer.optimizer.zero_grad()
        job.trainer.scheduler.last_epoch += 1
    for hook in hooks:
        hook.remove()
    return found


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys() == {"hidden", "residual", "noise", "python"}
    return {name for name in one if torch.equal(one[name], other[name])}


ALL = {"hidden", "residual", "noise", "python"}


def test_the_seed_decides_what_is_drawn_in_any_order_of_jobs() -> None:
    with built() as job:
        first = noise_of(job, 3)
    torch.randn(5)
    with built(debug={"seed": 1}) as job:
        other = noise_of(job, 3)
    with built() as job:
        torch.manual_seed(9)
        random.seed(9)
        again = noise_of(job, 3)
    assert [alike(a, b) for a, b in zip(first, again, strict=True)] == [ALL] * 3
    assert [alike(a, b) for a, b in zip(first, other, strict=True)] == [set()] * 3
    assert alike(first[0], first[1]) == set(), "steps draw anew"
    with built() as job:
        batches = job.draw()
        for number in range(2):
            # A step that is run again, to find out where a NaN came from, draws the same.
            job.trainer.compute_gradients(batches)
            (part,) = job.parts
            assert torch.equal(part.noise, first[0]["noise"]), number
    assert 0.4 < (first[0]["hidden"] == 0).float().mean() < 0.6


def test_a_resumed_run_draws_what_the_uninterrupted_one_does() -> None:
    with built() as job:
        straight = noise_of(job, 3)
    with built() as job:
        job.trainer.scheduler.last_epoch, job.sampler.state = 2, 16
        (resumed,) = noise_of(job)
    with built() as job:
        # Loaded without the state of the schedule.
        job.sampler.state = 16
        (without,) = noise_of(job)
    assert alike(resumed, straight[2]) == ALL
    assert alike(without, straight[0]) == set()


def kept_bucket(_group, bucket):
    """In place of DDP's all-reduce, whose result a fake process group does not return."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_ranks_of_other_data_tokens_and_stages_draw_different_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("titanlite.parallelize.ddp.apply._sum_bucket", kept_bucket)
    for key in ("data_parallel_replicate_degree", "data_parallel_shard_degree"):
        of_ranks = []
        for rank in (0, 1):
            with built(rank, num_ranks=2, parallelism={key: 2}) as job:
                of_ranks += noise_of(job)
        assert alike(*of_ranks) == set(), key
    with built() as job:
        generators = job.trainer.generators
    assert generators is not None
    drawn = []
    for name in ("data_rank", "token_rank", "stage"):
        before = getattr(generators, name)
        setattr(generators, name, 1)
        generators.start_step(1)
        drawn.append(float(torch.rand(())))
        setattr(generators, name, before)
    generators.start_step(1)
    assert len({*drawn, float(torch.rand(()))}) == 4


def test_ranks_that_read_the_same_samples_read_them_with_the_same_generators() -> None:
    with built() as job:
        generators = job.trainer.generators
    assert generators is not None
    drawn = []
    for token_rank, stage in ((0, 0), (1, 0), (0, 1)):
        generators.token_rank, generators.stage = token_rank, stage
        generators.start_reading(8)
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 1


@pytest.mark.parametrize(
    ("model", "equal"),
    [("replicated", {"residual", "noise", "python"}), ("sequence", {"noise", "python"})],
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_ranks_of_tp_draw_the_same_where_they_hold_the_same(
    model: str, equal: set[str], mode: str
) -> None:
    of_ranks = []
    for rank in (0, 1):
        plan = {
            "parallelism": {"tensor_parallel_degree": 2},
            "activation_checkpoint": {"mode": mode},
        }
        with built(rank, model, 2, **plan) as job:
            of_ranks.append(noise_of(job, 2))
    for one, other in zip(*of_ranks, strict=True):
        assert alike(one, other) == equal
    assert alike(*of_ranks[0]) == set()


def test_recomputation_draws_the_same_again() -> None:
    """Also where a rank of tp draws numbers of its own."""
    masks: list[Tensor] = []
    for option in ("1", "op"):
        masks.clear()
        plan = {
            "parallelism": {"tensor_parallel_degree": 2},
            "activation_checkpoint": {"mode": "selective", "selective_ac_option": option},
        }
        with built(0, "sequence", 2, **plan) as job:
            (dropout,) = [m for n, m in job.parts[0].named_modules() if n.endswith("hidden")]
            dropout.register_forward_pre_hook(lambda _, args: (torch.ones_like(args[0]),))
            dropout.register_forward_hook(lambda _, __, output: masks.append(output.detach()))
            job.trainer.compute_gradients(job.draw()[:1])
            assert len(masks) == 2, option
            assert torch.equal(*masks), option


def test_compiled_blocks_draw_apart_under_sequence_parallelism() -> None:
    from titanlite.modules.draws import separate_draws

    net = Net(Sizes())
    draws = find_draws(net, lambda m: (m(torch.ones(SHAPE)), lambda: None)[1])
    net.blocks["0"] = torch.compile(net.blocks["0"], backend="eager", fullgraph=True)
    x, outputs = torch.ones(SHAPE), []
    for place in (0, 1):
        torch.manual_seed(0)
        said = separate_draws(
            [net], draws, place, x.device, blocks="blocks", blocks_are_sharded=place == 1
        )
        outputs.append((net.blocks["0"](x), torch.rand(())))
    assert said == "in compiled blocks, ranks of tp draw different numbers"
    assert not torch.equal(outputs[0][0], outputs[1][0])


def test_validations_draw_the_same_and_leave_training_as_it_is() -> None:
    section = {"validation": {"enable": True, "steps": 1, "local_batch_size": 4}}
    with built(**section) as job:
        losses = [job.evaluate()]
        first = noise_of(job)
        losses.append(job.evaluate())
    with built() as job:
        without = noise_of(job)
    assert losses[0] == losses[1]
    assert alike(first[0], without[0]) == ALL


def draws_of(forward: Callable[[Any, Tensor], Tensor], *, device: str = "meta") -> str:
    """The modules found in a model whose forward is `forward`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.zero, self.drop = nn.Dropout(0.0), nn.Dropout(0.5)
            self.alpha, self.one_d = nn.AlphaDropout(0.1), nn.Dropout1d(0.1)
            self.rrelu = nn.RReLU()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
            self.still = nn.MultiheadAttention(16, 2, batch_first=True)
            self.token = TokenDropout(0.5)

        forward = None

    Model.forward = forward
    with torch.device(device):
        model, x = Model(), torch.ones(2, 8, 16)
    state = torch.get_rng_state()
    found = find_draws(model, lambda m: (m(x), lambda: None)[1]).describe()
    assert torch.equal(torch.get_rng_state(), state)
    return found


def attend(x: Tensor, p: float) -> Tensor:
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p, is_causal=True)


DRAWING: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a module": (lambda m, x: m.drop(x), "drop (Dropout)"),
    "modules of other classes": (
        lambda m, x: m.rrelu(m.one_d(m.alpha(x))),
        "alpha (AlphaDropout), one_d (Dropout1d) and rrelu (RReLU)",
    ),
    "attention's module": (
        lambda m, x: m.attention(x, x, x)[0] + m.still(x, x, x)[0],
        "attention (MultiheadAttention)",
    ),
    "a function": (lambda m, x: F.dropout(x, 0.1), "Model"),
    "attention's function": (lambda m, x: attend(x, 0.1), "Model"),
    "randn": (lambda m, x: x + torch.randn_like(x), "Model"),
    "randn on the CPU": (lambda m, x: x + torch.randn(2, 1, 1).to(x.device), "Model"),
    "Python's random": (lambda m, x: x * random.random(), "Model"),
    "NumPy's random": (lambda m, x: x * np.random.random(), "Model"),
    "a model that asks for a value": (
        lambda m, x: m.drop(x) if x.sum() > 0 else x,
        "drop (Dropout)",
    ),
    "a model that does not run on meta": (
        lambda m, x: m.drop(x) * len(x.nonzero()),
        "drop (Dropout), alpha (AlphaDropout), one_d (Dropout1d) and 2 more",
    ),
    "p = 0": (lambda m, x: m.zero(F.dropout(x, 0.0)), ""),
    "not in training": (lambda m, x: F.dropout(x, 0.5, training=False), ""),
    "attention without dropout": (lambda m, x: attend(x, 0.0) + m.still(x, x, x)[0].mean(), ""),
    "a generator of its own": (
        lambda m, x: x + torch.rand(2, 1, 1, generator=torch.Generator("cpu")).to(x.device),
        "",
    ),
    "keyed numbers": (
        lambda m, x: (
            m.token(x, torch.zeros(2, 8, dtype=torch.long, device=x.device))
            + keyed_normal(sample_keys(torch.arange(2, device=x.device)), (8, 16))
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", DRAWING)
def test_modules_that_draw_are_found(case: str) -> None:
    forward, expected = DRAWING[case]
    assert draws_of(forward) == expected


def test_the_models_of_titanlite_draw_nothing() -> None:
    """build_job relies on it."""
    fields = ("token_numbers", "sample_keys")
    for name in ("image_transformer", "llama3", "gpt2"):
        keys = {"dropout": 0.5} if name != "llama3" else {}
        dataset = {"dataset": "digits"}
        config = JobConfig.from_dict({"model": {"name": name, **keys}, "training": dataset})
        with torch.device("meta"):
            sizes = resolve_job(config, 1).model
            model = build_model(load_model_spec(config), sizes, torch.float32)
            numbers = torch.zeros(2, 64, dtype=torch.long)
        more = {field: (numbers, FieldDims(0, 1)) for field in fields}
        batch = make_batch(numbers, more=more)
        draws = find_draws(model, lambda m, b=batch: (call_model(m, b), lambda: None)[1])
        assert not draws.shapes, name


def test_attention_of_the_cpu_without_dropout_does_not_draw() -> None:
    assert draws_of(lambda m, x: attend(x, 0.0), device="cpu") == ""


def test_the_effective_plan_says_that_plan_invariance_does_not_hold() -> None:
    with built() as job:
        (row,) = [row for row in job.applied if row.feature == "plan invariance"]
    assert (row.requested, row.active) == ("on", "off")
    assert row.note == (
        "Net, blocks.*.hidden (Dropout), blocks.* (Block) and 1 more draw from torch's "
        "own generators, which depends on the plan; TokenDropout and keyed_normal do not "
        "(docs/randomness.md)"
    )
    with built(model={"p": 0.0}) as job:
        assert not [row for row in job.applied if row.feature == "plan invariance"]


class Hidden(Net):
    """Draws in a function, and does not run on "meta"."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(F.dropout(x, 0.5 * len(x.detach().isfinite().nonzero()) / x.numel()))
        return self.head(x).mean(1)


def test_a_draw_that_the_plan_cannot_tell_prints_after_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from titanlite.observe.reporter import Reporter

    register_model("net_hidden", Hidden, Sizes, plan=REPLICATED)
    said = "plan invariance does not hold: the model draws from torch's own generators"
    for net, expected in (("hidden", True), ("replicated", False)):
        folder = {"dump_folder": str(tmp_path / net)}
        with built(net=net, model={"p": 0.0}, job=folder) as job, Reporter(job) as reporter:
            assert not job.draws.shapes
            for step in (1, 2):
                reporter.record(step, job.step(step))
        assert capsys.readouterr().out.count(said) == int(expected)
