"""Models of Hugging Face, their files unmodified, agree with one process under plans."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import JobConfig, parse_args
from titanlite.errors import ConfigError, TitanliteError
from titanlite.tools.verify.verify import Verifier

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 17,
    "max_position_embeddings": 64,
}
PLANS: dict[str, dict[str, int]] = {
    "TP x FSDP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
    "PP x CP": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
}


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
}


def job(config_class: str, plan: dict[str, int], **values: Any) -> dict[str, dict[str, Any]]:
    return {
        "model": {"name": "hf", "config_class": config_class, "values": {**SIZES, **values}},
        "training": {"dataset": "digits", "global_batch_size": 8, "local_batch_size": 2},
        "lr_scheduler": {"warmup_steps": 2},
        "activation_checkpoint": {"mode": "none"},
        "parallelism": plan,
    }


@pytest.fixture(scope="module")
def transformers_verifier() -> Iterator[Verifier]:
    pytest.importorskip("transformers")
    with Verifier(timeout_seconds=200) as verifier:
        yield verifier


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_llama_agrees(transformers_verifier: Verifier, plan: dict[str, int]) -> None:
    found = transformers_verifier.verify(JobConfig.from_dict(job("LlamaConfig", plan)), steps=2)
    assert found.agrees, found.findings
    assert 1e-6 / found.margin < 1e-12


@pytest.mark.slow
def test_tied_qwen3_with_norms_of_heads_agrees(transformers_verifier: Verifier) -> None:
    plan = PLANS["TP x FSDP"]
    config = JobConfig.from_dict(job("Qwen3Config", plan, head_dim=16, tie_word_embeddings=True))
    found = transformers_verifier.verify(config, steps=2)
    assert found.agrees, found.findings
    assert 1e-6 / found.margin < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "plan", "values"),
    # Joined q, k and v, and norms of whole q and k; a norm without weights; half of a head rotated;
    # norms of heads with YaRN.
    [
        ("Phi3Config", "TP x FSDP", {}),
        ("Olmo2Config", "TP x FSDP", {}),
        ("OlmoConfig", "PP x CP", {}),
        ("GlmConfig", "PP x CP", {"head_dim": 16}),
        ("Qwen3Config", "PP x CP", {"head_dim": 16, "rope_parameters": YARN}),
    ],
)
def test_other_families_agree(
    transformers_verifier: Verifier, config_class: str, plan: str, values: dict[str, Any]
) -> None:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = JobConfig.from_dict(job(config_class, PLANS[plan], **tokens, **values))
    found = transformers_verifier.verify(config, steps=2)
    assert found.agrees, found.findings
    assert 1e-6 / found.margin < 1e-12


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SCORED: dict[str, dict[str, Any]] = {
    "MistralConfig": {"sliding_window": 20},
    "Gemma2Config": {"head_dim": 16, "sliding_window": 20, "attn_logit_softcapping": 0.5},
    "Gemma3TextConfig": {
        "head_dim": 16,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GptOssConfig": {"head_dim": 16, "sliding_window": 20, "num_local_experts": 4, **EXPERTS},
    "DeepseekV3Config": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **EXPERTS,
    },
}
"""Windows, soft-capped scores, sinks, latent attention; each with values that show it."""


@pytest.mark.parametrize("config_class", SCORED)
def test_attention_scores_as_in_transformers(config_class: str) -> None:
    transformers = pytest.importorskip("transformers", "5")
    import torch

    from titanlite.models.hf.config import HFConfig
    from titanlite.models.hf.model import build

    torch.manual_seed(0)
    values = {**SIZES, **TOKENS, "num_hidden_layers": 2, **SCORED[config_class]}
    own = build(HFConfig(config_class=config_class, values=values)).double()
    for name, parameter in own.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    config = getattr(transformers, config_class)(**values)
    config._experts_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs.double().load_state_dict(own.state_dict(), strict=False)
    tokens, positions = torch.randint(3, 17, (2, 48)), torch.arange(48)[None]
    found = own(tokens, position_ids=positions, use_cache=False).logits
    # transformers computes the softmax in float32.
    expected = theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


OF_BLOCKS: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 4, "sliding_window": 20},
    "Qwen3MoeConfig": {"num_experts": 4, "head_dim": 16, **EXPERTS},
    "Glm4MoeConfig": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS},
    "OlmoeConfig": {"num_experts": 4, **EXPERTS},
    "Starcoder2Config": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "SmolLM3Config": {},
    "Exaone4Config": {"sliding_window": 20},
    "Ernie4_5Config": {"head_dim": 16},
    "Glm4Config": {"head_dim": 16},
    "Qwen2MoeConfig": {"num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS},
    "Gemma2Config": {**SCORED["Gemma2Config"], "final_logit_softcapping": 0.5},
}
"""More of the families whose blocks can be stages."""


@pytest.mark.slow
@pytest.mark.parametrize("config_class", OF_BLOCKS)
def test_stages_of_other_families_agree(transformers_verifier: Verifier, config_class: str) -> None:
    values = {**TOKENS, "num_hidden_layers": 2, **OF_BLOCKS[config_class]}
    config = JobConfig.from_dict(job(config_class, {"pipeline_parallel_degree": 2}, **values))
    found = transformers_verifier.verify(config, steps=2)
    assert found.agrees, found.findings


EXPERT_PLANS = {
    "MixtralConfig": {"tensor_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 4},
    "GptOssConfig": {"tensor_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
    "Qwen3MoeConfig": {"tensor_parallel": 2, "expert_parallel": 2},
    "OlmoeConfig": {"context_parallel": 2, "expert_parallel": 2},
    "Qwen2MoeConfig": {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("config_class", EXPERT_PLANS)
def test_experts_that_are_spread_over_ranks_agree(
    transformers_verifier: Verifier, config_class: str
) -> None:
    values = {**TOKENS, "num_hidden_layers": 2, **OF_BLOCKS.get(config_class, {})}
    values |= SCORED.get(config_class, {})
    plan = {f"{axis}_degree": n for axis, n in EXPERT_PLANS[config_class].items()}
    config = JobConfig.from_dict(job(config_class, plan, **values))
    found = transformers_verifier.verify(config, steps=3)
    assert found.agrees, found.findings
    assert max(x for step in found.differences for x in step.values()) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        ("pipeline_parallel", "context_parallel"),
        ("tensor_parallel", "data_parallel_shard"),
        ("pipeline_parallel", "tensor_parallel"),
    ],
)
def test_tied_gpt2_agrees(transformers_verifier: Verifier, axes: tuple[str, ...]) -> None:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 17}
    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sections = job("GPT2Config", {f"{axis}_degree": 2 for axis in axes})
    sections["model"]["values"] = {**sizes, **off}
    found = transformers_verifier.verify(JobConfig.from_dict(sections), steps=2)
    assert found.agrees, found.findings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "axes"),
    [
        ("LlamaConfig", ("tensor_parallel", "context_parallel")),
        ("GPT2Config", ("pipeline_parallel", "context_parallel")),
    ],
)
def test_documents_agree(
    transformers_verifier: Verifier, tmp_path: Path, config_class: str, axes: tuple[str, ...]
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"word " * (n % 7)}{n}"}}\n' for n in range(400)))
    sections = job(config_class, {f"{axis}_degree": 2 for axis in axes}, vocab_size=272)
    if config_class == "GPT2Config":
        off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 272}
        sections["model"]["values"] = {**sizes, **off}
    sections["training"] |= {
        "dataset": "text",
        "dataset_path": str(text),
        "seq_len": 64,
        "attend_across_documents": False,
    }
    found = transformers_verifier.verify(JobConfig.from_dict(sections), steps=2)
    assert found.agrees, found.findings
    # GPT-2 is in float64 throughout, so the tolerance is 1e-11 there.
    assert config_class == "GPT2Config" or 1e-6 / found.margin < 1e-12


TABLE = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


@pytest.mark.slow
def test_a_table_of_styles_in_the_job_replaces_that_of_the_model(
    transformers_verifier: Verifier,
) -> None:
    def verify(**entries: str) -> Any:
        table = {**TABLE, **{f"layers.*.{k}": v for k, v in entries.items()}}
        table = {name: entry for name, entry in table.items() if entry}
        sections = job("LlamaConfig", {"tensor_parallel_degree": 2}, base_model_tp_plan=table)
        return transformers_verifier.verify(JobConfig.from_dict(sections), steps=2)

    assert verify().agrees
    found = verify(input_layernorm="replicated_with_grad_allreduce")
    assert "(model.layers.0.input_layernorm.weight, " in found.findings[0], found.findings
    assert "NormLocal in the tensor-parallel plan) are 2 times as large as on" in found.findings[0]
    error = str(verify(**{"mlp.down_proj": "colwise"}).error)
    assert "layers.0.mlp.down_proj (tensor-parallel plan: " in error
    error = str(verify(**{"mlp.down_proj": ""}).error)
    assert "layers.0.mlp.down_proj (not in the tensor-parallel plan)" in error


@pytest.mark.slow
def test_the_page_shows_how_to_register_another_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    (code,) = re.findall(r"```python\n# my_plan.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_plan.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    sections = job("GPT2Config", {"tensor_parallel_degree": 2})
    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 17}
    sections["model"] |= {"name": "my_gpt2", "values": {**sizes, **off}}
    sections["experimental"] = {"custom_import": "my_plan"}
    # Ranks of their own: a pool that runs already would not see the folder.
    with Verifier(timeout_seconds=200) as verifier:
        error = str(verifier.verify(JobConfig.from_dict(sections), steps=1).error)
    assert '.0.mlp.c_proj (tensor-parallel plan: "transformer.h.*.mlp.c_proj": ColwiseConv' in error
    del sys.modules["my_plan"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of sizes only look whether transformers is there."""
    find = "titanlite.models.hf.config.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: object())


