"""Typical mistakes in a user's model, plan, data set or loss: each is one line.

Everything here runs in one process. tests/parity/test_own_model_plans.py has what needs ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

import titanlite
from titanlite.config import resolve_job
from titanlite.config.data import spec_for
from titanlite.config.load import read_any
from titanlite.errors import TitanliteError
from titanlite.modules.batch import Batch, FieldDims
from titanlite.parallelize import ParallelPlan, apply_ac, apply_tp, split_model
from titanlite.parallelize.pipeline_parallel.apply import StageList, sent_by_stages
from titanlite.parallelize.plan import block_lists, derive_plan
from titanlite.plain_job import build_plain_model
from titanlite.ranks.launch import ALONE
from titanlite.ranks.world import open_world
from titanlite.registry import DATASETS, MODELS


@dataclass(frozen=True)
class Sizes:
    dim: int = 8


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Linear(4, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes.dim) for _ in range(4))
        self.head = nn.Linear(sizes.dim, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Data:
    """Six points with labels."""

    num_samples = 6

    def __init__(self, **_: Any) -> None:
        pass

    def sample(self, index: int) -> Any:
        point = torch.linspace(0, 1 + index % 6, 4)
        return {"x": point, "targets": torch.tensor(index % 3)}


PLAN = ParallelPlan(blocks="blocks", embeddings=("embed",), head=("head",), sequence_dim=None)


def job(
    build: Callable[..., nn.Module] = Net,
    data: type = Data,
    *,
    plan: ParallelPlan | None = PLAN,
    fields: dict[str, int | None] | None = None,
    output: Any = None,
    folder: Path | str = "outputs",
    training: Any = (),
    **sections: Any,
) -> dict[str, Any]:
    """Register a model and a data set as "own", and return the sections of a job with them."""
    MODELS.pop("own", None)
    DATASETS.pop("own", None)
    titanlite.register_model("own", build, Sizes, plan=plan, output=output)
    titanlite.register_dataset(
        "own", data, has_tokens=False, fields=fields or {"x": None, "targets": None}
    )
    return {
        "job": {"dump_folder": str(folder), "device": "cpu"},
        "model": {"name": "own"},
        "training": {
            "dataset": "own",
            "steps": 1,
            "global_batch_size": 2,
            "local_batch_size": 2,
            **dict(training),
        },
        **sections,
    }


def line_of(call: Callable[[], object]) -> str:
    with pytest.raises(TitanliteError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# A model without a plan.


class TwoLists(Net):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.decoder = nn.ModuleList(Block(sizes.dim) for _ in range(4))


class Mixed(nn.Module):
    """A block of another class than Block."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Linear(8, 8)


def test_the_one_obvious_list_of_blocks_is_found() -> None:
    def found(*children: nn.Module, kind: Callable[..., nn.Module] = nn.ModuleList) -> str | None:
        model = nn.Module()
        model.inner = nn.Module()
        model.inner.layers = kind(children)
        # A pair of different layers is no list of blocks, and neither are functions.
        model.head = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        model.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        return derive_plan(model).blocks

    def by_name(children: tuple[nn.Module, ...]) -> nn.ModuleDict:
        return nn.ModuleDict({f"layer{i}": child for i, child in enumerate(children)})

    def in_sequence(children: tuple[nn.Module, ...]) -> nn.Sequential:
        return nn.Sequential(*children)

    assert found(Block(), Block()) == "inner.layers"
    assert found(Block()) == "inner.layers"
    assert found(Block(), Block(), kind=by_name) == "inner.layers"
    assert found(Block(), Block(), kind=in_sequence) == "inner.layers"
    assert found(Block(), Mixed(), Block(), Mixed()) == "inner.layers"
    assert found(Mixed(), Block(), Block(), Block()) == "inner.layers"
    assert found(Block(), Mixed()) is None
    assert found() is None
    assert derive_plan(nn.Sequential(Block(), Block())).blocks == ""
    # The list inside a block is not the list of blocks.
    nested = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(3))
    assert found(*nested) == "inner.layers"
    two = TwoLists(Sizes())
    assert derive_plan(two).blocks is None
    assert block_lists(two) == {"blocks": "4 of Block", "decoder": "4 of Block"}
    two.decoder = nn.ModuleList([Block(2), Block(2)])
    assert derive_plan(two).blocks == "blocks"


