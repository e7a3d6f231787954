"""Each apply_x on its own, called as a user would call it, against the plain module."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations
from training import on_ranks

from titanlite.errors import TitanliteError
from titanlite.models.image_transformer.model import ImageEmbeddings
from titanlite.modules.batch import make_batch
from titanlite.modules.shards import local_part, shard_of, whole_tensor
from titanlite.modules.tied import find_tied
from titanlite.parallelize import (
    ParallelPlan,
    PipelineRunner,
    apply_ac,
    apply_compile,
    apply_cp,
    apply_ddp,
    apply_fsdp,
    apply_tp,
    split_model,
)
from titanlite.parallelize.tensor_parallel.styles import (
    EmbeddingLocal,
    EmbeddingRowwise,
    GatherColwise,
    NormLocal,
    RowwiseLocal,
)
from titanlite.schedule import make_schedule
from titanlite.training.initial_weights import initialize
from titanlite.training.norm import clip_gradients, gradient_norm, reduce_partial_gradients


def tp_by_hand(world):
    """The notes' plan, by hand, on a bare ImageEmbeddings; also the plan registered for it."""

    def build():
        torch.manual_seed(0)
        return ImageEmbeddings(17, 16, height=8, width=8, channels=1).double()

    tokens = torch.arange(2 * 64).reshape(2, 64) % 17
    reference = build()
    expected = reference(tokens, "cpu")
    expected.square().sum().backward()

    names = ("tok_emb", "row_emb", "col_emb", "chan_emb", "xd_emb")
    by_rows = {
        name: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)) for name in names
    }
    results = []
    for plan in (by_rows, None):
        model = build()
        tp_mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = apply_tp(model, tp_mesh, plan)
        own = model(tokens, "cpu")
        own.square().sum().backward()
        whole = DTensor.from_local(own, tp_mesh, [Shard(1)]).full_tensor()
        torch.testing.assert_close(whole, expected)
        for name, parameter in reference.named_parameters():
            cut = model.get_parameter(name)
            grad = cut.grad.redistribute(placements=cut.placements)
            torch.testing.assert_close(whole_tensor(grad), parameter.grad)
        messages = [str(w.message) for w in caught if "plan key" in str(w.message)]
        results.append((report, messages, str(model.tok_emb.weight.placements)))
    return results


def test_tp_of_bare_embeddings_by_the_notes_plan():
    (by_hand, messages, placements), (registered, no_messages, _) = on_ranks(tp_by_hand, 4)[0]
    assert by_hand.parallelized == ("tok_emb", "row_emb", "col_emb")
    assert by_hand.replicated == ("chan_emb",)  # one row, four ranks
    assert by_hand.unmatched == ("xd_emb",)
    assert messages == [
        "tensor-parallel plan key 'xd_emb' matches no module of ImageEmbeddings; skipped"
    ]
    assert "Shard(dim=0)" in placements
    assert registered.parallelized == by_hand.parallelized
    assert no_messages == []


