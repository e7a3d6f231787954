"""Conversations as data: the template, answers as targets, and packing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data_text import build, job

from titanlite.data.text.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.errors import ConfigError

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Sum?"},
    {"role": "assistant", "content": "3"},
]
TEXT = "user: Hi\nassistant: Hello\nuser: Sum?\nassistant: 3\n"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_job(path: Path | None = None, **changes: Any) -> Any:
    if path is not None:
        changes["training__dataset_path"] = str(path)
        changes["job__dump_folder"] = str(path.parent / "out")
    return job(training__dataset="chat", **changes)


def conversations(path: Path, count: int = 40) -> Path:
    lines = [
        {"messages": [*TALK[:3], {"role": "assistant", "content": f"{n}"}]} for n in range(count)
    ]
    lines += [{"prompt": "Hi", "completion": "Hello"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_only_answers_are_targets_and_conversations_are_documents(tmp_path: Path) -> None:
    config = chat_job(
        conversations(tmp_path / "talk.jsonl"), training__attend_across_documents=False
    )
    data = build(config, seq_len=200)
    # The stream without its order: what follows a token is its target, or it has none.
    sample = {name: field.tolist() for name, field in data.sample(0).items()}
    learned = [t for t in sample["targets"] if t != -100]
    text = bytes(t for t in sample["tokens"] if t < 256).decode()
    answers = "".join(
        f"{line.removeprefix('assistant: ')}\n"
        for line in text.splitlines()
        if line.startswith("assistant: ")
    )
    told = bytes(t for t in learned if t < 256).decode()
    assert answers.startswith(told) or told.startswith(answers)
    assert ByteTokenizer.end_of_text in learned
    for place, (token, target) in enumerate(
        zip(sample["tokens"][1:], sample["targets"], strict=False)
    ):
        assert target in (-100, token), place
    # A conversation of two answers is one document, whose positions start at 0.
    assert "user: Sum?" in text
    starts = [i for i, position in enumerate(sample["positions"]) if position == 0]
    assert all(sample["tokens"][i - 1] == ByteTokenizer.end_of_text for i in starts[1:])
    assert (
        max(sample["documents"])
        == len(starts) - 1
        == sample["tokens"].count(256) - (sample["tokens"][-1] == 256)
    )
    assert build(config, "validation", seq_len=20).num_samples


def test_conversations_that_ship_have_a_training_and_a_validation_part() -> None:
    config = chat_job()
    parts = [build(config, split, seq_len=512) for split in ("train", "validation")]
    assert parts[0].num_samples > parts[1].num_samples > 20
    targets = torch.stack([parts[0].sample(index)["targets"] for index in range(20)])
    assert 0.5 < float((targets != -100).float().mean()) < 0.95


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose eos token ends each turn, as those of chat models."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    return tmp_path


def test_a_template_of_a_folder_gives_transformers_tokens(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from titanlite.data.text.chat import ANSWER, FIRST, marked_tokens

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    marked = marked_tokens(TALK, tokenizer)
    tokens = [int(t) for t in marked & (FIRST - 1)]
    wanted = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False)
    # A conversation ends with an end, after the template's last line.
    assert tokens == [*wanted, tokenizer.end_of_text]
    learned = [int(t & (FIRST - 1)) for t in marked if t & ANSWER]
    assert tokenizer.decode(learned) == "Hello\n3\n"
    config = chat_job(model__hf_assets_path=str(folder), model__vocab_size=300)
    assert build(config, seq_len=64).num_samples


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("", "has no chat template; put one there as chat_template.jinja"),
        ("{{ messages|length }}{{ messages[-1].content }}", "renders earlier turns otherwise"),
        ("{{ raise_exception('system only') }}", r"refuses a conversation \(system only\)"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(folder: Path, template: str, line: str) -> None:
    pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(template)
    if not template:
        (folder / "chat_template.jinja").unlink()
    config = chat_job(model__hf_assets_path=str(folder), model__vocab_size=300)
    with pytest.raises(ConfigError, match=f"^model.hf_assets_path: .*{line}"):
        build(config, seq_len=64)


@pytest.mark.parametrize("text", ["{}", '{"messages": [{"role": 1, "content": "x"}]}', "no"])
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, text: str) -> None:
    path = conversations(tmp_path / "talk.jsonl", 1)
    path.write_text(f"{path.read_text()}\n{text}\n")
    with pytest.raises(ConfigError, match=r"talk.jsonl: line 3 is not \{"):
        build(chat_job(path), seq_len=8)


def test_a_prompt_is_a_question() -> None:
    from titanlite.config.data import spec_for

    tokens = spec_for(chat_job()).start_tokens("Hi")
    assert tokens is not None
    assert bytes(tokens).decode() == ByteTokenizer().render(TALK[:1], asks=True)
