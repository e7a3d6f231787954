"""The layouts of Hugging Face's tensors, and the mistakes in a folder; without transformers."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import titanlite
from titanlite import cli
from titanlite.checkpoint.huggingface import FolderWriter
from titanlite.checkpoint.storage import Piece
from titanlite.checkpoint.weights import Names, opened_weights, read_shard, to_stored
from titanlite.errors import ConfigError, TitanliteError
from titanlite.models.hf_format import (
    CONFIG,
    INDEX,
    HFFormat,
    HFTensor,
    format_of,
    read_json,
    weight_files,
)
from titanlite.models.spec import ModelSpec
from titanlite.parallelize.context_parallel.huggingface import no_mask, scoring

# How a parameter of a shape is stored, and the same in plain operations.
LAYOUTS: list[tuple[tuple[int, ...], HFTensor, Callable[[Tensor], Tensor]]] = [
    ((5, 3), HFTensor("w"), lambda w: w),
    ((5, 3), HFTensor("w", is_transposed=True), lambda w: w.T),
    ((4, 3, 2), HFTensor("w", is_flat=True), lambda w: w.reshape(4, 6)),
    ((3, 2), HFTensor("w", is_flat=True), lambda w: w.flatten()),
    # Rows 0, 2, 4, 1, 3, 5 of each head of 6.
    ((12, 2), HFTensor("w", head_dim=6), lambda w: w[[0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]]),
    ((12,), HFTensor("w", head_dim=6), lambda w: w[[0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]]),
]


@pytest.mark.parametrize(("shape", "place", "stored"), LAYOUTS)
def test_any_shard_is_read_from_any_layout(
    shape: tuple[int, ...], place: HFTensor, stored: Callable[[Tensor], Tensor]
) -> None:
    parameter = torch.randn(shape)
    whole = stored(parameter)
    assert torch.equal(to_stored(parameter, place), whole)
    assert place.shape(shape) == whole.shape
    spans = [[(a, b) for b in range(size + 1) for a in range(b)] for size in shape]
    for where in itertools.product(*spans):
        cut = parameter[tuple(slice(*span) for span in where)]
        piece = Piece(torch.empty_like(cut), parameter.shape, tuple(a for a, _ in where))
        assert torch.equal(read_shard(whole, place, piece), cut), where


@dataclass(frozen=True)
class Sizes:
    dim: int = 4


class Net(nn.Module):
    """Two layers that a folder joins in one transposed tensor, a norm, and an output layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.a = nn.Linear(sizes.dim, 6, bias=False)
        self.b = nn.Linear(sizes.dim, 2, bias=False)
        self.norm = nn.RMSNorm(sizes.dim)


def tensor(name: str, shape: Sequence[int], sizes: Sizes) -> HFTensor:
    rows = {"a.weight": (0, 8), "b.weight": (6, 8)}
    if name in rows:
        return HFTensor("net.ab", rows=rows[name], is_transposed=True)
    return HFTensor(f"net.{name}")


def sizes_of(found: Mapping[str, Any]) -> dict[str, Any]:
    if "hidden_size" not in found:
        raise ValueError("lacks hidden_size")
    return {"dim": found["hidden_size"]}


FORMAT = HFFormat(
    tensor=tensor,
    config=lambda sizes: {"model_type": "net", "hidden_size": sizes.dim},
    sizes=sizes_of,
    prefix="net.",
    ignored=("*.table",),
)


def write(folder: Path, weights: Mapping[str, Tensor], shard_bytes: int = 1 << 30) -> None:
    shapes = {name: weight.shape for name, weight in weights.items()}
    names = Names(FORMAT, Sizes())
    writer = FolderWriter(folder, shapes, names, torch.float32, shard_bytes=shard_bytes)
    for name, weight in weights.items():
        writer.add(name, weight)
    writer.finish(FORMAT.config(Sizes()))


def read(folder: Path, net: nn.Module) -> None:
    pieces = {name: Piece.whole(parameter.data) for name, parameter in net.named_parameters()}
    with opened_weights(folder, Names(FORMAT, Sizes())) as stored:
        stored.refuse_unexpected(stored.names_of(pieces, {}))
        stored.fill(pieces, pieces)