def styles_with_biases(world, is_rounded=False, by_keyword=False, rings=False, is_compiled=False):
    """GatherColwise, RowwiseLocal and NormLocal on a module with biases, against the module.

    Rounded layers have a product of their own: sixteenths of what weight and input are.
    """

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(8), Inner()

        def forward(self, x):
            if by_keyword:
                return x + self.inner(scale=2.0, x=self.norm(x))
            return x + self.inner(self.norm(x), scale=2.0)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            linear = RoundedLinear if is_rounded else nn.Linear
            self.a, self.b, self.out = nn.Linear(8, 12), linear(8, 12), linear(12, 8)

        def forward(self, x, scale):
            return self.out(self.a(x).tanh() * self.b(x) * scale)

    class RoundedLinear(nn.Linear):
        def product(self, x, weight):
            # Values are rounded, gradients pass through.
            x, weight = (t + ((t * 16).round() / 16 - t).detach() for t in (x, weight))
            return x @ weight.T

        def forward(self, x):
            return self.product(x, self.weight) + self.bias

    def build():
        torch.manual_seed(0)
        return Block().double()

    x = torch.randn(8, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference = build()
    reference_x = x.clone().requires_grad_()
    expected = reference(reference_x)
    expected.square().sum().backward()

    model = build()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    plan = {
        "norm": NormLocal(),
        "inner": GatherColwise(0, "a", "b"),
        "inner.out": RowwiseLocal(scatter_dim=0),
    }
    apply_tp(model, mesh, plan, rings=rings)
    if is_compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    own_x = x.chunk(world.size)[world.rank].clone().requires_grad_()
    own = model(own_x)
    own.square().sum().backward()
    torch.testing.assert_close(DTensor.from_local(own, mesh, [Shard(0)]).full_tensor(), expected)
    whole_grad = DTensor.from_local(own_x.grad, mesh, [Shard(0)]).full_tensor()
    torch.testing.assert_close(whole_grad, reference_x.grad)
    reduce_partial_gradients(model.parameters())
    for name, parameter in reference.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(whole_tensor(grad), parameter.grad, msg=name)
    return True


def test_local_styles_equal_the_plain_module():
    assert on_ranks(styles_with_biases, 4, False) == [True] * 4


def test_local_styles_multiply_as_a_layer_of_its_own_product_does():
    assert on_ranks(styles_with_biases, 4, True) == [True] * 4


def styles_by_keyword(world):
    """The module of styles_with_biases, called with its input by keyword, in all three forms."""
    for how in ({}, {"rings": True}, {"is_compiled": True}):
        assert styles_with_biases(world, by_keyword=True, **how)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x=None, scale=1.0):
            return self.a(x) * scale

    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    layer = Layer()
    apply_tp(layer, mesh, {"": GatherColwise(0, "a")})
    try:
        layer(scale=2.0)
    except TitanliteError as error:
        return str(error)


def test_a_gathered_input_may_be_a_keyword_argument():
    message = (
        "GatherColwise gathers 'x', the first argument of Layer.forward, which was called without "
        "it"
    )
    assert on_ranks(styles_by_keyword, 2) == [message] * 2


