"""Every tensor has one account: tensors that no stage and no style names train as on one process.

The models are those of tests/parity/uncovered. Without an answer for a tensor, a job stops with one
line.
"""

from typing import Any

import pytest
import torch
from training import CP, DEBUG_JOB, FEW_STEPS, PP, REPLICATE, SHARD, TP, merged

from titanlite.cli import main
from titanlite.config import JobConfig, load_model_spec, make_model_config, resolve_job
from titanlite.errors import TitanliteError
from titanlite.job import Job, build_job
from titanlite.mesh.device_mesh import build_meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.build import build_model
from titanlite.modules.shards import whole_tensor
from titanlite.parallelize import apply_ep, apply_fsdp, apply_tp
from titanlite.ranks.world import World
from titanlite.tools.sample.generate import sample_sequences, whole_model
from titanlite.tools.verify.verify import Verifier
from titanlite.training.initial_weights import initialize
from titanlite.training.step import Trainer

EP = {"expert_parallel_degree": 2}
IN_A_V = PP | {"pipeline_parallel_schedule": "ZBVZeroBubble"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "parameters of the root, PP": ("scaled", PP),
    "a scalar, FSDP": ("scaled", SHARD),
    "uncovered, whole activations": ("scaled", TP),
    "uncovered, sequence parallel": ("scaled_sp", TP),
    "experts, sequence parallel": ("mixture_sp", TP),
    "a parameter that no stage uses": ("unused", PP),
}
MORE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a scalar, DDP": ("scaled", REPLICATE),
    "experts spread, whole activations": ("mixture", TP | EP),
    "two stages a rank": ("scaled", IN_A_V),
    "logits gathered": ("scaled_sp", TP | {"disable_loss_parallel": True}),
    "experts, whole activations": ("mixture", TP),
    "PP x FSDP": ("scaled", PP | SHARD),
    "PP x TP": ("scaled_sp", PP | TP),
    "TP x HSDP": ("scaled_sp", TP | SHARD | REPLICATE),
    "TP x CP": ("scaled", TP | CP),
    "PP x CP": ("scaled", PP | CP),
    "experts spread over TP x FSDP": ("mixture_sp", TP | SHARD | EP),
    "experts, PP x TP": ("mixture", PP | TP),
}


def config(model: str, parallelism: dict[str, Any], **more: dict[str, Any]) -> JobConfig:
    sections = merged(DEBUG_JOB, {"training": {"steps": FEW_STEPS}}, more)
    num_layers = 4 if parallelism.keys() >= IN_A_V.keys() else 2
    sections["model"] = {"name": model, "flavor": "small", "num_layers": num_layers}
    sections["experimental"] = {"custom_import": "uncovered"}
    sections["parallelism"] |= parallelism
    if parallelism.keys() >= IN_A_V.keys():
        sections["training"]["local_batch_size"] = 4
    return JobConfig.from_dict(sections)


def check(verifier: Verifier, model: str, parallelism: dict[str, Any]) -> None:
    found = verifier.verify(config(model, parallelism), steps=FEW_STEPS, reloads=True)
    assert found.agrees, found.findings


@pytest.mark.parametrize("case", CASES)
def test_what_no_plan_names_trains_as_on_one_process(verifier: Verifier, case: str) -> None:
    check(verifier, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES)
def test_more_plans(verifier: Verifier, case: str) -> None:
    check(verifier, *MORE_CASES[case])


def test_a_parameter_without_use_stops_ddp(verifier: Verifier) -> None:
    with pytest.raises(TitanliteError) as caught:
        verifier.pool(2).call(step_of, config("unused", REPLICATE))
    assert str(caught.value).startswith("the loss does not depend on spare, and DDP waits for ")


def test_an_undeclared_gradient_is_found_with_its_remedy(verifier: Verifier) -> None:
    found = verifier.verify(config("undeclared_sp", TP), steps=1)
    assert "the gradient of shift is correct only after a sum over tp" in found.findings[0]


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("convolution_sp", "layers.0.mix: a Conv1d mixes the tokens of a sequence, which the "),
        (
            "declared_wrong",
            "layers.0.gamma: its gradient is equal on all 2 ranks of tp, so each has the whole ",
        ),
    ],
)
def test_a_tensor_without_an_answer_is_one_line(verifier: Verifier, model: str, line: str) -> None:
    with pytest.raises(TitanliteError) as caught:
        verifier.pool(2).call(step_of, config(model, TP))
    assert line in str(caught.value)


def step_of(world: World, job_config: JobConfig) -> float:
    return build_job(resolve_job(job_config, world.size), world).step().loss


def test_experts_by_hand_are_right_without_a_mesh_of_their_own(verifier: Verifier) -> None:
    job_config = config("mixture_sp", TP)
    assert verifier.pool(2).call(differences_by_hand, job_config) == [{}, {}]