@pytest.mark.usefixtures("installed")
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    def problems(plan: dict[str, int], config_class: str = "LlamaConfig", **values: Any) -> Any:
        with pytest.raises(ConfigError) as caught:
            JobConfig.from_dict(job(config_class, plan, **values))
        return caught.value.problems

    assert problems({}, "GPT2Config", resid_pdrop=0) == (
        "model.values: GPT-2 drops out differently under each plan; set attn_pdrop, embd_pdrop to "
        "0",
    )
    sizes = {"n_embd": 64, "n_head": 2, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    assert problems({"tensor_parallel_degree": 4}, "GPT2Config", **sizes) == (
        "parallelism.tensor_parallel_degree: 4 does not divide n_head 2; give one of 1, 2",
    )
    assert problems({"tensor_parallel_degree": 4}) == (
        "parallelism.tensor_parallel_degree: 4 does not divide num_key_value_heads 2; give one of "
        "1, 2",
    )
    assert problems({}, attention_dropout=0.1) == (
        "model.values: attention_dropout 0.1 differs between plans; set it to 0",
    )
    with pytest.raises(ConfigError) as caught:
        parse_args(["--model.name=hf", f"--model.path={tmp_path}"])
    assert caught.value.problems[0].startswith(f'model.path: "{tmp_path}" has no config.json')


def test_tokens_attend_only_to_their_own_document() -> None:
    pytest.importorskip("transformers")
    import torch

    from titanlite.models.hf.config import HFConfig
    from titanlite.models.hf.model import build

    torch.manual_seed(0)
    model = build(HFConfig(config_class="LlamaConfig", values=SIZES)).double()
    tokens = torch.randint(17, (1, 9))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    packed = model(tokens, position_ids=positions, documents=documents, use_cache=False).logits
    parts = tokens.split([4, 2, 3], dim=1)
    alone = [model(part, use_cache=False).logits for part in parts]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)