def vocabulary_by_hand(world):
    """EmbeddingRowwise: an uneven vocabulary, a padding row, and a table that is too short."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    reports = []
    for num_rows, padding in ((13, None), (13, 0), (13, 9), (13, 12), (3, 1)):

        def build(num_rows=num_rows, padding=padding):
            torch.manual_seed(0)
            table = nn.Embedding(num_rows, 5, padding_idx=padding)
            return nn.Sequential(table).double()

        indices = torch.arange(2 * 16).reshape(16, 2) % num_rows
        reference, model = build(), build()
        expected = reference(indices)
        expected.square().sum().backward()
        reports.append(apply_tp(model, mesh, {"0": EmbeddingRowwise(scatter_dim=0)}))
        own = model(indices)
        assert own.shape == (16 // world.size, 2, 5)
        own.square().sum().backward()
        whole = DTensor.from_local(own, mesh, [Shard(0)]).full_tensor()
        torch.testing.assert_close(whole, expected)
        reduce_partial_gradients(model.parameters())
        torch.testing.assert_close(whole_tensor(model[0].weight.grad), reference[0].weight.grad)
    return [report.replicated for report in reports]


def test_an_embedding_table_is_sharded_by_the_vocabulary():
    assert on_ranks(vocabulary_by_hand, 4) == [[(), (), (), (), ("0",)]] * 4


def test_a_style_on_the_wrong_module_says_so():
    def wrong(world):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        apply_tp(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": NormLocal()})

    message = "tensor-parallel plan, 0: NormLocal is for RMSNorm or LayerNorm, and this is a Linear"
    with pytest.raises(TitanliteError, match=message):
        on_ranks(wrong, 1)


def refused_layers(world):
    """What each style says of layers that compute something else than the style would."""

    class LowPrecisionLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x.bfloat16().to(x.dtype))

    class LowRankLinear(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.lora_a = nn.Parameter(torch.zeros(4, 1))

    class ShiftedNorm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) + x

    class NamedLinear(nn.Linear):
        """The plain layer under another name: nothing of it is left out."""

    def patched():
        layer = nn.Linear(4, 4)
        layer.forward = lambda x: x
        return layer

    def model_of(layer):
        return nn.ModuleDict({"block": nn.ModuleDict({"layer": layer})})

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    said = {}
    for name, layer, plan in (
        ("low precision", LowPrecisionLinear(4, 4), {"block": GatherColwise(0, "layer")}),
        ("patched", patched(), {"block.layer": RowwiseLocal(0)}),
        ("more parameters", LowRankLinear(), {"block.layer": RowwiseLocal(0)}),
        (
            "parametrized",
            parametrizations.weight_norm(nn.Linear(4, 4)),
            {"block": GatherColwise(0, "layer")},
        ),
        ("norm", ShiftedNorm(4), {"block.layer": NormLocal()}),
        ("embedding", nn.Embedding(4, 4, max_norm=1.0), {"block.layer": EmbeddingLocal(0)}),
        ("table", nn.Embedding(4, 4, max_norm=1.0), {"block.layer": EmbeddingRowwise(0)}),
        ("named", NamedLinear(4, 4), {"block": GatherColwise(0, "layer")}),
    ):
        try:
            apply_tp(model_of(layer), mesh, plan)
        except TitanliteError as error:
            said[name] = str(error)
    return said


def test_a_style_never_leaves_out_what_a_layer_computes():
    said = on_ranks(refused_layers, 1)[0]
    assert said["low precision"] == (
        "tensor-parallel plan, block: GatherColwise computes a plain Linear, but layer, a "
        "LowPrecisionLinear, has a forward of its own, which it would ignore; use "
        "ColwiseParallel or RowwiseParallel of torch.distributed.tensor.parallel, which "
        "calls the module itself"
    )
    assert "has a forward of its own" in said["patched"]
    assert "a LowRankLinear, has more parameters (lora_a)" in said["more parameters"]
    assert "has parametrized weights" in said["parametrized"]
    assert "a ShiftedNorm, has a forward of its own" in said["norm"]
    assert "SequenceParallel of torch" in said["norm"]
    assert "an Embedding, has max_norm set" in said["embedding"]
    assert "an Embedding, has max_norm set" in said["table"]
    assert "named" not in said


def steps_without_blocks(world):
    """What each step says of a model whose plan names blocks that it does not have."""

    class Model(nn.Module):
        def __init__(self, **parts):
            super().__init__()
            self.layers = nn.ModuleDict(parts)

        def forward(self, x, positions):
            return x

    class Blind(Model):
        def forward(self, x):
            return x

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    steps = {
        "context parallelism": lambda model, plan: apply_cp(model, mesh, plan=plan).blocks,
        "activation checkpointing": lambda model, plan: apply_ac(model, "full", plan=plan).wrapped,
        "compile": lambda model, plan: apply_compile(model, backend="eager", plan=plan).blocks,
    }
    said, done = {}, []
    for name, apply in steps.items():
        done.append(apply(Model(), ParallelPlan()))  # an empty stage of a pipeline
        try:
            apply(Model(**{"0": nn.Linear(2, 2)}), ParallelPlan(blocks="blocks"))
        except TitanliteError as error:
            said[name] = str(error)
    try:
        apply_cp(Blind(), mesh, plan=ParallelPlan())
    except TitanliteError as error:
        said["blind"] = str(error)
    return said, done


def test_a_step_that_would_do_nothing_says_so():
    said, done = on_ranks(steps_without_blocks, 1)[0]
    for step in ("context parallelism", "activation checkpointing", "compile"):
        assert said[step] == (
            "Model has no module 'blocks', whose children are the blocks that "
            f"{step} works on; name it in the plan's `blocks`; its lists are layers (1 of Linear)"
        )
    assert "forward of Blind takes no `positions`" in said["blind"]
    assert done == [(), (), ()]


def tied_by_hand(world):
    """A plain tied model by each apply_x, and in two stages, against the model on one process."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(17, 8)
            self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(2)})
            self.output = nn.Linear(8, 17, bias=False)
            self.output.weight = self.table.weight

        def forward(self, tokens):
            x = self.table(tokens)
            for layer in self.layers.values():
                x = x + layer(x).tanh()
            return self.output(x)

    tokens = torch.arange(4 * 6).reshape(4, 6) * 5 % 17
    reference = Model().double()
    reference(tokens).square().sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    all_ranks = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    styles = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    outer = ParallelPlan(styles, embeddings=("table",), head=("output",))
    own = tokens.chunk(2)[mesh["dp_shard"].get_local_rank()]
    units = []

    def fsdp(model, plan, **options):
        units.append(apply_fsdp(model, mesh["dp_shard"], plan=plan, **options).num_units)

    for steps, batch, world_mesh in (
        ([lambda m: apply_tp(m, mesh["tp"], styles)], tokens, mesh),
        ([lambda m: fsdp(m, outer)], own, mesh),
        ([lambda m: fsdp(m, ParallelPlan(), reshard_after_forward="always")], own, mesh),
        ([lambda m: fsdp(m, ParallelPlan(embeddings=("table",)))], own, mesh),
        (
            [
                lambda m: apply_tp(m, mesh["tp"], outer),
                lambda m: apply_ac(m, "full", plan=outer),
                lambda m: fsdp(m, outer),
            ],
            own,
            mesh,
        ),
        ([lambda m: apply_ddp(m, all_ranks)], tokens[[world.rank]], all_ranks),
    ):
        model = Model().double()
        for step in steps:
            step(model)
        assert model.output.weight is model.table.weight
        model(batch).square().sum().backward()
        assert model.output.weight is model.table.weight
        parameters = list(model.parameters())
        assert len(parameters) == len(expected)
        for (name, whole), parameter in zip(expected.items(), parameters, strict=True):
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.redistribute(placements=parameter.placements)
            torch.testing.assert_close(whole_tensor(grad), whole, msg=name)
        torch.testing.assert_close(gradient_norm(parameters, world_mesh), norm)
    return units


