"""Text as data: tokens, documents, the split, packing, and what is kept beside the files."""

import gzip
import importlib.util
import io
import json
import math
import multiprocessing
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config import JobConfig
from titanlite.config.data import prepare_data, source_arguments, spec_for
from titanlite.data.keyed_random import Permutation
from titanlite.data.sampler import GlobalBatchSampler
from titanlite.data.text import corpus, documents
from titanlite.data.text.documents import python_manual, read_documents, split_long
from titanlite.data.text.packed import PackedText, Stream
from titanlite.data.text.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.errors import ConfigError
from titanlite.models.llama3.config import FLAVORS
from titanlite.tools.sample.generate import TextWriter

END = 256
TINY = FLAVORS["tiny"]


def job(path: Path | None = None, **changes: Any) -> JobConfig:
    values = {"model": {"name": "llama3", "flavor": "tiny"}, "training": {"dataset": "pydoc"}}
    if path is not None:
        values["training"] = {"dataset": "text", "dataset_path": str(path)}
        values["job"] = {"dump_folder": str(path.parent / "out")}
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return JobConfig.from_dict(values)


def build(config: JobConfig, split: str = "train", seq_len: int = 8, model: Any = TINY) -> Any:
    dataset = config.training.dataset if split == "train" else config.validation_dataset
    return spec_for(config, dataset).make(**source_arguments(config, model, seq_len, split))


def texts_of(dataset: PackedText) -> list[str]:
    """The documents of a stream of bytes."""
    tokens = bytes_and_ends(dataset)
    found, current = [], bytearray()
    for token in tokens:
        if token == END:
            found.append(current.decode())
            current = bytearray()
        else:
            current.append(token)
    assert not current
    return found


def bytes_and_ends(dataset: PackedText) -> list[int]:
    stream = dataset._stream
    return stream.read(0, len(stream)).tolist()


