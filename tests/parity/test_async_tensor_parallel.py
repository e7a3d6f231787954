"""Asynchronous TP: rings against the plain module, what they send, and what inductor fuses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plan_invariance import TOLERANCE, assert_invariant
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from training import debug_config, difference, on_ranks, train

from tests.benchmarks.async_tensor_parallel import TARGET, WHOLE_TARGET, measure_overlap
from titanlite.config import JobConfig, check_machine, resolve_job
from titanlite.errors import ConfigError, TitanliteError
from titanlite.job import build_job
from titanlite.parallelize import apply_tp
from titanlite.parallelize.async_tensor_parallel import ring_product
from titanlite.parallelize.async_tensor_parallel.apply import Fusions, enable_symmetric_memory
from titanlite.parallelize.async_tensor_parallel.ring_product import gather_product, product_scatter
from titanlite.parallelize.tensor_parallel.styles import GatherColwise, RowwiseLocal
from titanlite.ranks.launch import spawn


def ring_results(world: Any) -> dict[str, Any]:
    """What both rings give, as this rank sees it, against one product of the whole."""
    group, n, rank = dist.group.WORLD, world.size, world.rank
    found: dict[str, Any] = {"equal": [], "differences": {}, "sent": {}, "said": []}

    class CountedTransfer(ring_product.Transfer):
        """Counts what it sends."""

        sent: ClassVar[list[int]] = []

        def post(self, sent: Any, received: Any) -> None:
            self.sent.append(sent.nbytes)
            super().post(sent, received)

    def difference(own: Any, whole: Any) -> float:
        return ((own - whole).abs().max() / whole.abs().max()).item()

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for dim, shape in ((0, (16 * n, 3, 24)), (1, (2, 16 * n, 24)), (0, (16 * n, 24))):
            torch.manual_seed(0)
            x, weight = torch.randn(shape, dtype=dtype), torch.randn(20, 24, dtype=dtype)
            grad = torch.randn(*shape[:-1], 20, dtype=dtype)
            whole = x.clone().requires_grad_(), weight.clone().requires_grad_()
            product = F.linear(*whole)
            product.backward(grad)

            own = x.chunk(n, dim)[rank].clone().requires_grad_(), weight.clone().requires_grad_()
            gathered = gather_product(*own, dim, group)
            found["equal"].append(torch.equal(gathered, product))
            # Every rank reads the same gradient, and they add up.
            gathered.backward(grad)
            errors = [difference(own[0].grad, n * whole[0].grad.chunk(n, dim)[rank])]
            errors.append(difference(own[1].grad, whole[1].grad))

            own = tuple(t.chunk(n, -1)[rank].clone().requires_grad_() for t in (x, weight))
            scattered = product_scatter(*own, dim, group)
            errors.append(difference(scattered, product.detach().chunk(n, dim)[rank]))
            scattered.backward(grad.chunk(n, dim)[rank])
            for part, full in zip(own, whole, strict=True):
                errors.append(difference(part.grad, full.grad.chunk(n, -1)[rank]))
            found["differences"][str(dtype), dim] = max(errors)

    x = torch.randn(8, 16).double().requires_grad_()
    weight = torch.randn(12, 16).double().requires_grad_()
    with patch.object(ring_product, "Transfer", CountedTransfer):

        def sent_by(run: Callable[[], Any]) -> list[int]:
            CountedTransfer.sent.clear()
            run()
            return list(CountedTransfer.sent)

        for name, ring in (("gather", gather_product), ("scatter", product_scatter)):
            output = ring(x * 1, weight * 1, 0, group)
            grad, other = torch.randn_like(output), torch.randn_like(output)
            both = torch.autograd.grad(output, (x, weight), grad, retain_graph=True)
            parts: list[Any] = []

            def take(wanted: Any, grad: Any, output: Any = output, parts: Any = parts) -> None:
                parts.extend(torch.autograd.grad(output, wanted, grad, retain_graph=True))

            found["sent"][name] = [
                sent_by(lambda ring=ring: ring(x, weight, 0, group)),
                # Of inputs alone, then of weights alone, as zero-bubble schedules take them.
                sent_by(lambda take=take, grad=grad: take(x, grad)),
                sent_by(lambda take=take, grad=grad: take(weight, grad)),
            ]
            found[f"{name} in parts"] = all(map(torch.equal, parts, both))
            # Weights' gradients for another gradient than the inputs' were for.
            take(x, grad)
            take(weight, other)
            found[f"{name} of another"] = torch.equal(
                parts[-1], torch.autograd.grad(output, weight, other, retain_graph=True)[0]
            )

    pending = AsyncCollectiveTensor(torch.ones(8, 16))
    expected = gather_product(torch.ones(8, 16), torch.ones(4, 16), 0, group)
    found["pending"] = torch.equal(gather_product(pending, torch.ones(4, 16), 0, group), expected)
    for wrong in (
        lambda: product_scatter(torch.ones(n + 1, 4), torch.ones(4, 4), 0, group),
        lambda: gather_product(torch.ones(n, 4), torch.ones(4, 4), -1, group),
    ):
        try:
            wrong()
        except TitanliteError as error:
            found["said"].append(str(error))
    return found


@pytest.fixture(scope="module")
def rings() -> list[dict[str, Any]]:
    return on_ranks(ring_results, 4)


def test_a_gather_is_equal_to_the_last_bit(rings: list[dict[str, Any]]) -> None:
    for of_rank in rings:
        assert all(of_rank["equal"])


def test_sums_and_gradients_are_those_of_one_product(rings: list[dict[str, Any]]) -> None:
    tolerance = {"torch.float32": 1e-6, "torch.float64": 1e-15, "torch.bfloat16": 2e-2}
    for of_rank in rings:
        assert of_rank["pending"]
        for (dtype, dim), error in of_rank["differences"].items():
            assert error < tolerance[dtype], (dtype, dim)


def test_a_ring_sends_what_the_formula_says(rings: list[dict[str, Any]]) -> None:
    """n - 1 messages of a chunk each: float64, 8 tokens a rank in, or out of 32; 16 to 12."""
    gathered, scattered = 3 * [8 * 8 * 16], 3 * [8 * 2 * 12]
    gathered_grad, scattered_grad = 3 * [8 * 2 * 12], 3 * [8 * 8 * 16]
    for of_rank in rings:
        assert of_rank["sent"]["gather"] == [gathered, scattered_grad, []]
        assert of_rank["sent"]["scatter"] == [scattered, gathered_grad, []]


def test_gradients_of_inputs_and_weights_may_be_taken_apart(rings: list[dict[str, Any]]) -> None:
    for of_rank in rings:
        for name in ("gather", "scatter"):
            assert of_rank[f"{name} in parts"]
            assert of_rank[f"{name} of another"]


def test_what_a_ring_cannot_cut_is_refused(rings: list[dict[str, Any]]) -> None:
    assert rings[0]["said"] == [
        "a ring of 4 ranks cannot split 5 evenly (dimension 0 of [5, 4]); give a sequence "
        "length that is a multiple of 4, or disable asynchronous tensor parallelism",
        "the last dimension of [4, 4] is multiplied and cannot be gathered chunk by chunk; give "
        "another dimension",
    ]


def ring_of(**parallelism: Any) -> dict[str, Any]:
    degrees = {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}
    return {"parallelism": degrees | parallelism}


WITHOUT_RING_STYLES = {
    "model": {"name": "plain", "flavor": "small"},
    "experimental": {"custom_import": "plain_model"},
    "training": {"dataset": "digits", "local_batch_size": 2},
    "activation_checkpoint": {"mode": "none"},
    **ring_of(),
}


def jobs(world: Any) -> list[Any]:
    """What the effective plan says of a job, and what becomes of ones that have nothing to do."""
    job = build_job(resolve_job(debug_config(ring_of())), world)
    found: list[Any] = [next(row for row in job.applied if row.feature.startswith("async"))]
    compiled = debug_config(ring_of(), {"compile": {"enable": True, "backend": "aot_eager"}})
    found.append((job.notes, build_job(resolve_job(compiled), world).notes))

    class OwnLinear(nn.Linear):
        def product(self, x: Any, weight: Any) -> Any:
            return x @ weight.T

    def refused(plan: dict[str, Any]) -> None:
        apply_tp(nn.ModuleDict({"own": OwnLinear(4, 4)}), job.meshes.tp, plan, rings=True)

    for wrong in (
        lambda: build_job(resolve_job(JobConfig.from_dict(WITHOUT_RING_STYLES)), world),
        lambda: refused({"": GatherColwise(0, "own")}),
        lambda: refused({"own": RowwiseLocal(0)}),
    ):
        try:
            wrong()
        except TitanliteError as error:
            found.append(str(error))
    return found


def test_the_plan_says_what_became_rings_and_nothing_is_no_answer() -> None:
    row, notes, *said = on_ranks(jobs, 2)[0]
    assert (row.requested, row.active) == ("ring", "ring")
    assert row.note == "4 all-gather-matmul and 4 matmul-reduce-scatter pairs are rings"
    assert notes == (
        (),
        (
            "warning: parallelism.enable_async_tensor_parallel: compiled for CPU, rings are likely "
            "to take up to 1.1 times as long as collectives here, unless the link is slow: a "
            "chunk's product (layers.0.attention.wo: 64 x 16 x 32) is 0.066 MFLOP; they pay off "
            "from about 100 MFLOP",
        ),
    )
    assert said == [
        "parallelism.enable_async_tensor_parallel: the tensor-parallel plan of PlainModel has no "
        "style that can overlap; set it to false, or shard linear layers with GatherColwise and "
        "RowwiseLocal",
        "tensor-parallel plan, the model: GatherColwise as a ring multiplies as nn.Linear does, "
        "but own, a OwnLinear, has its own product; disable asynchronous tensor parallelism, or "
        "use nn.Linear itself",
        "tensor-parallel plan, own: RowwiseLocal as a ring multiplies as nn.Linear does, but a "
        "OwnLinear has its own product; disable asynchronous tensor parallelism, or use nn.Linear "
        "itself",
    ]


def test_sequences_without_chunks_of_one_size_are_refused_before_ranks_start() -> None:
    uneven = ring_of(tensor_parallel_degree=3)["parallelism"]
    sizes = WITHOUT_RING_STYLES["model"] | {"hidden_dim": 66}
    with pytest.raises(ConfigError) as refused:
        JobConfig.from_dict(WITHOUT_RING_STYLES | {"parallelism": uneven, "model": sizes})
    assert refused.value.problems == (
        "parallelism.enable_async_tensor_parallel: 64 tokens are not a multiple of "
        "tensor_parallel_degree 3, but async TP needs equal chunks; set tensor_parallel_degree to "
        "2 or 4, or set this key to false",
    )


def test_the_backend_follows_the_device() -> None:
    job, no_rings = debug_config(ring_of()), debug_config()
    memory = ring_of(async_tensor_parallel_backend="symmetric_memory")
    compiled = {"compile": {"enable": True}}
    assert job.parallelism.overlap_backend("cpu") == "ring"
    assert job.parallelism.overlap_backend("cuda") == "symmetric_memory"
    assert no_rings.parallelism.overlap_backend("cuda") is None
    check_machine(job, "cpu")
    check_machine(debug_config(ring_of(async_tensor_parallel_backend="ring")), "cuda")
    check_machine(debug_config(memory, compiled), "cuda")
    with pytest.raises(ConfigError, match="needs GPUs, but this job runs on cpu"):
        check_machine(debug_config(memory, compiled), "cpu")
    # TorchTitan's own refusal, where the device alone says which way is meant.
    with pytest.raises(ConfigError, match="symmetric memory needs the compiler"):
        check_machine(job, "cuda")


def split(schedule: str, **parallelism: Any) -> list[dict[str, Any]]:
    """A pipeline of four blocks in two or four stages under a schedule."""
    degrees = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    sizes = {"model": {"num_layers": 4}, "training": {"local_batch_size": 8}}
    return [ring_of(**degrees, **parallelism), sizes]


def recomputed(mode: str, option: str = "2") -> dict[str, Any]:
    return {"activation_checkpoint": {"mode": mode, "selective_ac_option": option}}


COMPILED = {"compile": {"enable": True, "backend": "aot_eager"}}
FSDP = {"data_parallel_shard_degree": 2}
SHORT = {"training": {"steps": 2}}
# All on four ranks. FEW are those of `make test`.
FEW: dict[str, list[dict[str, Any]]] = {
    "FSDP, full": [ring_of(**FSDP), recomputed("full")],
    "zero bubble": split("ZBVZeroBubble"),
}
# Every other pair of features with rings is one of `titanlite verify --matrix`.
EARLY = {"activation_checkpoint": {"early_stop": True}}
MANY: dict[str, list[dict[str, Any]]] = {
    "four ranks, by operator, compiled": [
        ring_of(tensor_parallel_degree=4),
        recomputed("selective", "op"),
        COMPILED,
    ],
    "FSDP, stopping early": [ring_of(**FSDP), recomputed("full"), EARLY],
    "CP, full, compiled": [ring_of(context_parallel_degree=2), recomputed("full"), COMPILED],
}


def assert_all_invariant(cases: dict[str, list[dict[str, Any]]]) -> None:
    blocks = {name: {"num_layers": 4 if "num_layers" in str(c) else 2} for name, c in cases.items()}
    references = train([debug_config(SHORT, {"model": {"num_layers": n}}) for n in (2, 4)])
    trained = train([debug_config(SHORT, *case) for case in cases.values()])
    for name, training in zip(cases, trained, strict=True):
        assert_invariant(training, references[blocks[name]["num_layers"] == 4], TOLERANCE)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="it does not trace a group of threads")
def test_rings_train_as_one_process_does() -> None:
    assert_all_invariant(FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rings_go_with_every_other_feature() -> None:
    assert_all_invariant(MANY)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rings_on_eight_ranks_in_hsdp() -> None:
    (reference,) = train([debug_config(SHORT)])
    hsdp = ring_of(data_parallel_replicate_degree=2, data_parallel_shard_degree=2)
    (training,) = train([debug_config(SHORT, hsdp, {"training": {"local_batch_size": 1}})])
    assert_invariant(training, reference, TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rings_go_with_inductor() -> None:
    (reference,) = train([debug_config(SHORT)])
    compiled = {"compile": {"enable": True}}
    (training,) = train([debug_config(SHORT, ring_of(), compiled)])
    assert_invariant(training, reference, TOLERANCE)


def test_rings_round_in_bfloat16_as_one_process_does() -> None:
    """No further from float32 than one process, whose sums are in another order."""
    low = {"training": {"dtype": "float32", "mixed_precision_param": "bfloat16", "steps": 2}}
    exact, own = train(
        [debug_config({"training": {"dtype": "float32", "steps": 2}}), debug_config(low)]
    )
    (training,) = train([debug_config(low, ring_of())])

    def error(of: Any) -> float:
        return max(difference(of.weights[name], whole) for name, whole in exact.weights.items())

    assert 1e-6 < error(training) < 1.5 * error(own)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """What the fused operators say they are, on CPU and without overlap, while inside.

    There is no symmetric memory on CPU, and the pass takes NCCL's absence for that of GPUs.
    """
    c10d = torch.ops._c10d_functional

    def size_of(group_name: str) -> int:
        return dist.distributed_c10d._resolve_process_group(group_name).size()

    def fused_gather(shard, weights, dim, group_name, *, return_A=True):
        whole = c10d.all_gather_into_tensor(
            shard.movedim(dim, 0).contiguous(), size_of(group_name), group_name
        )
        whole = c10d.wait_tensor(whole).movedim(0, dim)
        return whole if return_A else None, [whole @ weight for weight in weights]

    def fused_scatter(x, weight, op, dim, group_name):
        product = (x @ weight).movedim(dim, 0).contiguous()
        total = c10d.reduce_scatter_tensor(product, op, size_of(group_name), group_name)
        return c10d.wait_tensor(total).movedim(0, dim)

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", fused_gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", fused_scatter, "CPU")
    try:
        with patch.object(dist, "is_nccl_available", lambda: True):
            yield
    finally:
        library._destroy()


def fused_by_inductor(world: Any) -> tuple[dict[str, int], float]:
    """A layer's graphs after inductor's micro-pipeline pass, run with plain kernels.

    What is counted, and how far all that comes out is from the layer as it is.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
            self.w2 = nn.Linear(24, 16, bias=False)

        def forward(self, x: Any) -> Any:
            return self.w2(self.w1(x).sigmoid() * self.w3(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = Inner()

        def forward(self, x: Any) -> Any:
            return x + self.ffn(x)

    def passes(graph: Any, example: Any) -> Any:
        # What earlier passes do that matters here: one name for all views, none that does nothing.
        view_to_reshape(graph)
        for node in list(graph.graph.nodes):
            is_reshape = node.target is torch.ops.aten.reshape.default
            if is_reshape and node.args[0].meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        micro_pipeline_tp_pass(graph.graph)
        torch._inductor.config.post_grad_custom_post_pass(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    model = Block()
    apply_tp(model, mesh, {"ffn": GatherColwise(0, "w1", "w3"), "ffn.w2": RowwiseLocal(0)})
    x = torch.randn(8, 3, 16, requires_grad=True)
    outputs = []
    backend = aot_autograd(
        fw_compiler=passes, bw_compiler=passes, decompositions=select_decomp_table
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with plain_kernels():
        enable_symmetric_memory(mesh)
        fusions = Fusions()
        for run in (model, compiled):
            model.zero_grad()
            output = run(x)
            (x_grad,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
            output.square().sum().backward()
            grads = [p.grad.to_local() for p in model.parameters()]
            outputs.append([output.detach(), x_grad, *grads])
    errors = [(a - b).abs().max().item() for a, b in zip(*outputs, strict=True)]
    return fusions.counts(), max(errors)


def test_inductor_fuses_what_the_styles_make() -> None:
    counts, error = on_ranks(fused_by_inductor, 2)[0]
    assert counts == {
        "all-gather-matmul forward": 1,
        "all-gather-matmul backward": 1,
        "matmul-reduce-scatter forward": 1,
        "matmul-reduce-scatter backward": 1,
    }
    assert error < 1e-5


def fused_job(world: Any) -> list[Any]:
    """A job on symmetric memory, through inductor: compiled, from disk, and where nothing fuses."""
    asked = ring_of(async_tensor_parallel_backend="symmetric_memory")
    compiled = {"compile": {"enable": True, "components": ["model"]}}
    resolved = resolve_job(debug_config(asked, compiled))
    plain = resolve_job(debug_config({"parallelism": {"tensor_parallel_degree": 2}}))
    found: list[Any] = [build_job(plain, world).step().loss]
    with plain_kernels():
        for _ in range(2):
            torch._dynamo.reset()
            job = build_job(resolved, world)
            found.append((job.step().loss, job.fusions.counts()))
    # Without the kernels and without NCCL the pass leaves the graphs as they are.
    torch._dynamo.reset()
    torch.compiler.config.cache_key_tag += " nothing fused"
    with patch("titanlite.job_parts.keep_caches_apart"):
        job = build_job(resolved, world)
    found.append((job.step().loss, job.fusions.require()))
    return found


def test_pairs_without_a_fusion_are_named() -> None:
    """What the next test sees in compiled graphs, without them."""
    counted = Fusions()
    counts = dict.fromkeys(counted.counts(), 2)
    assert "all-gather-matmul forward, no all-gather-matmul backward, no m" in counted.require()
    with patch.object(Fusions, "counts", lambda self: counts):
        assert not counted.require()
        counts["matmul-reduce-scatter backward"] = 0
        assert "inductor fused no matmul-reduce-scatter backward, so" in counted.require()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_counts_what_is_fused_and_warns_where_nothing_is() -> None:
    plain, first, second, (loss, said) = on_ranks(fused_job, 2, timeout_seconds=1000)[0]
    for fused_loss, counts in (first, second):
        assert fused_loss == pytest.approx(plain, rel=1e-12)
        assert set(counts.values()) == {2}
    assert loss == pytest.approx(plain, rel=1e-12)
    assert said.count(", no ") == 3


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ring_overlaps() -> None:
    """Of three measurements one, since what else a machine does is in each of them."""
    gains: list[dict[str, float]] = []
    for _ in range(3):
        found, _ = spawn(measure_overlap, 2, timeout_seconds=280)[0]
        gains.append({name: one.gain for name, one in found.items()})
        if all(gain >= (WHOLE_TARGET if "(all)" in n else TARGET) for n, gain in gains[-1].items()):
            return
    raise AssertionError(gains)