def test_tied_weights_stay_one_parameter():
    # Table and output layer are one unit, or left to the root unit if the plan does not name both.
    assert on_ranks(tied_by_hand, 4) == [[3, 3, 3, 3]] * 4


def tied_stages_by_hand(world):
    """Two stages of a tied model, whose copies get the gradient of both uses."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.output = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(2)})
            self.output.weight = self.table.weight

        def forward(self, tokens):
            x = tokens if self.table is None else self.table(tokens)
            for layer in self.layers.values():
                x = x + layer(x).tanh()
            return x if self.output is None else self.output(x)

    def build():
        with torch.device("meta"):
            return Model().double()

    cpu, tokens = torch.device("cpu"), torch.arange(12).reshape(4, 3) % 5
    reference = build()
    initialize(reference, 0, cpu)
    reference(tokens).square().sum().backward()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = build()
    parts = split_model(model, [["table", "layers.0"], ["layers.1", "output"]])
    own = copy.deepcopy(parts[world.rank])
    runner = PipelineRunner(
        make_schedule("1F1B", 2, 2),
        {world.rank: own},
        parts,
        mesh,
        example=make_batch(torch.zeros(2, 3, dtype=torch.long)),
        dtype=torch.float64,
        tied=find_tied(model),
    )
    initialize(own, 0, cpu, find_tied(model))
    runner.step(make_batch(tokens), lambda outputs, batch: outputs.square().sum())
    runner.copies.sum_gradients()
    weight = (own.table or own.output).weight
    assert torch.equal(weight, reference.table.weight)
    torch.testing.assert_close(weight.grad, reference.table.weight.grad)
    assert [name for name, _, _ in runner.parameters()].count("table.weight") == 1
    return [len(runner.copies.repeated()), weight.grad.tolist()]


def test_tied_weights_of_two_stages_have_one_gradient():
    (first, grad), (last, same) = on_ranks(tied_stages_by_hand, 2)
    assert (first, last) == (0, 1)
    assert grad == same


def refused_ties(world):
    def build():
        model = nn.ModuleDict({"table": nn.Embedding(4, 4), "output": nn.Linear(4, 4, bias=False)})
        model["output"].weight = model["table"].weight
        return model

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    said = []
    for apply in (
        lambda: apply_tp(build(), mesh, {"output": ColwiseParallel()}),
        lambda: apply_tp(build(), mesh, {"table": ColwiseParallel(), "output": ColwiseParallel()}),
        lambda: apply_fsdp(
            nn.ModuleDict({"layers": build()}), mesh, plan=ParallelPlan(embeddings=("x",))
        ),
    ):
        try:
            apply()
        except TitanliteError as error:
            said.append(str(error))
    return said


def test_tied_weights_are_not_untied_in_silence():
    said = on_ranks(refused_ties, 1)[0]
    who = "output.weight and table.weight of ModuleDict are one parameter, but the tensor-parallel "
    advice = (
        "; give both one placement, such as RowwiseParallel for the embedding table and "
        "ColwiseParallel for the output layer"
    )
    assert said == [
        f"{who}plan has the first sharded by rows (ColwiseParallel) and the second replicated "
        f"(no style){advice}",
        f"{who}plan has the first sharded by rows (ColwiseParallel) and the second sharded by "
        f"columns (ColwiseParallel){advice}",
        "apply_fsdp: layers.output.weight and layers.table.weight are one parameter, but in two "
        "FSDP units, block output and block table; tie weights within a block, or between the "
        "plan's embeddings and head",
    ]


def shards_of_every_kind(world):
    """shard_of cuts, and whole_tensor restores, what FSDP2 and TP cut; uneven and empty too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (1, 3, 8, 17):
        full = torch.arange(rows * 6.0).reshape(rows, 6)
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
            cut = distribute_tensor(full, mesh, placements)
            assert torch.equal(shard_of(full, cut), local_part(cut))
            assert torch.equal(whole_tensor(cut), full)
        if rows > 2:
            for style in (ColwiseParallel(), RowwiseParallel()):
                layer = nn.Linear(6, rows, bias=False)
                layer.weight.data.copy_(full)
                parallelize_module(layer, mesh["tp"], style)
                fully_shard(layer, mesh=mesh["dp"])
                assert torch.equal(shard_of(full, layer.weight), local_part(layer.weight))
                assert torch.equal(whole_tensor(layer.weight.detach()), full)
    return True