def fails(config: JobConfig, split: str = "train", **arguments: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        build(config, split, **arguments)
    (line,) = raised.value.problems
    assert "\n" not in line
    return line


# Packing.


def reference(
    texts: Sequence[bytes], seq_len: int
) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Tokens, targets, documents and positions of every sequence, one token at a time."""
    stream = [token for text in texts for token in (*text, END)]
    found = []
    for start in range(0, len(stream) - seq_len, seq_len):
        tokens = stream[start : start + seq_len]
        document, position, numbers, places = 0, 0, [], []
        for token in tokens:
            numbers.append(document)
            places.append(position)
            position += 1
            if token == END:
                document, position = document + 1, 0
        found.append((tokens, stream[start + 1 : start + seq_len + 1], numbers, places))
    return found


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=8),
    seq_len=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_sequences_are_those_of_a_simple_reference(texts, seq_len, cuts):
    tokens = np.array([t for text in texts for t in (*text, END)], dtype=np.uint16)
    # However the stream lies in files.
    stream = Stream(np.split(tokens, sorted(min(cut, len(tokens)) for cut in cuts)))
    packed = PackedText(stream, seq_len, end_of_text=END)
    expected = reference(texts, seq_len)
    assert packed.num_samples == len(expected)
    for index, fields in enumerate(expected):
        sample = packed.sample(index)
        assert list(sample) == ["tokens", "targets", "documents", "positions"]
        assert all(field.dtype == torch.int64 for field in sample.values())
        assert tuple(field.tolist() for field in sample.values()) == fields


def test_a_sample_depends_on_seed_and_index_alone():
    config = job(debug__seed=3)
    one, other = build(config), build(config)
    indices = [5, 0, one.num_samples + 2, 5 * one.num_samples]
    taken = {index: one.sample(index)["tokens"] for index in indices}
    for index in reversed(indices):
        assert torch.equal(other.sample(index)["tokens"], taken[index])
    differs = build(job(debug__seed=4))
    assert any(not torch.equal(differs.sample(i)["tokens"], taken[i]) for i in indices)


def test_an_epoch_reads_every_sequence_once_in_another_order():
    stream = Stream([np.arange(40, dtype=np.uint32)])
    packed = PackedText(stream, 3, shuffle_seed=0)
    epochs = [[packed.sample(13 * e + i)["tokens"][0].item() for i in range(13)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 39, 3))
    assert epochs[0] != epochs[1] != sorted(epochs[1])


@settings(deadline=None)
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 9), count=st.integers(1, 300))
def test_a_permutation_has_every_place_once(seed, epoch, count):
    order = Permutation(seed, epoch, count)
    assert sorted(order[place] for place in range(count)) == list(range(count))


def test_permutations_are_uniform_enough():
    """Each of 8 elements is at each of 8 places about as often: chi-squared of 49 degrees."""
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        order = Permutation(1, epoch, 8)
        for place in range(8):
            counts[place, order[place]] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 95  # one in 10,000 is above


def test_all_plans_read_the_same_global_batch():
    config = job(training__attend_across_documents=False)
    data, fields = build(config), spec_for(config).fields

    def batch(dp_degree: int, local: int) -> dict[str, torch.Tensor]:
        parts = []
        for rank in range(dp_degree):
            sampler = GlobalBatchSampler(data, dp_degree, rank, local, fields)
            sampler.state = 16
            parts += sampler.draw(8)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0].fields}

    whole = batch(1, 8)
    assert {"tokens", "targets", "documents", "positions"} < whole.keys()
    for dp_degree, local in ((2, 4), (4, 1), (8, 1)):
        part = batch(dp_degree, local)
        assert all(torch.equal(part[name], whole[name]) for name in whole)


# Python's manual.


def test_the_manual_has_no_paragraph_in_both_parts():
    parts: tuple[set[str], set[str]] = set(), set()
    sizes = [0, 0]
    for text, held in python_manual():
        sizes[held] += len(text)
        parts[held].update(p for p in map(str.strip, text.split("\n\n")) if len(p) >= 80)
    assert not parts[0] & parts[1]
    assert 0.02 < sizes[1] / sum(sizes) < 0.2


def test_the_manual_is_whole_topics_and_says_which_python_it_is():
    import platform

    config = job()
    train, held_out = build(config), build(config, "validation")
    texts = [text for text, _ in python_manual()]
    assert sorted([*texts_of(train), *texts_of(held_out)]) == sorted(texts)
    assert train.fingerprint.startswith(f"Python {platform.python_version()}, ")
    assert train.fingerprint != held_out.fingerprint
    num_bytes = sum(len(text.encode()) for text in texts_of(held_out))
    assert held_out.tokens_per_byte == pytest.approx(1 + len(texts_of(held_out)) / num_bytes)


# Files.


def write_json_lines(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))


def read(*paths: Path) -> list[str]:
    return ["".join(document) for document in read_documents(paths, "training.dataset_path")]


def test_documents_of_all_kinds_of_files(tmp_path):
    texts = ["one\r\n", "zwei \u00fc", "", "\u4e09\n\n"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + texts[0].encode())
    write_json_lines(tmp_path / "b.jsonl", texts)
    with gzip.open(tmp_path / "c.json.gz", "wt") as file:
        file.write((tmp_path / "b.jsonl").read_text() + "\n")
    assert read(tmp_path / "a.txt") == texts[:1]
    assert read(tmp_path / "b.jsonl") == read(tmp_path / "c.json.gz") == texts


def test_columns_of_parquet_and_arrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number}" for number in range(5000)]
    table = pyarrow.table({"text": texts, "n": list(range(5000))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    with (
        pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    assert read(tmp_path / "a.parquet") == read(tmp_path / "b.arrow") == texts
    parquet.write_table(table.select(["n"]), tmp_path / "a.parquet")
    line = fails(job(tmp_path / "a.parquet"))
    assert line.endswith("a.parquet has no column `text`; rename the column of the text")
    (tmp_path / "b.arrow").write_bytes(b"no arrow")
    assert " is damaged (" in fails(job(tmp_path / "b.arrow"))


def hub_job(name: str, folder: Path, path: Path | str | None = None) -> JobConfig:
    given = {} if path is None else {"training__dataset_path": str(path)}
    return job(training__dataset=name, job__dump_folder=str(folder / "out"), **given)


def prepared(config: JobConfig) -> Any:
    """What a rank builds after the launcher has prepared the data."""
    prepare_data(config, TINY, 8)
    return build(config)


def test_data_sets_of_the_hub_are_read_from_the_cache_of_their_package(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    import pyarrow.parquet

    from titanlite.data.text import hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    repository = tmp_path / "words"
    repository.mkdir()
    texts = {"train": [f"a text {n}" for n in range(30)], "validation": ["another text"] * 3}
    for split, rows in texts.items():
        table = pyarrow.table({"url": ["-"] * len(rows), "text": rows})
        pyarrow.parquet.write_table(table, repository / f"{split}.parquet")

    # A local folder. Some of each document is held out, so both parts are compared.
    config = hub_job("hf", tmp_path, repository)
    train = prepared(config)
    plain = build(job(repository / "train.parquet", job__dump_folder=str(tmp_path / "out")))
    assert texts_of(train) == texts_of(plain)
    assert f"{repository}, train, " in train.fingerprint
    # A rank reads what was prepared and does not load the package.
    with monkeypatch.context() as without:
        without.setattr(hub, "_load", None)
        assert build(config).fingerprint == train.fingerprint
    other = {"validation__enable": True, "validation__dataset": "hf_validation"}
    other["validation__dataset_path"] = str(repository)
    both = job(
        training__dataset="hf",
        training__dataset_path=str(repository),
        job__dump_folder=str(tmp_path / "out"),
        **other,
    )
    prepare_data(both, TINY, 8)
    assert f"{repository}, validation, " in build(both, "validation").fingerprint

    # A name, from the cache; C4's is known.
    (made,) = (tmp_path / "cache/words/default/0.0.0").glob("*/dataset_info.json")
    cached = tmp_path / "cache/allenai___c4/en/0.0.0/0123"
    cached.mkdir(parents=True)
    about = json.loads(made.read_text()) | {"dataset_name": "c4", "config_name": "en"}
    (cached / "dataset_info.json").write_text(json.dumps(about))
    for split in texts:
        (made.parent / f"words-{split}.arrow").rename(cached / f"c4-{split}.arrow")
    for name, path in (("c4", None), ("hf", "allenai/c4:en")):
        assert texts_of(prepared(hub_job(name, tmp_path, path))) == texts_of(plain)

    # A folder that Dataset.save_to_disk has written.
    saved = datasets.Dataset.from_dict({"text": texts["train"]})
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "saved"))
    assert texts_of(prepared(hub_job("hf", tmp_path, tmp_path / "saved"))) == texts_of(plain)

    assert fails(hub_job("hf", tmp_path / "2", repository), model=TINY, seq_len=8_000)
    with pytest.raises(ConfigError, match=r"\(KeyError: 'validation'\); correct its name, or"):
        prepare_data(hub_job("hf_validation", tmp_path, tmp_path / "saved"), TINY, 8)
    saved.rename_column("text", "words").save_to_disk(str(tmp_path / "other"))
    assert "has no column `text`, but words" in fails(hub_job("hf", tmp_path, tmp_path / "other"))


def test_a_data_set_that_cannot_be_loaded_is_one_line(tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert fails(hub_job("c4", tmp_path)) == (
            "training.dataset: loading allenai/c4:en needs the package datasets, which is not "
            'installed; pip install "titanlite[datasets]", or give a folder of files as '
            "training.dataset_path"
        )

    def unreachable(path: str, name: str | None, split: str, keep_in_memory: bool) -> None:
        raise ConnectionError(f"Couldn't reach {path}, {name}, {split}\non the Hub")

    package = SimpleNamespace(load_dataset=unreachable, __spec__="-")
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert fails(hub_job("c4", tmp_path)) == (
        "training.dataset: the package datasets cannot load the split train of allenai/c4:en "
        "(ConnectionError: Couldn't reach allenai/c4, en, train on the Hub); load it once where "
        "there is a network, or give a folder of files as training.dataset_path"
    )
    with pytest.raises(ConfigError, match="is not a folder or a name such as owner/name"):
        hub_job("hf", tmp_path, tmp_path / "nowhere")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert fails(job(tmp_path / "a.parquet")).endswith(
        'a.parquet needs the package pyarrow, which is not installed; pip install "titanlite[text]"'
    )


def test_long_texts_are_cut_before_a_space_between_words(monkeypatch):
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 12)
    text = "one\ntwo three\n  four five sixseveneight-nine  ten"
    # The longest such piece, or else as much as allowed.
    expected = ["one\ntwo", " three\n  fou", "r five", " sixseveneig", "ht-nine  ten"]
    assert split_long(text) == expected


def test_pieces_have_the_tokens_of_the_whole_text(tmp_path, monkeypatch):
    """With the pre-tokenizer of GPT-2."""
    tokenizers = pytest.importorskip("tokenizers")
    texts = [text for text, _ in python_manual()]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>"])
    made.train_from_iterator(texts[:20], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    text = "".join(texts)
    (whole,) = tokenizer.encode([text])
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 4000)
    pieces = split_long(text)
    assert len(pieces) > 100
    assert np.array_equal(np.concatenate(tokenizer.encode(pieces)), whole)


def test_a_large_folder_holds_out_documents_by_their_text(tmp_path):
    texts = [f"document {number}" for number in range(2000)] + ["document 7"] * 5
    folder = tmp_path / "data"
    folder.mkdir()
    write_json_lines(folder / "b.jsonl", texts[1000:])
    write_json_lines(folder / "a.jsonl", texts[:1000])
    (folder / "empty.txt").touch()
    (folder / "state.json").write_text("{}")
    (folder / "notes.md").write_text("not text to train on")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.txt").write_text("hidden")
    config = job(folder)
    train, held_out = texts_of(build(config)), texts_of(build(config, "validation"))
    assert sorted([*train, *held_out]) == sorted(texts)
    assert [text for text in texts if text not in held_out] == train
    assert not set(train) & set(held_out)
    assert 20 < len(held_out) < 70


def test_a_small_folder_holds_out_the_end_of_each_document(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("0123456789" * 10)
    (folder / "b.txt").write_text("abcdefghij")
    config = job(folder)
    assert texts_of(build(config)) == ["0123456789" * 9, "abcdefghi"]
    assert texts_of(build(config, "validation")) == ["0123456789", "j"]


def test_nothing_is_held_out_where_validation_has_its_own_files(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    (tmp_path / "b.txt").write_text("abcdefghij" * 3)
    config = job(tmp_path / "a.txt", validation__dataset_path=str(tmp_path / "b.txt"))
    assert texts_of(build(config)) == ["0123456789" * 9, "0123456789"]
    assert texts_of(build(config, "validation"))[0].startswith("abcdefghij")


def test_tokens_are_kept_beside_the_text_until_it_changes(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("first " * 20)
    config = job(folder)
    before = build(config)
    (kept,) = (folder / ".titanlite").glob("text-????????????????")
    assert {file.name for file in kept.iterdir()} == {"train.bin", "held_out.bin", "about.json"}
    built = []
    write = corpus._write
    monkeypatch.setattr(corpus, "_write", lambda *given: built.append(given) or write(*given))
    assert build(config).fingerprint == before.fingerprint
    assert not built
    (folder / "a.txt").write_text("other " * 20)
    os.utime(folder / "a.txt", ns=(1, 1))
    after = build(config)
    assert len(built) == 1
    assert after.fingerprint != before.fingerprint
    assert texts_of(after)[0].startswith("other")
    # What a running job has mapped stays as it was.
    assert texts_of(before)[0].startswith("first")
    # A touched file with the same text is read again, and is the same data.
    (folder / "a.txt").write_text("first " * 20)
    assert build(config).fingerprint == before.fingerprint
    (kept / "train.bin").write_bytes(b"torn")
    assert build(config).fingerprint == before.fingerprint
    assert len(built) == 3


def test_where_the_folder_cannot_be_written_the_dump_folder_is_used(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("text " * 20)
    # Root may write everywhere, so a file takes the place of the folder.
    (folder / ".titanlite").touch()
    config = job(folder)
    assert build(config).num_samples > 0
    assert list((tmp_path / "out" / "data").glob("*-text-*/train.bin"))
    (tmp_path / "out").rename(tmp_path / "gone")
    (tmp_path / "out").touch()
    assert fails(config).startswith("training.dataset_path: its tokens cannot be written (")


def _build_in_process(config: JobConfig, results: Any) -> None:
    results.put(build(config).fingerprint)


def test_processes_that_start_together_tokenize_once(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_json_lines(folder / "a.jsonl", [f"text {number} " * 50 for number in range(500)])
    config = job(folder)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_build_in_process, args=(config, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = {results.get() for _ in processes}
    for process in processes:
        process.join()
    assert found == {build(config).fingerprint}
    assert not list((folder / ".titanlite").glob("*.new-*"))


# What is wrong is one line.


def test_broken_lines_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    advice = 'is not {"text": "..."}'
    for line in ("{", '{"text": 3}', '{"words": "a"}', "[1]", '{"text": "\\ud800"}'):
        path.write_text('{"text": "fine"}\n\n' + line + "\n")
        told = fails(job(path))
        assert told.startswith(f"training.dataset_path: {path}: line 3 {advice}"), told
        assert told.endswith("; correct or remove the line")


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    assert fails(job(path)) == (
        f"training.dataset_path: {path} is not UTF-8 (invalid start byte); convert it, or remove it"
    )
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(b"text" * 1000)[:-9])
    assert f"{packed} cannot be read (" in fails(job(packed))
    other = tmp_path / "a.pdf"
    other.touch()
    assert fails(job(other)).startswith(f"training.dataset_path: {other} is not a file of text; ")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert fails(job(empty)).startswith(f"training.dataset_path: there are no files in {empty}; ")
    os.mkfifo(empty / "a.txt")
    assert "there are no files" in fails(job(empty))
    assert stat.S_ISFIFO((empty / "a.txt").stat().st_mode)


def test_a_text_shorter_than_a_sequence_is_refused_before_ranks_start(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 20)
    config = job(path, validation__enable=True)
    with pytest.raises(ConfigError) as raised:
        prepare_data(config, TINY, 64)
    assert str(raised.value) == (
        "training.dataset_path: the text has 19 tokens, but a sequence needs 65; set "
        "training.seq_len to at most 18, or give more text"
    )
    assert fails(config, "validation") == (
        "training.dataset_path: the held-out text has 3 tokens, but a sequence needs 9; set "
        "training.seq_len to at most 2, or give more text, or other data as validation.dataset_path"
    )


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ConfigError) as raised:
        job(model__vocab_size=200)
    assert str(raised.value).startswith(
        'training.dataset: "pydoc" has 257 values, but the model takes 200; set '
    )


GPT2 = {"model__name": "gpt2", "training__seq_len": 64}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {**GPT2, "sampling__num_tokens": 600},
            "sampling.num_tokens: 600 is more than the 512 positions of model.max_seq_len; give at "
            "most that many tokens, or raise model.max_seq_len",
        ),
        (
            {"sampling__num_tokens": 3, "sampling__prompt": "abc"},
            "sampling.num_tokens: 3 is not more than the 4 tokens of the prompt; give at least 5",
        ),
        (
            {"training__seq_len": 4, "sampling__prompt": "abc"},
            "sampling.prompt: it has 4 tokens, but a sample has 4; shorten it, or set "
            "sampling.num_tokens",
        ),
    ],
)
def test_a_sample_has_room_for_its_prompt_and_the_model_for_the_sample(changes, expected):
    with pytest.raises(ConfigError) as raised:
        job(**changes)
    assert raised.value.problems == (expected,)


# Tokens.


def test_files_of_tokens_are_read_as_they_are(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 272, 1000)
    tokens[:700].astype(np.uint16).tofile(folder / "train.bin")
    np.save(folder / "train_2.npy", tokens[700:].astype(np.uint32))
    np.save(folder / "val.npy", tokens[:50].astype(np.uint16))
    config = job(folder, training__dataset="tokens")
    assert bytes_and_ends(build(config)) == tokens.tolist()
    assert bytes_and_ends(build(config, "validation")) == tokens[:50].tolist()
    assert build(config).tokens_per_byte is None
    assert spec_for(config).measures(math.log(8), build(config)) == {
        "perplexity": pytest.approx(8),
        "bits_per_token": pytest.approx(3),
    }
    # A changed file is another text.
    before = build(config).fingerprint
    np.save(folder / "train_2.npy", tokens[700:-1].astype(np.uint32))
    assert build(config).fingerprint != before


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    config = job(folder, training__dataset="tokens")
    assert "there are no tokens in" in fails(config)
    np.save(folder / "a.npy", np.array([1, 300] * 20, dtype=np.uint16))
    assert fails(config) == (
        f"training.dataset_path: {folder / 'a.npy'} has the token 300, but the vocabulary of the "
        "model has 272; set model.vocab_size to at least 301, or give other tokens"
    )
    np.save(folder / "a.npy", np.ones(40, dtype=np.uint16))
    assert "no file in" in fails(config, "validation")
    apart = job(folder, training__dataset="tokens", training__attend_across_documents=False)
    assert fails(apart).startswith("training.attend_across_documents: the end of a document in ")
    for array in (np.ones(9), np.ones((3, 3), dtype=np.uint16)):
        np.save(folder / "a.npy", array)
        assert "does not hold tokens of uint16" in fails(config)
    (folder / "a.npy").rename(folder / "a.bin")
    (folder / "a.bin").write_bytes(b"odd")
    assert "its size is not a multiple of 2 bytes" in fails(config)
    # More than 65,536 tokens take four bytes each.
    np.array([70_000] * 20, dtype=np.uint32).tofile(folder / "a.bin")
    large = SimpleNamespace(vocab_size=70_001)
    assert bytes_and_ends(build(config, model=large)) == [70_000] * 20


# Tokenizers.


def word_tokenizer(folder: Path, **configuration: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "<s>", "</s>", "a", "b", "c"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))


def test_a_tokenizer_file_gives_tokens_start_and_end(tmp_path):
    folder = tmp_path / "tokenizer"
    word_tokenizer(folder, eos_token={"content": "</s>"}, bos_token="<s>", add_bos_token=True)
    write_json_lines(tmp_path / "a.jsonl", ["a b c"] * 500 + ["b </s> a"])
    config = job(tmp_path / "a.jsonl", model__hf_assets_path=str(folder))
    assert spec_for(config).vocab_size == 6
    tokens = bytes_and_ends(build(config))
    assert tokens[:10] == [1, 3, 4, 5, 2, 1, 3, 4, 5, 2]
    # A special token that is spelled out in a text ends nothing.
    assert tokens[-7] == 1
    assert tokens[-6] == 4
    assert tokens[-1] == 2
    assert tokens.count(2) == 501
    assert build(config).tokens_per_byte == pytest.approx(len(tokens) / (500 * 5 + 8))
    assert spec_for(config).texts(torch.tensor([[1, 3, 4, 2, 2]])) == ["a b"]


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    folder = tmp_path / "tokenizer"
    word_tokenizer(folder, eos_token="<eot>")
    with pytest.raises(ConfigError) as raised:
        job(model__hf_assets_path=str(folder))
    assert str(raised.value) == (
        f"model.hf_assets_path: the tokenizer in {folder} has no end-of-text token (<eot>); name "
        "one as eos_token in tokenizer_config.json"
    )
    (folder / "tokenizer_config.json").unlink()
    assert spec_for(job(model__hf_assets_path=str(folder))).end_token == 2
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not a tokenizer \("):
        job(model__hf_assets_path=str(folder))


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError) as raised:
        job(model__hf_assets_path=str(tmp_path))
    assert str(raised.value).startswith(
        f"model.hf_assets_path: {tmp_path / 'tokenizer.json'} cannot be read (No such file"
    )


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is not None, reason="it is installed")
def test_the_package_that_reads_tokenizers_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r'pip install "titanlite\[text\]"'):
        job(model__hf_assets_path=str(tmp_path))


# Figures and samples.


def test_bits_a_byte_count_the_end_of_text_tokens():
    config = job()
    data = build(config, "validation")
    measures = spec_for(config).measures(math.log(2), data)
    assert measures == {"perplexity": pytest.approx(2), "bits_per_byte": data.tokens_per_byte}
    assert 1 < data.tokens_per_byte < 1.01


@given(st.text(max_size=300))
def test_a_text_is_printed_token_by_token(text):
    out = io.StringIO()
    tokenizer = ByteTokenizer()
    prompt = text[: len(text) // 2]
    writer = TextWriter(tokenizer, prompt, out)
    for token in tokenizer.encode([text[len(prompt) :]])[0].tolist():
        writer.add(token)
    writer.add(END)
    writer.add(ord("x"))
    writer.close()
    assert out.getvalue() == f"{text}\n"


def test_samples_are_written_up_to_the_end_of_text(tmp_path):
    spec = spec_for(job())
    assert spec.start_tokens("Hi") == [END, *b"Hi"]
    tokens = torch.tensor([[END, *b"ab", END, END], [END, *b"abcd"]])
    spec.save_samples(tmp_path / "new" / "s.txt", tokens, tokens, model=TINY, title="T")
    assert (tmp_path / "new" / "s.txt").read_text() == (
        "T\n\n--- sample 1 ---\nab\n\n--- sample 2 ---\nabcd\n"
    )
