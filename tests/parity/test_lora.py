"""LoRA under every plan, from a Hugging Face folder to a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import make_job
from safetensors.torch import load_file
from test_hf_folders import logits_of, plain_model
from torch import Tensor
from training import merged

import titanlite
from titanlite import cli
from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig
from titanlite.config.load import override
from titanlite.errors import ConfigError, TitanliteError
from titanlite.job import Job
from titanlite.models.llama3.config import FLAVORS
from titanlite.models.llama3.model import Llama3
from titanlite.parallelize import apply_lora
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import open_world
from titanlite.tools.sample.generate import whole_model
from titanlite.tools.verify.verify import Verifier

# As configs/llama_tiny.toml, with two blocks.
TINY: dict[str, Any] = {
    "model": {"name": "llama3", "flavor": "tiny", "n_layers": 2},
    "training": {
        "dataset": "chat",
        "attend_across_documents": False,
        "seq_len": 32,
        "global_batch_size": 8,
        "local_batch_size": 2,
        "steps": 3,
    },
    "optimizer": {"lr": 1e-2},
    "lr_scheduler": {"warmup_steps": 1},
    "activation_checkpoint": {"mode": "none"},
    "sampling": {"num_samples": 0},
    "lora": {"rank": 3},
}
TP, SHARD, CP, PP, EP = (
    f"{axis}_degree"
    for axis in (
        *("tensor_parallel", "data_parallel_shard", "context_parallel", "pipeline_parallel"),
        "expert_parallel",
    )
)
PLANS: dict[str, dict[str, Any]] = {
    "tp2 x fsdp2": {"parallelism": {TP: 2, SHARD: 2}},
    "pp2": {"parallelism": {PP: 2, SHARD: 1}},
    # Adapters of fewer rows than ranks, and of the output layer, which PyTorch's style cuts.
    "tp2, one row": {
        "parallelism": {TP: 2, SHARD: 1},
        "lora": {"rank": 1, "target_modules": ["w2", "attention.w[qo]", "output"]},
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "tp2": {"parallelism": {TP: 2, SHARD: 1}},
    "fsdp2": {"parallelism": {SHARD: 2}, "activation_checkpoint": {"mode": "full"}},
    "ddp2": {"parallelism": {"data_parallel_replicate_degree": 2}},
    "cp2": {"parallelism": {CP: 2, SHARD: 1}},
    "ep2": {
        "parallelism": {SHARD: 2, EP: 2},
        "model": {"flavor": "moe_debug"},
        "training": {"local_batch_size": 4},
    },
    "ep2 x tp2": {"parallelism": {TP: 2, EP: 2, SHARD: 1}, "model": {"flavor": "moe_debug"}},
    "gpt2, tp2": {"parallelism": {TP: 2, SHARD: 1}, "model": {"name": "gpt2"}},
    "compiled, tp2": {
        "parallelism": {TP: 2, SHARD: 1},
        "compile": {"enable": True, "backend": "aot_eager"},
    },
}


def config_of(*changes: dict[str, Any]) -> JobConfig:
    return JobConfig.from_dict(merged(TINY, *changes))


QUICK = ("pp2", "tp2, one row")


@pytest.mark.parametrize(
    "plan",
    [
        *QUICK,
        *(pytest.param(n, marks=pytest.mark.slow) for n in {**PLANS, **SLOW} if n not in QUICK),
    ],
)
def test_every_plan_agrees_with_one_process(verifier: Verifier, plan: str) -> None:
    found = verifier.verify(config_of((PLANS | SLOW)[plan]), steps=2)
    assert found.agrees, found.findings
    assert not found.tolerance.is_narrow


def test_by_hand_a_model_computes_the_same_until_it_is_trained() -> None:
    model = Llama3(FLAVORS["debugmodel"])
    tokens = torch.arange(32).view(2, 16)
    before = model(tokens)
    names = apply_lora(model, 4, target_modules=("attention.w[qv]",))
    assert len(names) == 2 * len(model.layers)
    assert torch.equal(model(tokens), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted({name.split(".", 2)[2] for name in trained}) == [
        f"attention.{layer}.lora_{kind}.weight" for layer in ("wq", "wv") for kind in "ab"
    ]


def fine_tune(place: Place, config: JobConfig) -> tuple[float, dict[str, Any]]:
    """Train three steps from the folder and save; the largest difference of transformers' logits
    of the saved folder, and what was trained."""
    with open_world(place) as world:
        job = make_job(config, world)
        tokens = job.draw()[0].tokens.clone()
        torch.distributed.broadcast(tokens, 0)
        with Checkpoints(job) as checkpoints:
            base = {name: whole.clone() for name, whole in job.whole_parameters()}
            for step in (1, 2, 3):
                job.step(step)
                checkpoints.after_step(step, is_last=step == 3)
        changed = [n for n, whole in job.whole_parameters() if not torch.equal(base[n], whole)]
        states = job.trainer.optimizer.state
        saved = Path(config.job.dump_folder) / "checkpoint" / "step-3"
        if job.world.is_first:
            plain = plain_model(saved) if (saved / "config.json").exists() else with_adapters(saved)
        with torch.no_grad():
            own = own_logits(job, tokens)
            difference = float((own - plain(tokens).logits).abs().max()) if world.is_first else 0.0
        trained = [n for n, p in job.parameters.items() if p in states]
        return difference, {"changed": changed, "with state": trained}


def own_logits(job: Job, tokens: Tensor) -> Tensor:
    return logits_of(job, tokens) if job.pipeline is None else whole_model(job)(tokens)


def with_adapters(folder: Path, base: Path | None = None) -> Any:
    """What peft makes of its folder: the base with the adapters added to its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    model = plain_model(base or Path(config["base_model_name_or_path"]))
    tensors = load_file(folder / "adapter_model.safetensors")
    named = dict(model.named_modules())
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    targets = config["target_modules"]
    assert adapted == {
        name
        for name, module in named.items()
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in targets
    }
    for name in adapted:
        a, b = (tensors[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
        named[name].weight.data += config["lora_alpha"] / config["r"] * b @ a
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a trained model."""
    folder = tmp_path_factory.mktemp("base")
    config = folder_config(folder, {"parallelism": {SHARD: 1}}, lora={"rank": 0})
    titanlite.train(config, threads=True)
    return folder / "checkpoint" / "step-3"


def folder_config(
    folder: Path, *changes: dict[str, Any], base: Path | None = None, **sections: dict[str, Any]
) -> JobConfig:
    checkpoint: dict[str, Any] = {"enable": True, "last_save_in_hf": True}
    if base is not None:
        checkpoint |= {"initial_load_path": str(base), "initial_load_in_hf": True}
    return config_of(
        {"job": {"dump_folder": str(folder)}, "checkpoint": checkpoint},
        {"parallelism": {"disable_loss_parallel": True}},
        *changes,
        sections,
    )


WAYS: dict[str, dict[str, Any]] = {
    "merged": {"save_merged": True},
    "alone": {},
    "full": {"rank": 0},
}


@pytest.mark.parametrize(
    ("plan", "way"),
    [
        pytest.param("tp2 x fsdp2", "merged", marks=pytest.mark.slow),
        ("pp2", "alone"),
        ("tp2, one row", "alone"),
        ("pp2", "full"),
    ],
)
def test_from_a_folder_to_a_folder(tmp_path: Path, base: Path, plan: str, way: str) -> None:
    config = folder_config(tmp_path, PLANS[plan], base=base)
    config = JobConfig.from_dict(merged(config.model_dump(exclude_unset=True), {"lora": WAYS[way]}))
    degrees = PLANS[plan]["parallelism"]
    count = degrees.get(TP, 1) * degrees.get(PP, 1) * degrees[SHARD]
    results = spawn(fine_tune, count, config, threads=True)
    assert results[0][0] < 1e-5
    for _, found in results if way != "full" else ():
        assert all(".lora_" in name for name in (*found["changed"], *found["with state"]))
        assert any(".lora_b." in name for name in found["changed"])
    saved = tmp_path / "checkpoint" / "step-3"
    assert (saved / "config.json").exists() == (way != "alone")
    assert (saved / "adapter_config.json").exists() == (way == "alone")
    # The run goes on from it, and samples come from it.
    again = spawn(reload, count, config, threads=True)
    assert again[0] < 1e-5


def reload(place: Place, config: JobConfig) -> float:
    """The largest difference of the logits of the job that loads its last checkpoint."""
    with open_world(place) as world:
        job = make_job(config, world)
        tokens = torch.arange(64).view(2, 32)
        with Checkpoints(job) as checkpoints:
            assert checkpoints.first_step == 4
        saved = Path(config.job.dump_folder) / "checkpoint" / "step-3"
        plain = plain_model(saved) if (saved / "config.json").exists() else with_adapters(saved)
        with torch.no_grad():
            own = own_logits(job, tokens)
            return float((own - plain(tokens).logits).abs().max())


def test_a_training_checkpoint_is_converted_to_either(tmp_path: Path, base: Path) -> None:
    # Its base is a checkpoint of the same weights, which has no adapters.
    of_base = {"job": {"dump_folder": str(tmp_path / "start")}, "checkpoint": {"enable": True}}
    titanlite.train(config_of(of_base, {"lora": {"rank": 0}}), threads=True)
    config = folder_config(tmp_path, {"parallelism": {SHARD: 1}}, base=base)
    start = str(tmp_path / "start" / "checkpoint" / "step-3")
    config = override(
        config, {"checkpoint.initial_load_path": start, "checkpoint.initial_load_in_hf": False}
    )
    changes = {"last_save_model_only": False, "last_save_in_hf": False}
    config = override(config, {f"checkpoint.{key}": value for key, value in changes.items()})
    titanlite.train(config, threads=True)
    source, tokens = str(tmp_path / "checkpoint"), torch.arange(64).view(2, 32)
    logits = []
    for name, option in (("adapters", []), ("merged", ["--merge"])):
        out = tmp_path / name
        assert cli.main(["convert", source, "--out", str(out), *option]) == 0
        model = plain_model(out) if option else with_adapters(out, base)
        logits.append(model(tokens).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-5
    assert (logits[0] - plain_model(base)(tokens).logits).abs().max() > 1e-3


def test_missing_weights_of_the_base_are_an_error(tmp_path: Path, base: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((base / "config.json").read_text())
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    config = folder_config(tmp_path, {"parallelism": {SHARD: 1}}, base=broken)
    with pytest.raises(TitanliteError, match=r"missing keys: model.layers.1.mlp.up_proj.weight;"):
        titanlite.train(config, threads=True)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lora": {"target_modules": ["w_q"]}}, "lora.target_modules: no linear layer .*'w_q'"),
        ({"lora": {"alpha": 8.0}}, "lora.rank: is not set, so there are no adapters"),
        (
            {"model": {"name": "gpt2"}, "checkpoint": {"enable": True, "last_save_in_hf": True}},
            "lora.save_merged: peft's format has no adapter of layers.0.attention.wq alone",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    sections = merged(TINY, {"job": {"dump_folder": str(tmp_path)}}, changes)
    if "alpha" in sections["lora"]:
        del sections["lora"]["rank"]
    with pytest.raises(ConfigError, match=line):
        titanlite.train(sections, threads=True)
