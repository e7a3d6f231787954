"""`titanlite debug --record`: the messages of one step, with the module that sends them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from titanlite import cli
from titanlite.config import JobConfig, resolve_job
from titanlite.tools.debug.messages import record_step
from titanlite.tools.lab.pictures import Record

CONFIGS = Path(__file__).parents[3] / "configs"
JOB: dict[str, Any] = {
    "model": {"flavor": "debug", "num_layers": 2},
    "training": {"dataset": "synthetic", "local_batch_size": 4, "global_batch_size": 8},
    "activation_checkpoint": {"mode": "none"},
}


def recorded(step: int = 2, **parallelism: Any) -> Record:
    shards = {"data_parallel_shard_degree": 1, **parallelism}
    return record_step(resolve_job(JobConfig.from_dict({**JOB, "parallelism": shards})), step)


def named(record: Record) -> Counter[tuple[str, str]]:
    """How often each collective was called in each module, by rank 0."""
    events = [call.events[0] for call in record.calls if 0 in call.events]
    return Counter((event.name, event.label) for event in events)


def test_tensor_parallelism_gathers_and_scatters_in_its_modules_on_both_ways() -> None:
    found = named(recorded(tensor_parallel_degree=2))
    for layer in ("layers.0", "layers.1"):
        # Two microbatches; forwards a block's input is gathered, backwards its output's gradient.
        assert found["all_gather", f"{layer}.attention"] == 2
        assert found["reduce_scatter", f"{layer}.attention.wo"] == 2
        assert found["reduce_scatter", f"{layer}.attention"] == 2
        assert found["all_gather", f"{layer}.attention.wo"] == 2


def test_fsdp_gathers_each_unit_forwards_and_all_but_the_last_again() -> None:
    found = named(recorded(data_parallel_shard_degree=2))
    assert found["reduce_scatter", "layers.0"] == 1
    assert found["all_gather", "layers.0"] == 2
    assert found["all_reduce", "sum loss and norm"] == 1


def test_stages_send_activations_on_and_gradients_back() -> None:
    record = recorded(
        pipeline_parallel_degree=2,
        pipeline_parallel_microbatch_size=2,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    ways = Counter((message.source, message.target) for message in record.messages)
    assert ways == {(0, 1): 4, (1, 0): 4}
    assert all(message.sent and message.received for message in record.messages)
    assert {message.tensor.shape for message in record.messages} == {(64, 2, 32)}


def test_the_command_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "step.html"
    small = ["--model.num_layers=1", "--training.dataset=synthetic", "--validation.enable=false"]
    command = ["debug", str(CONFIGS / "ddp4.toml"), *small]
    assert cli.main([*command, "--record", str(page), "--step=1"]) == 0
    assert "Step 1 of" in capsys.readouterr().out
    text = page.read_text()
    assert "rank 3 (dp_replicate 3)" in text
    assert "all_reduce sum bucket" in text
    for words, problem in (
        (["--record", "step.png"], '--record: "step.png" is neither FILE.html nor FILE.svg'),
        (["--record", str(page), "--step=0"], "--step: 0 is less than 1"),
        (["--record", str(page), "--rank=1"], "--rank: is for the debugger"),
        (["--step=3"], "--step: is the step that --record draws"),
        (["--record", "/dev/null/a.svg"], '--record: "/dev/null/a.svg" cannot be written'),
        (["--record", str(page), "--parallelism.data_parallel_replicate_degree=1"], "one rank"),
    ):
        assert cli.main([*command, *words]) == 2
        assert problem in capsys.readouterr().err
