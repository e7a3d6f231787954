"""`titanlite.train` from a script: what the script registers and its callbacks reach the ranks."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import titanlite
from titanlite import registry
from titanlite.config import resolve_job
from titanlite.config.load import read_any
from titanlite.observe.metrics import read_metrics

SCRIPT = """
import json, sys
from dataclasses import dataclass

import titanlite

assert "torch" not in sys.modules

import torch
from torch import nn
from titanlite.parallelize import ParallelPlan
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

@dataclass(frozen=True)
class Sizes:
    dim: int = 8

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.embed = nn.Linear(4, sizes.dim)
        self.blocks = nn.ModuleDict({"0": Block(sizes.dim)})
        self.head = nn.Linear(sizes.dim, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)

class Data:
    def __init__(self, *, split, seed, **_):
        self.num_samples = 6

    def sample(self, index):
        generator = torch.Generator().manual_seed(index % 6)
        label = torch.randint(3, (), generator=generator)
        return {"x": torch.randn(4, generator=generator), "targets": label}

PLAN = ParallelPlan(
    tensor_parallel={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
    blocks="blocks",
    embeddings=("embed",),
    head=("head",),
    sequence_dim=None,
)
for _ in range(2):  # a cell of a notebook may run again

    def total(outputs, batch):
        return nn.functional.cross_entropy(outputs, batch.targets, reduction="sum")

    titanlite.register_model("net", Net, Sizes, plan=PLAN)
    titanlite.register_dataset(
        "points", Data, has_tokens=False, fields={"x": None, "targets": None}
    )
    titanlite.register_loss("plain", total)
    titanlite.register_metric("margin", lambda outputs, batch: (outputs.max(), len(outputs)))

def job(folder, **plan):
    return {
        "job": {"dump_folder": folder},
        "model": {"name": "net"},
        "training": {
            "dataset": "points", "loss": "plain", "steps": 3, "dtype": "float64",
            "global_batch_size": 2, "local_batch_size": 2,
        },
        "validation": {
            "enable": True, "freq": 2, "local_batch_size": 2, "metrics": ["margin"]
        },
        "checkpoint": {"enable": True, "interval": 2, "async_mode": "async"},
        "activation_checkpoint": {"mode": "none"},
        "sampling": {"num_samples": 0},
        "parallelism": {"data_parallel_shard_degree": 1, **plan},
    }

one = titanlite.train(job("one"))
seen = []

def on_step(event):
    seen.append((event.step, event.result.loss, event.job.world.rank))
    if event.step == 3 and event.job.world.rank == 1:
        raise ValueError("on purpose")

titled = []

def on_checkpoint(event):
    # A collective call: all ranks come here at the same step.
    assert len(list(event.job.whole_parameters())) == 8
    titled.append(event.checkpoint.name)

two = titanlite.train(
    job("two", tensor_parallel_degree=2),
    on_validation=lambda event: titled.append(event.validation_loss),
    on_checkpoint=on_checkpoint,
    on_end=lambda event: open(f"end{event.job.world.rank}", "w").write(json.dumps(titled)),
)
try:
    titanlite.train(job("three", tensor_parallel_degree=2), on_step=on_step)
except titanlite.RankError as error:
    message, trace = str(error), error.rank_traceback
with open("found.json", "w") as file:
    json.dump([one.losses, two.losses, one.grad_norms, two.grad_norms, one.validation_losses,
               two.validation_losses, two.steps, message, trace, seen, one.metrics, two.metrics],
              file)
"""


def test_a_script_trains_what_it_registers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = [sys.executable, "script.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    one, two, norms, norms2, validation, validation2, steps, message, trace, seen, *metrics = found
    assert two == pytest.approx(one, rel=1e-12)
    assert norms2 == pytest.approx(norms, rel=1e-12)
    assert validation2 == pytest.approx(validation, rel=1e-12)
    assert [of_step["margin"] for of_step in metrics[1].values()] == pytest.approx(
        [of_step["margin"] for of_step in metrics[0].values()], rel=1e-12
    )
    (record,) = [r for r in read_metrics(tmp_path / "two") if r.step == 2]
    assert record.validation_metrics == metrics[1]["2"]
    assert f"margin {metrics[1]['2']['margin']:.4f}" in done.stdout
    # Data without tokens have no bits, and are counted in samples.
    assert (record.tokens_per_second, record.measures) == (None, {})
    assert record.samples_per_second == pytest.approx(2 / record.seconds)
    assert " samples/s" in done.stdout
    assert "bits/" not in done.stdout
    assert " tokens/s" not in done.stdout
    assert steps == [1, 2, 3]
    assert list(validation) == ["2", "3"]
    first, called = (json.loads((tmp_path / f"end{rank}").read_text()) for rank in (0, 1))
    # The save of step 2 may end at either step, but it is the same one on both ranks.
    assert called == first
    assert [said for said in called if isinstance(said, str)] == ["step-2", "step-3"]
    assert [said for said in called if said in validation2.values()] == list(validation2.values())
    assert message == "rank 1: on_step raised ValueError at step 3: on purpose"
    assert 'raise ValueError("on purpose")' in trace
    assert seen == [], "ranks have their own copies"


def test_mistakes_are_config_errors() -> None:
    with pytest.raises(titanlite.ConfigError) as caught:
        titanlite.train({"training": {"steps": 0, "loss": "unknown"}})
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "training.steps",
        "training.loss",
    ]
    with pytest.raises(titanlite.ConfigError, match="no_such_file"):
        titanlite.train("no_such_file.toml")


def test_only_what_the_script_registers_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_sent", set())
    used = {"model": ("image_transformer",), "data set": ("digits", None), "loss": ("own",)}
    titanlite.register_loss("own", lambda outputs, batch: outputs.sum())
    ((kind, spec),) = registry.specs_to_send(used, "")
    assert (kind, spec.name) == ("loss", "own")
    assert registry.specs_to_send(used, __name__) == []
    config = read_any({"training": {"loss": "own", "steps": 1}}).config
    sent = pickle.dumps(resolve_job(config, 1))
    del registry.LOSSES["own"]
    for _ in range(2):  # the next job of the same ranks may have another loss of that name
        pickle.loads(sent)
        assert registry.LOSSES["own"].name == "own"