def test_positions_that_are_not_those_of_the_layout_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titanlite.modules.attention import make_layout
    from titanlite.parallelize.context_parallel.huggingface import register_ring_attention

    sizes = {**SIZES, "num_hidden_layers": 1}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        name = register_ring_attention(dist.group.WORLD, name="ring_of_a_test")
        config = transformers.LlamaConfig(**sizes, attn_implementation=name)
        model, tokens = transformers.LlamaForCausalLM(config), torch.ones(1, 4, dtype=torch.long)
        own = make_layout("headtail", 2).positions(0, 8)[None]
        assert own.tolist() == [[0, 1, 6, 7]]
        model(tokens, position_ids=own, use_cache=False)
        documents = torch.zeros_like(tokens)
        model(tokens, position_ids=documents, documents=documents, use_cache=False)
        with pytest.raises(TitanliteError, match="position_ids are not those of this rank's"):
            model(tokens, position_ids=torch.arange(4)[None], use_cache=False)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data_parallel_shard", "data_parallel_replicate"])
def test_a_family_of_which_only_the_blocks_are_known_agrees(
    transformers_verifier: Verifier, axis: str
) -> None:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    values = {**tokens, "num_hidden_layers": 2, "dropout": 0.0, "attention_dropout": 0.0}
    config = JobConfig.from_dict(job("OPTConfig", {f"{axis}_degree": 2}, **values))
    found = transformers_verifier.verify(config, steps=1)
    assert found.agrees, found.findings