def differences_by_hand(world: World, job_config: JobConfig) -> dict[str, float]:
    """The gradients of a job that differ from those of the same model parallelized by hand."""
    from uncovered.plan import PLANS

    job: Job = build_job(resolve_job(job_config, world.size), world)
    batches = job.draw()
    job.trainer.compute_gradients(batches)
    expected = {name: whole.clone() for name, whole in job.whole_gradients()}
    dims = ParallelDims(tp=2)
    meshes = build_meshes(dims, "cpu")
    model = make_plain(job_config)
    plan = PLANS[type(model)]
    apply_tp(model, meshes.tp, plan, loss_parallel=True)
    apply_ep(model, None, tp_mesh=meshes.tp, plan=plan)
    apply_fsdp(model, meshes.dp, plan=plan)
    initialize(model, 0, world.device)
    trainer = Trainer(
        parts=[model],
        optimizer=job.trainer.optimizer,
        scheduler=job.trainer.scheduler,
        loss=job.trainer.loss,
        world_mesh=meshes.world,
        max_norm=1.0,
        is_counted=dims.counts_loss(world.rank),
        logits_are_sharded=True,
    )
    trainer.compute_gradients(batches)
    own = {name: whole_tensor(p.grad) for name, p in model.named_parameters()}
    return {
        name: difference
        for name, whole in expected.items()
        if (difference := float((own[name] - whole).abs().max())) > 1e-12
    }


def make_plain(job_config: JobConfig) -> Any:
    with torch.device("meta"):
        spec, sizes = load_model_spec(job_config), make_model_config(job_config)
        return build_model(spec, sizes, torch.float64)


def test_names_and_shapes_of_a_wrapper_are_kept(verifier: Verifier) -> None:
    (names,) = verifier.pool(1).call(names_of, config("scaled", {}))
    own = {"layers.0.adapter.weight": (32,), "layers.0.adapter.module.weight": (32, 32)}
    assert own.items() <= names.items()


def names_of(world: World, job_config: JobConfig) -> dict[str, tuple[int, ...]]:
    job = build_job(resolve_job(job_config, world.size), world)
    assert job.tensors.keys() == job.parameters.keys() | job.buffers.keys()
    return {name: one.shape for name, one in job.tensors.items()}


@pytest.mark.parametrize("model", ["scaled", "wrapped"])
def test_a_model_with_an_attribute_called_module_is_sampled(verifier: Verifier, model: str) -> None:
    (unlike,) = verifier.pool(1).call(unlike_in_sampling, config(model, {}))
    assert unlike == []


def unlike_in_sampling(world: World, job_config: JobConfig) -> list[str]:
    """The parameters of the model that is sampled which do not have the job's values."""
    job = build_job(resolve_job(job_config, world.size), world)
    assert len(sample_sequences(job, 2)) == 2
    pairs = zip(whole_model(job).named_parameters(), job.parts[0].parameters(), strict=True)
    return [name for (name, sampled), own in pairs if not torch.equal(sampled, whole_tensor(own))]


def test_a_pipeline_samples_with_the_buffers_of_all_stages(verifier: Verifier) -> None:
    for buffers in verifier.pool(2).call(buffers_that_sample, config("counting", PP)):
        assert len(buffers) == 2
        assert all(value > 0 for value in buffers.values()), buffers


def buffers_that_sample(world: World, job_config: JobConfig) -> dict[str, float]:
    """The counters of the model that is sampled after a step."""
    job = build_job(resolve_job(job_config, world.size), world)
    job.step(1)
    return {n: float(b) for n, b in whole_model(job).named_buffers() if n.endswith("calls")}


@pytest.mark.parametrize(
    ("model", "plan", "number", "gradients"),
    [
        (
            "scaled_sp",
            TP,
            "7 of 27 tensors",
            "over tp: shift, layers.*.gamma, layers.*.adapter.weight, "
            "layers.*.adapter.module.weight",
        ),
        ("scaled_sp", PP, "2 of 27 tensors", "over pp: shift, logit_scale"),
        ("scaled_sp", SHARD, "1 of 27 tensors", "over dp_shard: logit_scale"),
        ("mixture", TP, "2 of 23 tensors", "over tp: layers.*.moe.router.gate.weight"),
        ("covered", TP, "", ""),
    ],
)
def test_the_effective_plan_says_which_gradients_are_summed(
    verifier: Verifier, model: str, plan: dict[str, int], number: str, gradients: str
) -> None:
    for rows in verifier.pool(2).call(summed_gradients, config(model, plan)):
        assert rows == ([(number, gradients)] if gradients else [])


def summed_gradients(world: World, job_config: JobConfig) -> list[tuple[str, str]]:
    job = build_job(resolve_job(job_config, world.size), world)
    return [(row.active, row.note) for row in job.applied if row.feature == "summed gradients"]


def test_the_command_prints_the_account(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[experimental]\ncustom_import = "uncovered"\n'
        '[model]\nname = "scaled_sp"\nnum_layers = 2\n'
        "[training]\nglobal_batch_size = 8\nlocal_batch_size = 2\n"
        "[parallelism]\npipeline_parallel_degree = 2\ntensor_parallel_degree = 2\n"
        "data_parallel_shard_degree = 2\n"
    )
    assert main(["plan", str(job), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in lines}
    assert rows["logit_scale"] == (
        "logit_scale scalar each of 0-1 dp_shard replicated, tp replicated "
        "the step, over stages: pp; the step: dp_shard; whole on each rank: tp"
    )
    assert rows["layers.*.gamma (2)"] == (
        "layers.*.gamma (2) 32 0-1 dp_shard shard 0, tp replicated FSDP2: dp_shard; the step: tp"
    )
