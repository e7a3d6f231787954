"""Hugging Face folders: read under any plan, and written so that transformers loads them."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import make_job
from safetensors.torch import load_file, save_file
from torch import Tensor

import titanlite
from titanlite import cli
from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig
from titanlite.errors import TitanliteError
from titanlite.job import Job
from titanlite.modules.batch import call_model
from titanlite.modules.shards import whole_tensor
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import World, open_world
from titanlite.registry import MODELS
from titanlite.tools.sample.generate import Choice, generate

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 17,
    "max_position_embeddings": 64,
}
GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 17,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
SIZES: dict[str, dict[str, Any]] = {
    "LlamaConfig": LLAMA,
    "Qwen3Config": {**LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "GPT2Config": GPT2,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 17}
OWN_LLAMA = {**SMALL, "name": "llama3", "n_kv_heads": 2, "multiple_of": 32, "rope_theta": 10000.0}
# Mixtral's experts, and DeepSeek-V3's: a bias, a shared expert, and a dense block.
MIXTRAL = {
    **OWN_LLAMA,
    "rope_scaling_factor": 1.0,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_hidden_dim": 48,
    "moe_score_func": "softmax",
    "moe_route_norm": True,
    "moe_score_before_experts": False,
    "moe_load_balance_coeff": None,
}
GLM = {
    **MIXTRAL,
    "n_layers": 3,
    "moe_n_dense_layers": 1,
    "moe_num_shared_experts": 1,
    "moe_top_k": 3,
    "moe_score_func": "sigmoid",
    "moe_route_scale": 2.5,
    "moe_load_balance_coeff": 1e-3,
    "rope_scaling_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 16,
}
# Model of titanlite, its sizes, and the configuration of transformers for the same.
OWN: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "llama3": (
        {
            **OWN_LLAMA,
            "rope_scaling_factor": 4.0,
            "rope_scaling_original_max_position_embeddings": 16,
        },
        "LlamaConfig",
        {**LLAMA, "intermediate_size": 192, "rms_norm_eps": 1e-5, "rope_parameters": ROPE},
    ),
    "gpt2": ({**SMALL, "name": "gpt2", "max_seq_len": 64}, "GPT2Config", GPT2),
    "Mixtral": (
        MIXTRAL,
        "MixtralConfig",
        {
            **LLAMA,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "DeepSeek-V3's experts": (
        GLM,
        "Glm4MoeConfig",
        {
            **LLAMA,
            "intermediate_size": 192,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 0,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
    ),
}
TP_FSDP = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}


def config_of(model: dict[str, Any], folder: Path, plan: dict[str, Any], **keys: Any) -> JobConfig:
    checkpoint = {"enable": True, "initial_load_in_hf": True, "last_save_in_hf": True}
    return JobConfig.from_dict(
        {
            "job": {"dump_folder": str(folder)},
            "model": model,
            "training": {
                "dataset": "digits",
                "global_batch_size": 4,
                "local_batch_size": 2,
                "steps": 2,
                "dtype": "float32",
            },
            "lr_scheduler": {"warmup_steps": 1},
            "activation_checkpoint": {"mode": "none"},
            "parallelism": {**plan, "disable_loss_parallel": True},
            "checkpoint": {**checkpoint, **keys},
        }
    )


def logits_of(job: Job, tokens: Tensor) -> Tensor:
    """The logits of the same tokens on all ranks."""
    batch = job.draw()[0]
    rows = tokens[: batch.tokens.size(0)]
    with torch.no_grad():
        found = call_model(job.parts[0], batch.replace(tokens=rows))
    return whole_tensor(found)


def train(
    place: Place, config: JobConfig, plain_of: Callable[[Path], Any], source: Path
) -> tuple[float, float]:
    """The logits' differences from transformers': of the weights loaded, and of those saved."""
    with open_world(place) as world:
        return _train(world, config, plain_of, source)


def _train(
    world: World, config: JobConfig, plain_of: Callable[[Path], Any], source: Path
) -> tuple[float, float]:
    job = make_job(config, world)
    tokens = job.draw()[0].tokens.clone()
    torch.distributed.broadcast(tokens, 0)
    with Checkpoints(job) as checkpoints:
        before = (logits_of(job, tokens) - plain_of(source)(tokens).logits).abs().max()
        for step in (1, 2):
            job.step(step)
            checkpoints.after_step(step, is_last=step == 2)
    saved = Path(config.job.dump_folder) / "checkpoint" / "step-2"
    after = (logits_of(job, tokens) - plain_of(saved)(tokens).logits).abs().max()
    return float(before), float(after)


def plain_model(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_random(
    folder: Path, config_class: str, sizes: dict[str, Any] | None = None, **options: Any
) -> dict[str, Tensor]:
    """A folder that transformers writes, of a tiny random model; its weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(sizes or SIZES[config_class]))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # Norms and biases too, so that an exchange of two of them is noticed.
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(0.2, -0.2, buffer.numel()))
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("config_class", list(SIZES))
def test_transformers_folder_is_read_and_written_under_a_plan(
    tmp_path: Path, config_class: str
) -> None:
    source = tmp_path / "source"
    save_random(source, config_class, max_shard_size="60KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    model = {"name": "hf", "path": str(source)}
    config = config_of(model, tmp_path, TP_FSDP, initial_load_path=str(source))
    for before, after in spawn(train, 4, config, plain_model, source):
        assert before < 1e-5
        assert after < 1e-5
    saved = tmp_path / "checkpoint" / "step-2"
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert (saved / "generation_config.json").is_file()
    # Another run starts from it, by either key.
    for in_hf in (True, False):
        again = config_of(
            {"name": "hf", "config_class": config_class, "values": SIZES[config_class]},
            tmp_path / f"again-{in_hf}",
            {"data_parallel_shard_degree": 2},
            initial_load_path=str(saved),
            initial_load_in_hf=in_hf,
        )
        for before, after in spawn(train, 2, again, plain_model, saved):
            assert before < 1e-5
            assert after < 1e-5


def load_and_save(place: Place, config: JobConfig) -> None:
    with open_world(place) as world:
        job = make_job(config, world)
        with Checkpoints(job) as checkpoints:
            checkpoints.after_step(2, is_last=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf", "gpt2"])
def test_stages_of_a_tied_model_read_and_write_the_same_folder(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    weights = save_random(source, "GPT2Config")
    model = OWN["gpt2"][0] if name == "gpt2" else {"name": "hf", "path": str(source)}
    plan = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    config = config_of(model, tmp_path, plan, initial_load_path=str(source))
    spawn(load_and_save, 4, config)
    found = dict(plain_model(tmp_path / "checkpoint" / "step-2").named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def page(place: Place, folder: Path, source: Path, tokens: Tensor) -> float:
    """The code of docs/huggingface.md."""
    sys.path.insert(0, str(folder))
    from torch.distributed.device_mesh import init_device_mesh

    with open_world(place) as world:
        step = importlib.import_module("hf_loop").step
        out = folder / f"out-{world.size}"
        found: float = step(init_device_mesh("cpu", (world.size,)), source, tokens, out)
        return found


@pytest.mark.slow
def test_the_loop_of_the_page_does_as_one_process(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_random(source, "LlamaConfig")
    text = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    (code,) = re.findall(r"```python\n(# hf_loop.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "hf_loop.py").write_text(code)
    tokens = torch.randint(17, (2, 64), generator=torch.Generator().manual_seed(1))
    (alone,) = spawn(page, 1, tmp_path, source, tokens)
    assert spawn(page, 2, tmp_path, source, tokens) == pytest.approx([alone] * 2, rel=1e-5)
    one, two = (dict(plain_model(tmp_path / f"out-{n}").named_parameters()) for n in (1, 2))
    before = dict(plain_model(source).named_parameters())
    for name, weight in one.items():
        assert not torch.equal(weight, before[name]), name
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OWN))
def test_own_model_reads_and_writes_folders_of_transformers(tmp_path: Path, name: str) -> None:
    model, config_class, sizes = OWN[name]
    source = tmp_path / "source"
    weights = save_random(source, config_class, sizes)
    plan = {**TP_FSDP, "expert_parallel_degree": 2} if "moe_num_experts" in model else TP_FSDP
    config = config_of(model, tmp_path, plan, initial_load_path=str(source))
    for before, after in spawn(train, 4, config, plain_model, source):
        assert before < 1e-5
        assert after < 1e-5
    saved = tmp_path / "checkpoint" / "step-2"
    found = dict(plain_model(saved).named_parameters())
    assert {n: w.shape for n, w in found.items()} == {n: w.shape for n, w in weights.items()}
    # The folder of transformers becomes a checkpoint with this model's names, and back.
    assert command("convert", source, "--model", model["name"], "--out", tmp_path / "step-0") == 0
    assert command("convert", tmp_path / "step-0", "--out", tmp_path / "back") == 0
    back = dict(plain_model(tmp_path / "back").named_parameters())
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3's experts"])
def test_experts_of_transformers_are_read_and_written(tmp_path: Path, name: str) -> None:
    model, config_class, sizes = OWN[name]
    source, out = tmp_path / "source", tmp_path / "out"
    save_random(source, config_class, sizes)
    own = own_model(model)
    titanlite.load_hf(own, source)
    tokens = torch.randint(17, (4, 32), generator=torch.Generator().manual_seed(1))
    theirs = plain_model(source)
    with torch.no_grad():
        difference = (own(tokens) - theirs(tokens).logits).abs().max()
    assert difference < 1e-5
    # All tensors are written as they were, the bias included, from the model and by convert.
    titanlite.save_hf(own, out)
    assert command("convert", source, "--model", "llama3", "--out", tmp_path / "step-0") == 0
    assert command("convert", tmp_path / "step-0", "--out", tmp_path / "back") == 0
    wanted = load_file(source / "model.safetensors")
    for folder in (out, tmp_path / "back"):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        again = plain_model(folder).state_dict()
        assert all(torch.equal(again[n], tensor) for n, tensor in theirs.state_dict().items())
    # In bfloat16 the bias keeps float32.
    half = ("--dtype", "bfloat16", "--out", tmp_path / "half")
    assert command("convert", tmp_path / "step-0", *half) == 0
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert {n for n, tensor in found.items() if tensor.dtype == torch.float32} == {
        n for n in found if n.endswith("e_score_correction_bias")
    }


def own_model(model: dict[str, Any]) -> Any:
    spec = MODELS[model["name"]]
    fields = {key: value for key, value in model.items() if key != "name"}
    flavor = next(iter(spec.load_flavors().values()))
    return spec.load_part("build")(replace(flavor, **fields))


def command(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_a_model_by_hand_is_exported_and_loaded(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    weights = save_random(source, "Qwen3Config")
    model = plain_model(source)
    model.load_state_dict({name: torch.zeros_like(w) for name, w in model.state_dict().items()})
    titanlite.load_hf(model, source)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    titanlite.save_hf(model, out, like=source, shard_bytes=40_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert (out / "tokenizer.json").is_file()
    found = dict(plain_model(out).named_parameters())
    assert all(torch.equal(p, found[name]) for name, p in weights.items())
    with pytest.raises(TitanliteError, match="exists already; give another name"):
        titanlite.save_hf(model, out)
    with pytest.raises(TitanliteError, match="Linear has no Hugging Face format"):
        titanlite.save_hf(torch.nn.Linear(2, 2), tmp_path / "none")


@pytest.mark.parametrize("config_class", ["LlamaConfig", "GPT2Config"])
def test_convert_to_a_checkpoint_and_back(
    tmp_path: Path, config_class: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    weights = save_random(source, config_class)
    assert command("convert", source, "--out", tmp_path / "step-0") == 0
    assert command("convert", tmp_path / "step-0", "--out", tmp_path / "a", "--like", source) == 0
    assert (tmp_path / "a" / "tokenizer.json").is_file()
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("source", "a")]
    assert configs[0] == configs[1]
    capsys.readouterr()
    found = dict(plain_model(tmp_path / "a").named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    options = ("--dtype", "bfloat16")
    assert command("convert", tmp_path / "step-0", "--out", tmp_path / "b", *options) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    found = dict(plain_model(tmp_path / "b").named_parameters())
    assert all(
        torch.equal(found[name], weight.bfloat16().float()) for name, weight in weights.items()
    )
    # What titanlite wrote is read with the configuration that it has.
    assert command("convert", tmp_path / "b", "--out", tmp_path / "c") == 0
    assert command("convert", tmp_path / "c", "--out", tmp_path / "d") == 0
    assert not (tmp_path / "d" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_greedy_sampling_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes, config_class, values = OWN[name]
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config_class)(**values)
    ).eval()
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3)  # logits far apart, so that no two nearly tie
    theirs.save_pretrained(tmp_path / "theirs")
    own = own_model(sizes)
    titanlite.load_hf(own, tmp_path / "theirs")
    prompts = torch.randint(16, (3, 5))
    expected = theirs.generate(
        prompts, do_sample=False, max_length=40, eos_token_id=None, pad_token_id=16
    )
    generators = [torch.Generator() for _ in prompts]
    found = generate(own, prompts, 40, generators, Choice(temperature=0))
    assert torch.equal(found, expected)
    assert len(found[:, 5:].unique()) > 3


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_a_folder_is_checked_module_by_module(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config_class, sizes = OWN[name]
    source = tmp_path / "source"
    save_random(source, config_class, sizes)
    command = ["convert", str(source), "--check", "--model", model["name"]]
    assert cli.main(command) == 0
    assert re.search(r"outputs agree: \d+ modules, to \d\.\de-0[678]", capsys.readouterr().out)
    # Rotary pairs in another order; or q, k and v exchanged.
    spec = MODELS[model["name"]]
    right = spec.load_part("hf")

    def wrong(parameter: str, shape: Any, of: Any) -> Any:
        place = right.tensor(parameter, shape, of)
        rows = place.rows and ((place.rows[0] + shape[0]) % place.rows[1], place.rows[1])
        return replace(place, head_dim=None, rows=rows)

    monkeypatch.setitem(MODELS, name, replace(spec, hf=replace(right, tensor=wrong)))
    assert cli.main(command) == 1
    told = capsys.readouterr().out
    assert "DIFFERS: layers.0.attention.wo, there" in told
    # A tensor that transformers does not find.
    tensors = load_file(source / "model.safetensors")
    lost = next(key for key in tensors if "layers.1" in key or "h.1" in key)
    tensors["lost"] = tensors.pop(lost)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert cli.main(command) == 2