def test_folder_has_joined_tensors_in_several_files(tmp_path: Path) -> None:
    weights = {name: parameter.data for name, parameter in Net(Sizes()).named_parameters()}
    write(tmp_path, weights, shard_bytes=100)
    assert [file.name for file in weight_files(tmp_path)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert read_json(tmp_path / CONFIG) == {
        "model_type": "net",
        "hidden_size": 4,
        "dtype": "float32",
    }
    with opened_weights(tmp_path, Names()) as stored:
        joined = stored.tensors["net.ab"][1].get_tensor("net.ab")
    assert torch.equal(joined, torch.cat([weights["a.weight"], weights["b.weight"]]).T)
    net = Net(Sizes())
    read(tmp_path, net)
    assert all(torch.equal(p, weights[name]) for name, p in net.named_parameters())


def test_names_may_lack_the_prefix_and_tables_are_ignored(tmp_path: Path) -> None:
    norm, joined = torch.randn(4), torch.randn(4, 8)
    tensors = {"norm.weight": norm, "ab": joined, "h.table": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    net = Net(Sizes())
    read(tmp_path, net)
    assert torch.equal(net.norm.weight, norm)
    assert torch.equal(net.b.weight, joined[:, 6:].T)


def test_mistakes_in_a_folder_are_one_line(tmp_path: Path) -> None:
    def told() -> str:
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, Net(Sizes()))
        assert len(caught.value.problems) == 1
        return caught.value.problems[0].replace(str(tmp_path), "FOLDER")

    whole = {"net.ab": torch.zeros(4, 8), "net.norm.weight": torch.zeros(4)}
    for tensors, said in (
        (
            {"net.ab": whole["net.ab"]},
            "checkpoint: FOLDER has missing keys: net.norm.weight; give the weights of this model",
        ),
        (
            {**whole, "net.c": torch.zeros(1)},
            "checkpoint: FOLDER/model.safetensors has unexpected keys: net.c; give the [model] it "
            "belongs to",
        ),
        (
            {**whole, "net.ab": torch.zeros(8, 4)},
            "checkpoint: FOLDER/model.safetensors: net.ab has shape [8, 4], and [4, 8] in the "
            "model; give the [model] it belongs to",
        ),
        (
            {**whole, "net.ab": torch.zeros(4, 8, dtype=torch.int8)},
            "checkpoint: FOLDER/model.safetensors: net.ab is int8, and float32 in the model; give "
            "floating-point weights",
        ),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        assert told() == said
    index = tmp_path / INDEX
    for weight_map, said in (
        (
            {"net.ab": "a.safetensors", "net.c": "model.safetensors"},
            f"checkpoint: FOLDER lacks a.safetensors, which {INDEX} names; download or save the "
            "folder again",
        ),
        (
            {"net.ab": "../a.safetensors"},
            f"checkpoint: FOLDER/{INDEX} has no valid weight_map; download or save it again",
        ),
        ([], f"checkpoint: FOLDER/{INDEX} has no valid weight_map; download or save it again"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert told() == said
    index.write_text("[")
    assert told() == (f"checkpoint: FOLDER/{INDEX} is not a JSON object; download or save it again")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    titanlite.register_model("net", Net, Sizes, hf=FORMAT)


@pytest.mark.usefixtures("registered")
def test_other_sizes_in_config_json_are_refused_before_ranks_start(tmp_path: Path) -> None:
    write(tmp_path, {name: p.data for name, p in Net(Sizes()).named_parameters()})

    def told(dim: int) -> list[str]:
        checkpoint = {
            "enable": True,
            "initial_load_in_hf": True,
            "initial_load_path": str(tmp_path),
        }
        with pytest.raises(ConfigError) as caught:
            titanlite.JobConfig.from_dict(
                {"model": {"name": "net", "dim": dim}, "checkpoint": checkpoint, "training": {}}
            )
        return [
            line.replace(str(tmp_path), "FOLDER")
            for line in caught.value.problems
            if line.startswith("checkpoint.")
        ]

    advice = "give the [model] that it describes"
    assert told(5) == [
        f"checkpoint.initial_load_path: FOLDER/config.json has dim 4, and the [model] 5; {advice}"
    ]
    (tmp_path / CONFIG).write_text("{}")
    assert told(4) == [
        f"checkpoint.initial_load_path: FOLDER/config.json lacks hidden_size; {advice}"
    ]


def test_a_wrong_format_is_named() -> None:
    for hf, said in (
        ("titanlite.nothing:FORMAT", "loading titanlite.nothing:FORMAT failed with Module"),
        ({}, "`hf` of net is a dict; give an HFFormat"),
    ):
        with pytest.raises(ConfigError, match=said):
            format_of(ModelSpec("net", Sizes, Net, hf=hf))
    assert format_of(ModelSpec("net", Sizes, Net)) is None


def test_padding_and_options_that_change_attention_are_refused() -> None:
    no_mask(1, attention_mask=torch.ones(1, 4))
    with pytest.raises(TitanliteError, match="mask the padding's targets by -100"):
        no_mask(1, attention_mask=torch.tensor([[0, 1]]))
    given = {"dropout": 0.0, "softcap": 2.0, "sliding_window": 4, "is_causal": True}
    assert scoring("A", given) == {"softcap": 2.0, "window": 4, "sinks": None}
    for options in ({"position_bias": 1}, {"dropout": 0.1}, {"is_causal": False}):
        with pytest.raises(TitanliteError, match="A has attention with "):
            scoring("A", options)


@pytest.mark.usefixtures("registered")
def test_convert_a_folder_of_a_registered_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(source: str, *words: str) -> int:
        return cli.main(["convert", str(tmp_path / source), *words])

    weights = {name: parameter.data for name, parameter in Net(Sizes()).named_parameters()}
    write(tmp_path / "hf", weights)
    assert convert("hf", "--model", "net", "--out", str(tmp_path / "step-3")) == 0
    assert convert("step-3", "--out", str(tmp_path / "back")) == 0
    net = Net(Sizes())
    read(tmp_path / "back", net)
    assert all(torch.equal(p, weights[name]) for name, p in net.named_parameters())
    capsys.readouterr()
    for words, said in (
        (("hf", "--model", "no"), '--model: there is no model "no"; give one of '),
        (("hf", "--model", "image_transformer"), "--model: "),
        (("step-3", "--model", "net"), "--model: has no effect on this conversion; remove it"),
        (("step-3", "--like", str(tmp_path)), f"--like: {tmp_path} has no config.json; give"),
    ):
        assert convert(*words, "--out", str(tmp_path / "none")) == 2
        assert capsys.readouterr().err.startswith(f"titanlite convert: {said}")