def test_what_other_families_lack_is_one_line() -> None:
    pytest.importorskip("transformers")
    tp, pp = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
    more: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for config_class, plan, values, said in (
        (
            "BertConfig",
            {},
            {},
            "model.config_class: BertLMHeadModel has no single list of blocks in its base model, "
            "or its attention is not causal; its lists are bert.encoder.layer (4 of BertLayer); "
            "give a causal language model of transformers",
        ),
        (
            "OPTConfig",
            tp,
            {},
            "parallelism.tensor_parallel_degree: of OPTForCausalLM only the blocks are known, "
            "model.decoder.layers, which is enough for FSDP and DDP; give 1",
        ),
        ("NoConfig", {}, {}, "model.config_class: "),
        (
            "GraniteConfig",
            pp,
            {},
            "parallelism.pipeline_parallel_degree: GraniteForCausalLM may compute between its",
        ),
        (
            "LlamaConfig",
            {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
            {},
            "parallelism.expert_parallel_degree: 2, but the model has no experts; remove this key",
        ),
        (
            "OlmoConfig",
            {"tensor_parallel_degree": 4},
            {},
            "parallelism.tensor_parallel_degree: 4 does not divide num_key_value_heads 2; give one "
            "of 1, 2",
        ),
        (
            "Llama4TextConfig",
            {},
            {},
            "model.values: layers of type chunked_attention are not supported",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            JobConfig.from_dict(job(config_class, plan, **more, **values))
        assert len(caught.value.problems) == 1, caught.value.problems
        assert caught.value.problems[0].startswith(said)
    for plan in ({"data_parallel_shard_degree": 2}, {"data_parallel_replicate_degree": 2}):
        JobConfig.from_dict(job("OPTConfig", plan, **more))


def test_wrong_tables_of_styles_are_one_line() -> None:
    pytest.importorskip("transformers")

    def said(table: Any, config_class: str = "LlamaConfig") -> str:
        with pytest.raises(ConfigError) as caught:
            JobConfig.from_dict(
                job(config_class, {"tensor_parallel_degree": 2}, base_model_tp_plan=table)
            )
        return caught.value.problems[0]

    assert said({**TABLE, "layers.*.mlp.down": "rowwise"}) == (
        "model.values: base_model_tp_plan names layers.*.mlp.down, which is no module of the "
        "LlamaModel; correct it, or remove it"
    )
    assert "unsupported entries: layers.*.mlp.up_proj (column)" in said(
        {**TABLE, "layers.*.mlp.up_proj": "column"}
    )
    assert said(3).startswith("model.values: base_model_tp_plan is not a table")
    assert said(TABLE, "GPT2Config").startswith("model.values: GPT-2 is sharded by titanlite's own")


def test_without_transformers_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("titanlite.models.hf.config.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_dict(job("LlamaConfig", {}))
    assert caught.value.problems == (
        'model.name: "hf" needs transformers; install titanlite[hf], or another model',
    )