def test_shards_and_wholes():
    assert all(on_ranks(shards_of_every_kind, 4))


def norm_and_clip(world):
    """The norm counts each element once: cut, replicated, partly replicated and plain."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parameters, fulls = [], []
    for index, (where, placements) in enumerate(
        [
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Shard(0), Replicate()]),
            (mesh["tp"], [Shard(0)]),
            (mesh["tp"], [Replicate()]),
            (mesh["dp_shard"], [Shard(0)]),
            (None, None),
        ]
    ):
        full = torch.randn(5, 4, generator=torch.Generator().manual_seed(index)).double()
        value = full if where is None else distribute_tensor(full, where, placements)
        parameter = nn.Parameter(torch.zeros_like(value))
        parameter.grad = value.clone()
        parameters.append(parameter)
        fulls.append(full)
    norm = gradient_norm(parameters, mesh)
    expected = torch.cat([full.flatten() for full in fulls]).norm()
    torch.testing.assert_close(norm, expected)
    clip_gradients(parameters, norm, 2 * norm.item())
    for parameter, full in zip(parameters, fulls, strict=True):
        assert torch.equal(whole_tensor(parameter.grad), full), "clipped below the norm"
    clip_gradients(parameters, norm, 0.5)
    torch.testing.assert_close(gradient_norm(parameters, mesh).item(), 0.5, rtol=1e-5, atol=0)
    return True


def test_gradient_norm_and_clipping():
    assert all(on_ranks(norm_and_clip, 4))


def page_snippet(world, snippet):
    """The page's lines on a small model: with a dictionary as the plan, and a ParallelPlan."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

        def forward(self, x):
            return x + self.down(self.up(x).tanh())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    styles = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference = Model().double()
    expected = reference(x)
    expected.square().sum().backward()
    own = x.chunk(2)[mesh["dp_shard"].get_local_rank()]
    for plan in (styles, ParallelPlan(tensor_parallel=styles)):
        model = Model().double()
        exec(snippet, {"model": model, "mesh": mesh, "plan": plan})
        model(own).square().sum().backward()
        for (name, parameter), plain in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(whole_tensor(parameter.detach()), plain.detach(), msg=name)
            torch.testing.assert_close(whole_tensor(parameter.grad), plain.grad, msg=name)
    return [name for name, _ in model.named_parameters()]


def test_the_snippet_of_the_features_runs_as_it_stands_there():
    text = (Path(__file__).parents[2] / "docs/features.md").read_text(encoding="utf-8")
    start = r"steps\s+work on any model:\n\n```python\n"
    (snippet,) = re.findall(rf"{start}(.*?)```", text, re.S)
    assert "apply_ac" in snippet
    names = on_ranks(page_snippet, 4, snippet)[0]
    assert len(names) == 6