def test_a_model_without_a_plan_trains_and_its_plan_says_what_was_found(tmp_path: Path) -> None:
    def screen(plan: ParallelPlan | None = None, **values: Any) -> str:
        def stop(_: object) -> None:
            raise RuntimeError("the first screen is enough")

        with pytest.raises(titanlite.RankError):
            titanlite.train(job(plan=plan, folder=tmp_path, **values), on_step=stop)
        return " ".join((tmp_path / "first_screen.txt").read_text().split())

    shown = screen()
    assert "blocks blocks blocks found without a plan: 4 of Block" in shown
    assert "activation checkpoint selective 2 selective 2 2 of 4 blocks" in shown
    shown = screen(build=TwoLists)
    assert (
        "! blocks a list none there is no plan, and several lists may be the blocks: blocks "
        "(4 of Block), decoder (4 of Block)"
    ) in shown
    assert (
        "! activation checkpoint selective 2 off it is on by default, and works on blocks" in shown
    )
    off = {"mode": "none"}
    shown = screen(ParallelPlan(), activation_checkpoint=off)
    assert "! blocks layers none the model has no such module; its lists are blocks (4" in shown
    asked = job(TwoLists, plan=None, folder=tmp_path, activation_checkpoint={"mode": "full"})
    assert line_of(lambda: titanlite.train(asked)) == (
        "model.name: TwoLists has no obvious list of blocks, and activation checkpointing works on "
        "blocks; its lists are blocks (4 of Block), decoder (4 of Block): give a ParallelPlan "
        "whose `blocks` names a container of blocks"
    )


def test_by_hand_a_model_without_a_plan_is_checkpointed_but_not_sharded_over_tp() -> None:
    assert apply_ac(Net(Sizes()), "full").wrapped == tuple(f"blocks.{i}" for i in range(4))
    whole = nn.Sequential(Block(), Block())
    assert apply_ac(whole, "full").wrapped == ("0", "1")
    assert line_of(lambda: apply_tp(Net(Sizes()), None)) == (  # type: ignore[arg-type]
        "apply_tp: Net has no plan, and tensor parallelism needs one with `tensor_parallel`, the "
        "style of each module that is sharded; write a ParallelPlan and give it as `plan`"
    )


@pytest.mark.parametrize(
    ("axis", "key", "needed"),
    [
        ("tensor", "parallelism.tensor_parallel_degree", "`tensor_parallel`, the style"),
        ("pipeline", "model.name", "`embeddings`, `blocks` and `head`"),
    ],
)
def test_other_axes_need_a_plan(axis: str, key: str, needed: str) -> None:
    values = job(plan=None, parallelism={f"{axis}_parallel_degree": 2})
    config = read_any(values).config

    def build() -> None:
        resolved = resolve_job(config)
        build_plain_model(resolved, spec_for(config))

    line = line_of(build)
    assert line.startswith(
        f"{key}: Net has no plan, and {axis} parallelism needs one with {needed}"
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            ParallelPlan(blocks="blocks", head=("heat",)),
            "`head` of the plan of Net names 'heat', and the model has no such module; did you "
            "mean 'head'?",
        ),
        (
            ParallelPlan(blocks="blocks", embeddings=("tokens",)),
            "`embeddings` of the plan of Net names 'tokens', and the model has no such module; its "
            "modules are embed, blocks, head",
        ),
        (
            ParallelPlan(blocks="blocks", head="head"),  # type: ignore[arg-type]
            "`head` of the plan of Net is 'head'; give a tuple of names, ('head',)",
        ),
        (
            ParallelPlan(blocks="blocks", head=("blocks",)),
            "`head` of the plan of Net names 'blocks', which has the blocks 'blocks' in it; name "
            "the modules outside the blocks",
        ),
    ],
)
def test_a_wrong_name_in_a_plan(plan: ParallelPlan, message: str) -> None:
    config = read_any(job(plan=plan)).config
    line = line_of(lambda: build_plain_model(resolve_job(config), spec_for(config)))
    assert line == f"model.name: {message}"


# A pipeline.


class Skips(Net):
    """A forward that skips what a stage lacks."""

    def forward(self, x: Tensor) -> Any:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Carries(Skips):
    """Stages pass two tensors: the activation, and what the head adds."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        if self.embed is not None:
            x, extra = self.embed(x), torch.ones(len(x), dtype=torch.long, device=x.device)
        for block in self.blocks:
            x = block(x)
        return (x, extra) if self.head is None else self.head(x) + extra[:, None]


class Indexes(Skips):
    def forward(self, x: Tensor) -> Any:
        x = x if self.embed is None else self.embed(x)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
        return x if self.head is None else self.head(x)


class Asks(Skips):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(self.head.weight.dtype))


class ByKey(Skips):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.blocks = nn.ModuleDict({str(i): Block(sizes.dim) for i in range(4)})

    def forward(self, x: Tensor) -> Any:
        x = x if self.embed is None else self.embed(x)
        for i in range(4):
            x = self.blocks[str(i)](x)
        return x if self.head is None else self.head(x)


class Maps(Skips):
    def forward(self, x: Any) -> Any:
        return {"x": super().forward(x)}


class Numbers(Skips):
    def forward(self, x: Tensor) -> Any:
        x = x if self.embed is None else self.embed(x)
        for i, block in enumerate(self.blocks):
            x = block(x) * (i + 1)
        return x if self.head is None else self.head(x)


class Counts(Skips):
    """Goes over its blocks with enumerate, but does not use the numbers."""

    def forward(self, x: Tensor) -> Any:
        x = x if self.embed is None else self.embed(x)
        for _, block in enumerate(self.blocks):
            x = block(x)
        return x if self.head is None else self.head(x)


class InSequence(Skips):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.blocks = nn.Sequential(*self.blocks)


STAGES = (("embed", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head"))


def stages_of(build: Callable[..., nn.Module]) -> list[nn.Module]:
    with torch.device("meta"):
        return split_model(build(Sizes()), STAGES)


def sent(build: Callable[..., nn.Module]) -> list[tuple[Tensor, ...]]:
    x = torch.empty(2, 4, device="meta")
    return sent_by_stages(stages_of(build), Batch({"x": x}, {"x": FieldDims(0, None)}))


@pytest.mark.parametrize("build", [Skips, InSequence, Counts])
def test_a_list_of_blocks_is_split_into_stages(build: Callable[..., nn.Module]) -> None:
    ((activation,),) = sent(build)
    assert activation.shape == (2, 8)
    first, last = stages_of(build)
    assert [name for name, _ in last.blocks.named_children()] == ["2", "3"]
    assert "blocks.3.up.weight" in dict(last.named_parameters())
    assert len(list(first.blocks)) == 2
    whole, x = build(Sizes()), torch.randn(2, 4)
    expected = whole(x)
    for part in split_model(whole, STAGES):
        x = part(x)
    assert torch.equal(x, expected)


def test_the_blocks_of_a_stage_keep_their_numbers() -> None:
    _, last = stages_of(Skips)
    blocks = last.blocks
    assert isinstance(blocks, StageList)
    assert len(blocks) == 4
    assert blocks[0] is None
    assert [blocks[2], blocks[-1]] == list(blocks) == blocks[1:]
    with pytest.raises(IndexError):
        blocks[4]


def test_a_stage_passes_a_tuple_of_tensors() -> None:
    ((activation, extra),) = sent(Carries)
    assert (activation.shape, extra.shape, extra.dtype) == ((2, 8), (2,), torch.long)


ADVICE = (
    "; this stage lacks {}, which other stages have: let forward skip a module that is None, as in "
    "`x if self.embed is None else self.embed(x)`, and go over the blocks that are there, as in "
    "`for block in self.blocks`; or give the plan a stage_forward"
)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Net, "return self.head(x)) with TypeError: 'NoneType' object is not callable"),
        (Indexes, "x = self.blocks[i](x)) with TypeError: 'NoneType' object is not callable"),
        (Asks, ".dtype))) with AttributeError: 'NoneType' object has no attribute 'weight'"),
        (ByKey, "x = self.blocks[str(i)](x)) with KeyError: '2'"),
    ],
)
def test_a_stage_that_uses_a_module_of_another(build: Callable[..., nn.Module], why: str) -> None:
    line = line_of(lambda: sent(build))
    assert line.startswith(
        f"stage 0 of {build.__name__} fails in forward (test_own_model_mistakes.py, line "
    )
    assert line.endswith(why + ADVICE.format("blocks.2, blocks.3, head"))


def test_the_last_stage_is_looked_at_too() -> None:
    class Embeds(Skips):
        def forward(self, x: Tensor) -> Any:
            if self.head is not None:
                x = self.embed(x)
            return x

    line = line_of(lambda: sent(Embeds))
    assert line.startswith("stage 1 of Embeds fails in forward")
    assert "this stage lacks embed, blocks.0, blocks.1, which other stages have" in line

    class Reads(Skips):
        """On "meta" its last stage cannot run, but it runs with values."""

        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return x if self.head is None else x * x.sum().item()

    assert len(sent(Reads)) == 1


def test_what_a_stage_cannot_send() -> None:
    assert line_of(lambda: sent(Maps)) == (
        "stage 0 of Maps returns a dict; return a tensor, or a tuple of tensors, which are the "
        "first arguments of the next stage"
    )


def test_numbers_of_blocks_that_would_be_those_of_a_stage() -> None:
    assert line_of(lambda: stages_of(Numbers)) == (
        "Numbers.forward goes over 'blocks' with enumerate, which counts the blocks of each "
        "pipeline stage from 0; use `for name, block in self.blocks.named_children()`, whose names "
        "are numbers in the whole model"
    )


# A tensor-parallel plan.


@pytest.fixture
def tp_mesh() -> Iterator[Any]:
    with open_world(ALONE):
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


NAMES = "; name linear layers and embeddings, such as {}, or leave it out of the plan, and it is"


@pytest.mark.parametrize(
    ("key", "style", "line"),
    [
        (
            "blocks",
            ColwiseParallel(),
            '"blocks": ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1)'
            ",)) on blocks (ModuleList): ColwiseParallel currently only support nn.Linear and "
            "nn.Embedding!" + NAMES.format("blocks.0.up, blocks.0.down, blocks.1.up"),
        ),
        ("conv", RowwiseParallel(), "on conv (Conv1d): RowwiseParallel currently only support"),
    ],
)
def test_a_style_that_refuses_its_module(
    tp_mesh: Any, key: str, style: ParallelStyle, line: str
) -> None:
    model = Net(Sizes())
    model.conv = nn.Conv1d(1, 1, 1)
    told = line_of(lambda: apply_tp(model, tp_mesh, {key: style}))
    assert told.startswith("tensor-parallel plan, ")
    assert line in told
    assert told.endswith("it out of the plan, and it is replicated")


def test_any_exception_of_a_style_names_its_entry(tp_mesh: Any) -> None:
    class Fails(SequenceParallel):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            raise AssertionError

    assert line_of(lambda: apply_tp(Net(Sizes()), tp_mesh, {"blocks.*.up": Fails()})) == (
        'tensor-parallel plan, "blocks.*.up": Fails() on blocks.0.up (Linear): AssertionError; '
        "correct the entry, or leave it out of the plan, and it is replicated"
    )


# Data without tokens.


def test_context_parallelism_needs_tokens() -> None:
    split = {"context_parallel_degree": 2}
    config = read_any(job(parallelism=split)).config
    assert line_of(lambda: resolve_job(config)) == (
        'parallelism.context_parallel_degree: "own" has no token dimension to split: `fields` of '
        "its registration gives None for every field; give the dimension of the tokens there, or "
        "set this degree to 1"
    )
    config = read_any(job(parallelism=split, fields={"x": 0, "targets": None})).config
    assert line_of(lambda: resolve_job(config)) == (
        'parallelism.context_parallel_degree: the fields of "own" are split (x along 0), but their '
        "length is not known; give the model's configuration class `seq_len`"
    )


def test_a_classifier_prints_about_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    titanlite.train(job(folder=tmp_path, metrics={"verbose": True}))
    shown = capsys.readouterr().out
    assert "  data           own: 6 samples\n" in shown
    assert "  steps          1 to 1 of 2 samples, 0.333 epochs\n" in shown
    for word in ("sequence ", "token", "sampl"):
        assert not [line for line in shown.splitlines() if word in line and "samples" not in line]
    titanlite.train(job(folder=tmp_path, sampling={"num_samples": 2}))
    assert "nothing is sampled: own has no tokens\n" in capsys.readouterr().out


# What a model, a data set or a loss returns.


class Returns(Net):
    """Returns what `convert` makes of the logits."""

    convert: Any = staticmethod(lambda logits: {"logits": logits})

    def forward(self, x: Tensor) -> Any:
        return self.convert(super().forward(x))


def returns(convert: Callable[[Tensor], Any]) -> type:
    return type("Returns", (Returns,), {"convert": staticmethod(convert)})


def gives(**fields: Any) -> type:
    """A data set with other fields."""

    class Given(Data):
        def sample(self, index: int) -> Any:
            return {**super().sample(index), **fields}

    return Given


class Raises(Data):
    def sample(self, index: int) -> Any:
        if index == 1:
            raise KeyError("label")
        return super().sample(index)


class Ragged(Data):
    def sample(self, index: int) -> Any:
        return {"x": torch.ones(4 + index), "targets": torch.tensor(0)}


class Missing(Data):
    def __init__(self, **_: Any) -> None:
        raise FileNotFoundError("no such file")


class MapStyle:
    def __init__(self, **_: Any) -> None:
        pass

    def __getitem__(self, index: int) -> int:
        return index


class ReadsValues(Net):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.scale = float(self.head.weight.sum())


class Detached(Net):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


NEEDS_LOGITS = "the loss needs logits, but forward of Returns returns {}; register the model with "
TARGETS = "targets are int64, the number of a class of the logits, or -100 for none"


@pytest.mark.parametrize(
    ("values", "start", "end"),
    [
        (lambda: job(returns(lambda x: {"logits": x})), NEEDS_LOGITS.format("a dict"), ""),
        (lambda: job(returns(lambda x: (x, x))), NEEDS_LOGITS.format("a tuple"), ""),
        (lambda: job(returns(lambda x: None)), NEEDS_LOGITS.format("None"), ""),
        (
            lambda: job(returns(lambda x: {"logits": x}), output=lambda result: result.logits),
            "`output` fails on the dict that forward of Returns returns, with AttributeError: ",
            "'dict' object has no attribute 'logits'; correct it where the model is registered",
        ),
        (
            lambda: job(data=gives(targets=torch.tensor(1.5))),
            "the loss gets the outputs [2, 3] float32 and targets [2] float32 from 1.5 to 1.5, and "
            "fails with RuntimeError: expected ",
            TARGETS,
        ),
        (
            lambda: job(data=gives(targets=torch.tensor(7))),
            "the loss gets the outputs [2, 3] float32 and targets [2] int64 from 7 to 7, and fails "
            "with IndexError: Target 7 is out of bounds.; ",
            TARGETS,
        ),
        (
            lambda: job(data=gives(targets=1)),
            "training.dataset: the field `targets` of a sample is int 1; make it a tensor",
            "",
        ),
        (
            lambda: job(data=Ragged),
            "training.dataset: the field `x` has the shapes [4] and [5] in two samples of a ",
            "batch; pad or cut them to one shape",
        ),
        (
            lambda: job(data=Raises),
            "training.dataset: sample(1) of Raises raises KeyError: 'label' "
            "(test_own_model_mistakes.py, line ",
            'raise KeyError("label")); correct the data set',
        ),
        (
            lambda: job(data=Missing),
            "training.dataset: building own fails with FileNotFoundError: no such file (",
            'raise FileNotFoundError("no such file")); correct it',
        ),
        (
            lambda: job(data=MapStyle),
            "training.dataset: own is a MapStyle, which has no `sample`; give it ",
            "sample(index) and num_samples, the number of samples or None",
        ),
        (
            lambda: job(ReadsValues),
            "model.name: building own fails with RuntimeError: Tensor.item() cannot be called on ",
            'the model is built on the "meta" device, without values: compute what depends on '
            "values in forward, or in init_weights()",
        ),
        (
            lambda: job(lambda: Net(Sizes())),
            "model.name: building own fails with TypeError: ",
            "; correct it",
        ),
        (
            lambda: job(Detached),
            "the loss has no gradient: the model or the loss computes it under torch.no_grad(), ",
            "detaches it, or uses no trained parameter",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, values: Callable[[], dict[str, Any]], start: str, end: str
) -> None:
    sections = values()
    sections["job"]["dump_folder"] = str(tmp_path)
    line = line_of(lambda: titanlite.train(sections))
    assert line.startswith(start)
    assert line.endswith(end)


def test_an_error_in_the_models_own_code_keeps_its_traceback(tmp_path: Path) -> None:
    def convert(_: Tensor) -> Any:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        titanlite.train(job(returns(convert), folder=tmp_path))
