"""Ring attention on real ranks against full attention: values, traffic, memory, wrapping."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layouts import num_keys_sent
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode
from training import on_ranks

from titanlite.errors import ConfigError
from titanlite.modules.attention import LAYOUTS, make_layout
from titanlite.parallelize import ParallelPlan, apply_ac
from titanlite.parallelize.context_parallel import ring, rotation
from titanlite.parallelize.context_parallel.ring import RingAttention, ring_attention
from titanlite.parallelize.context_parallel.rotation import ROTATE_METHODS
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import World, open_world

TIMEOUT_SECONDS = 120


def full_tensors(num_ranks, num_local, dtype, num_kv_heads=4, batch=2, head_dim=8, seed=0):
    """q, k, v and the gradient of the output for the whole sequence, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, h, num_ranks * num_local, head_dim) for h in (4, num_kv_heads, num_kv_heads, 4)
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def mask_loss(grad_out):
    """Keep the loss of a few tokens, none in the first third, so some ranks have no loss at all."""
    valid = torch.rand(grad_out.size(2), generator=torch.Generator().manual_seed(1)) < 0.3
    valid[: grad_out.size(2) // 3] = False
    return grad_out * valid[:, None]


def with_gradients(attention, q, k, v, grad_out):
    """(out, dq, dk, dv), in float64."""
    inputs = [part.detach().clone().requires_grad_() for part in (q, k, v)]
    out = attention(*inputs)
    return [part.double() for part in (out, *torch.autograd.grad(out, inputs, grad_out))]


def plain(causal, num_kv_heads):
    return partial(scaled_dot_product_attention, is_causal=causal, enable_gqa=num_kv_heads < 4)


def ring_errors(world: World, cases: list[tuple]) -> list[list[tuple]]:
    """Per case and tensor (out, dq, dk, dv): local max error, magnitude, sum of squared errors."""
    errors = []
    for layout_name, rotate_method, causal, num_kv_heads, batch, num_local, dtype in cases:
        layout = make_layout(layout_name, world.size)
        *qkv, grad_out = full_tensors(world.size, num_local, dtype, num_kv_heads, batch)
        grad_out = mask_loss(grad_out)
        exact = with_gradients(
            plain(causal, num_kv_heads), *(part.double() for part in (*qkv, grad_out))
        )

        def attention(q, k, v, causal=causal, layout=layout, rotate_method=rotate_method):
            return ring_attention(
                q, k, v, dist.group.WORLD, causal, layout=layout, rotate_method=rotate_method
            )

        found = with_gradients(
            attention, *(layout.shard(part, 2, world.rank) for part in (*qkv, grad_out))
        )
        errors.append([])
        for part, whole in zip(found, exact, strict=True):
            error = part - layout.shard(whole, 2, world.rank)
            sizes = error.abs().max(), whole.abs().max(), error.square().sum()
            errors[-1].append([size.item() for size in sizes])
    return errors


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_against_full_attention(num_ranks):
    shortest = {"headtail": 2, "striped": 1, "none": 1}
    cases = [
        (layout, rotate_method, causal, num_kv_heads, batch, num_local, dtype)
        for layout, rotate_method, causal in product(LAYOUTS, ROTATE_METHODS, (True, False))
        for num_kv_heads, batch, num_local, dtype in (
            (4, 2, 6, torch.float64),
            (2, 1, 6, torch.float64),
            (4, 1, shortest[layout], torch.float64),
            (1, 2, 6, torch.float32),
        )
    ]
    limits = {torch.float64: 1e-13, torch.float32: 2e-6}
    # On processes for a ring of two and of four.
    ranks = on_ranks(ring_errors, num_ranks, cases, threads=num_ranks not in (2, 4))
    for errors in ranks:
        for case, of_tensors in zip(cases, errors, strict=True):
            for what, (error, magnitude, _) in zip(
                ("out", "dq", "dk", "dv"), of_tensors, strict=True
            ):
                assert error <= limits[case[-1]] * magnitude, (case, what)


def test_triangles_cut_for_the_kernel():
    """Long enough that causal tiles are split for the CPU kernel (above 256 keys)."""
    cases = [
        (layout, "alltoall", True, 2, 1, 600, dtype)
        for layout, dtype in product(LAYOUTS, (torch.float64, torch.float32))
    ]
    for errors in on_ranks(ring_errors, 2, cases, threads=True):
        for case, of_tensors in zip(cases, errors, strict=True):
            limit = 1e-13 if case[-1] == torch.float64 else 2e-6
            assert all(error <= limit * magnitude for error, magnitude, _ in of_tensors), case


@pytest.mark.parametrize("rotate_method", ROTATE_METHODS)
def test_bfloat16_is_as_exact_as_plain_bfloat16(rotate_method):
    cases = [(layout, rotate_method, True, 2, 1, 96, torch.bfloat16) for layout in LAYOUTS]
    per_rank = on_ranks(ring_errors, 4, cases, threads=True)
    *qkv, grad_out = full_tensors(4, 96, torch.bfloat16, 2, 1)
    tensors = (*qkv, mask_loss(grad_out))
    exact = with_gradients(plain(True, 2), *(part.double() for part in tensors))
    rounded = with_gradients(plain(True, 2), *tensors)
    for index, what in enumerate(("out", "dq", "dk", "dv")):
        # Use the root mean square, because the maximum of many rounding errors varies too much.
        own_error = (rounded[index] - exact[index]).square().sum().item() ** 0.5
        for number, case in enumerate(cases):
            error = sum(errors[number][index][2] for errors in per_rank) ** 0.5
            assert error <= 1.5 * own_error, (case, what)


def documents_of(lengths: list[list[int]]):
    """Numbers of documents [B, T] of these lengths."""
    return torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])


def document_errors(world: World, cases: list[tuple]) -> list[tuple[list[float], list[str]]]:
    """Per case the largest relative errors of (out, dq, dk, dv), and how each part was computed."""
    found = []
    of = ring._parts
    for layout_name, rotate_method, causal, num_kv_heads, lengths, dtype in cases:
        layout, whole = make_layout(layout_name, world.size), documents_of(lengths)
        num_local = whole.size(1) // world.size
        tensors = full_tensors(world.size, num_local, dtype, num_kv_heads)
        mask = (whole[:, :, None] == whole[:, None, :]).unsqueeze(1)
        mask = mask.tril() if causal else mask

        def dense(q, k, v, mask=mask):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        parts: list[str] = []

        def record(*arguments, parts=parts):
            for tile, kernel, how in of(*arguments):
                parts.append("whole" if how.mask is None else "masked")
                yield tile, kernel, how

        documents = layout.shard(whole, 1, world.rank)
        local = [layout.shard(part, 2, world.rank) for part in tensors]
        with patch.object(ring, "_parts", record):
            own = with_gradients(
                lambda q, k, v, c=causal, y=layout, r=rotate_method, d=documents: ring_attention(
                    q, k, v, dist.group.WORLD, c, y, r, documents=d
                ),
                *local,
            )
        exact = with_gradients(dense, *(part.double() for part in tensors))
        errors = [
            ((a - layout.shard(b, 2, world.rank)).abs().max() / b.abs().max()).item()
            for a, b in zip(own, exact, strict=True)
        ]
        found.append((errors, parts[: len(parts) // 2]))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_documents_do_not_see_each_other(num_ranks):
    """Against a dense mask; short documents leave rows without keys in most blocks."""
    num_tokens = 6 * num_ranks
    lengths = {
        "one": [[num_tokens], [num_tokens]],
        "halves, and all but one": [[num_tokens // 2] * 2, [num_tokens - 1, 1]],
        "short": [[2, 1] * (num_tokens // 3), [1, 4, num_tokens - 5]],
        "single tokens": [[1] * num_tokens, [num_tokens]],
    }
    cases = [
        (*kinds, 2, of, dtype)
        for kinds in product(LAYOUTS, ROTATE_METHODS, (True, False))
        for of in lengths.values()
        for dtype in (torch.float64, torch.float32)[: 2 if of == lengths["short"] else 1]
    ]
    limits = {torch.float64: 1e-13, torch.float32: 3e-6}
    for of_rank in on_ranks(document_errors, num_ranks, cases):
        for case, (errors, parts) in zip(cases, of_rank, strict=True):
            assert max(errors) <= limits[case[-1]], case
            if case[4] == lengths["one"]:
                assert "masked" not in parts


def test_only_parts_with_a_document_in_common_are_computed():
    def parts(layout, lengths, num_ranks=4):
        cases = [(layout, "alltoall", True, 4, lengths, torch.float64)]
        found = on_ranks(document_errors, num_ranks, cases)
        assert max(max(of_rank[0][0]) for of_rank in found) <= 1e-13
        return [of_rank[0][1] for of_rank in found]

    # Contiguous shards of 6 tokens. One document each: no rank needs another's keys.
    assert parts("none", [[6, 6, 6, 6]] * 2) == [["whole"]] * 4
    # The second document begins in the second shard, and the third where the last shard does. Of
    # the keys before it, each of two sequences sees a rectangle.
    assert parts("none", [[8, 10, 6]] * 2) == [
        ["whole"],
        ["masked", "whole", "whole"],
        ["whole", "whole", "whole"],
        ["whole"],
    ]


def test_documents_in_triangles_cut_for_the_kernel():
    cases = [
        (layout, "alltoall", True, 2, [[700, 90, 410], [1199, 1]], torch.float64)
        for layout in LAYOUTS
    ]
    for of_rank in on_ranks(document_errors, 2, cases):
        for case, (errors, _) in zip(cases, of_rank, strict=True):
            assert max(errors) <= 1e-13, case


def mesh_axis_errors(world: World) -> list[float]:
    """Largest relative errors on one axis of a 2D mesh; each row has its own sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row, rank = mesh.get_coordinate()
    whole = full_tensors(2, 6, torch.float64, num_kv_heads=2, seed=row)
    attention = RingAttention(mesh["cp"])
    local = [attention.layout.shard(part, 2, rank) for part in whole]
    exact, found = with_gradients(plain(True, 2), *whole), with_gradients(attention, *local)
    return [
        ((a - attention.layout.shard(b, 2, rank)).abs().max() / b.abs().max()).item()
        for a, b in zip(found, exact, strict=True)
    ]


def test_on_one_axis_of_a_mesh():
    for errors in on_ranks(mesh_axis_errors, 4):
        assert max(errors) <= 1e-13


def unusual_errors(world: World) -> list[float]:
    """Largest relative error with non-contiguous tensors and with very large scores."""
    errors = []
    layout = make_layout("headtail", world.size)
    for factor in (1.0, 1e4):
        q, k, v, _ = full_tensors(world.size, 6, torch.float64)
        q, grad_out = q * factor, torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(q.shape)
        exact = with_gradients(plain(True, 4), q, k, v, grad_out)
        q, k, v = (layout.shard(part, 2, world.rank) for part in (q, k, v))
        local = q.mT.contiguous().mT.requires_grad_()
        assert local.stride(3) != 1
        out = ring_attention(local, k, v, dist.group.WORLD)
        [dq] = torch.autograd.grad(out, local, grad_out[:, :, : q.size(2)])
        for found, whole in ((out, exact[0]), (dq, exact[1])):
            error = (found - layout.shard(whole, 2, world.rank)).abs().max()
            errors.append((error / whole.abs().max()).item())
    return errors


def test_unusual_strides_and_enormous_scores():
    for plain_out, plain_dq, enormous_out, enormous_dq in on_ranks(unusual_errors, 2):
        assert max(plain_out, plain_dq) <= 1e-13
        # A score of 1e4 is only exact to 1e-12, and a saturated softmax has no gradient.
        assert enormous_out <= 1e-10
        assert math.isfinite(enormous_dq)


def counted_flops(world: World) -> int:
    """FLOPs of this rank's part of attention, as PyTorch counts them."""
    q, k, v, grad_out = full_tensors(1, 6, torch.float32, num_kv_heads=2)
    with FlopCounterMode(display=False) as counter:
        out = ring_attention(*(part.requires_grad_() for part in (q, k, v)), dist.group.WORLD)
        out.backward(grad_out)
    return counter.get_total_flops()


def test_flop_counter_sees_the_operator():
    # 2 + 5 matrix products for batch 2, 4 heads of 8, 6 queries, and the 12 keys of both ranks.
    product_flops = 2 * (2 * 4 * 8) * 6 * 12
    assert on_ranks(counted_flops, 2) == [7 * product_flops] * 2


def counted_bytes(place: Place, cases: list[tuple]) -> list[tuple[int, int]]:
    """Bytes that this rank sends by P2P, forward and backward."""
    counted = []
    post = dist.batch_isend_irecv

    def count(operations):
        sent.extend(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return post(operations)

    with open_world(place), patch("torch.distributed.batch_isend_irecv", count):
        for layout, causal, dtype in cases:
            q = torch.randn(2, 4, 8, 16, dtype=dtype, requires_grad=True)
            kv = torch.randn(2, 2, 8, 16, dtype=dtype, requires_grad=True)
            sent: list[int] = []
            out = ring_attention(q, kv, kv, dist.group.WORLD, causal, layout)
            forward, sent[:] = sum(sent), []
            out.sum().backward()
            counted.append((forward, sum(sent)))
    return counted


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_counted_where_they_are_sent(num_ranks):
    cases = list(product(LAYOUTS, (True, False), (torch.float32, torch.bfloat16)))
    per_rank = spawn(counted_bytes, num_ranks, cases, timeout_seconds=TIMEOUT_SECONDS)
    for number, (name, causal, dtype) in enumerate(cases):
        # 2 tensors of [batch 2, 8 keys, 2 heads of 16].
        key_elements = 2 * 2 * 2 * 16
        block_elements = 8 * key_elements
        layout = make_layout(name, num_ranks)
        for rank in range(num_ranks):
            forward, backward = per_rank[rank][number]
            keys_and_values = num_keys_sent(layout, rank, 8, causal) * key_elements
            received = sum(
                layout.num_keys_carried(layout.holder(rank, -hop), hop, 8, causal)
                for hop in range(1, num_ranks)
            )
            gradients = received * key_elements
            assert forward == keys_and_values * dtype.itemsize
            # Keys and values again, and their gradients in float32.
            assert backward == keys_and_values * dtype.itemsize + gradients * 4
            assert forward <= (num_ranks - 1) * block_elements * dtype.itemsize
            if not causal:
                assert forward == (num_ranks - 1) * block_elements * dtype.itemsize
        if name == "headtail" and causal:
            total_forward = sum(result[number][0] for result in per_rank)
            blocks = num_ranks * (num_ranks - 1)
            assert total_forward == 3 * blocks * block_elements * dtype.itemsize / 4


def saved_bytes(world: World, num_tokens: int, cases: list[tuple[str, str]]) -> list[int]:
    """Bytes of activations that autograd keeps on this rank between forward and backward."""

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    counted = []
    for name, rotate_method in cases:
        saved: dict[int, int] = {}
        layout = make_layout(name, world.size)
        tokens = layout.shard(torch.randn(1, num_tokens, 32), 1, world.rank)
        weight = torch.randn(3, 32, 32, requires_grad=True)
        q, k, v = (torch.matmul(tokens, w).unflatten(2, (4, 8)) for w in weight)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            ring_attention(q, k, v, dist.group.WORLD, True, layout, rotate_method).sum()
        counted.append(sum(saved.values()))
    return counted


def test_saved_activations_fall_as_the_number_of_ranks():
    cases = list(product(LAYOUTS, ROTATE_METHODS))
    [whole] = on_ranks(saved_bytes, 1, 128, cases)
    # Per token, q, k, v and out have 32 floats each, and lse has one for each of 4 heads.
    assert whole == [128 * (4 * 32 + 4) * 4] * len(cases)
    parts = on_ranks(saved_bytes, 4, 128, cases)
    assert parts == [[whole_bytes // 4 for whole_bytes in whole]] * 4


def wrapped_errors(place: Place, wrapping: str) -> tuple[float, int]:
    """Largest relative gradient error of a wrapped layer, and how often it posted messages."""
    operator = torch.ops.titanlite.ring_attention.default
    post = dist.batch_isend_irecv

    class Layer(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.qkv, self.attention = nn.Linear(32, 96).double(), attention

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return x + self.attention(q, k, v).transpose(1, 2).flatten(2)

    with (
        open_world(place) as world,
        patch("torch.distributed.batch_isend_irecv", side_effect=post) as posts,
    ):
        torch.manual_seed(0)
        attention = RingAttention(dist.group.WORLD)
        reference = Layer(lambda q, k, v: plain(True, 4)(q, k, v))
        layer = Layer(attention)
        layer.load_state_dict(reference.state_dict())
        x = torch.randn(1, 8 * world.size, 32, dtype=torch.float64)
        reference(x).square().sum().backward()

        def policy(_, op, *args, **kwargs):
            saved = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
            return saved[op != operator]

        contexts = partial(create_selective_checkpoint_contexts, policy)
        blocks = nn.ModuleDict({"blocks": nn.ModuleDict({"0": layer})})
        if wrapping == "apply_ac by operator":
            apply_ac(blocks, "selective", selective_option="op", plan=ParallelPlan(blocks="blocks"))
        run = {
            "checkpoint": lambda x: checkpoint(layer, x, use_reentrant=False),
            "apply_ac by operator": blocks.get_submodule("blocks.0"),
            "compile": torch.compile(layer, backend="aot_eager", fullgraph=True),
            "inductor": torch.compile(layer, fullgraph=True),
            "compiled checkpoint": torch.compile(
                lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager"
            ),
            "compiled selective checkpoint": torch.compile(
                lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=contexts),
                backend="aot_eager",
            ),
        }[wrapping]
        run(attention.layout.shard(x, 1, world.rank)).square().sum().backward()
        error = 0.0
        for parameter, exact in zip(layer.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            difference = (parameter.grad - exact.grad).abs().max() / exact.grad.abs().max()
            error = max(error, difference.item())
    return error, posts.call_count


@pytest.mark.parametrize(
    ("wrapping", "num_forward"),
    [
        ("checkpoint", 2),
        ("apply_ac by operator", 1),
        ("compile", 1),
        pytest.param("inductor", 1, marks=pytest.mark.slow),
        pytest.param("compiled checkpoint", 2, marks=pytest.mark.slow),
        ("compiled selective checkpoint", 1),
    ],
)
def test_inside_checkpointing_and_compilation(wrapping, num_forward):
    for error, posts in spawn(wrapped_errors, 2, wrapping, timeout_seconds=TIMEOUT_SECONDS):
        assert error <= 1e-13
        # With two ranks, each pass has one hop; in the backward pass the gradient follows.
        assert posts == num_forward + 2


def test_the_own_block_is_computed_while_the_others_arrive(monkeypatch):
    done: list[str | int] = []

    def all_gather(*_: object, async_op: bool, **__: object) -> SimpleNamespace:
        assert async_op
        done.append("gather")
        return SimpleNamespace(wait=lambda: done.append("wait"))

    monkeypatch.setattr(rotation, "_all_gather", all_gather)
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
    gather = rotation.Gather(group, make_layout("none", 3), causal=False)
    gather.forward(torch.zeros(2, 1, 4, 1, 8), lambda key_rank, kv: done.append(key_rank))
    assert done == ["gather", 1, "wait", 0, 2]


def check_operator(world: World, rotate_method: str) -> None:
    """PyTorch's own test of a custom operator: schema, fake tensors, autograd, compilation."""
    q = torch.randn(2, 6, 4, 8, requires_grad=True).transpose(1, 2)
    kv = torch.randn(2, 2, 6, 8, requires_grad=True)
    settings = (dist.group.WORLD.group_name, "headtail", rotate_method, True, 0.3)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (q.to(dtype), kv.to(dtype), kv.to(dtype) + 1, *settings)
        inputs = [part.detach() for part in arguments[:3]]
        documents = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
        sinks = torch.randn(4, requires_grad=True)
        for more in ((None,), (documents,), (None, 3, 2.0, sinks)):
            torch.library.opcheck(torch.ops.titanlite.ring_attention.default, (*arguments, *more))
            found = torch.ops.titanlite.ring_attention(*arguments, *more)
            out, lse = (part.detach() for part in found)
            torch.library.opcheck(
                torch.ops.titanlite.ring_attention_backward.default,
                (
                    out,
                    *inputs,
                    out,
                    lse,
                    *settings,
                    *(m.detach() if m is sinks else m for m in more),
                ),
            )


@pytest.mark.slow
@pytest.mark.parametrize("rotate_method", ["alltoall", "allgather"])
def test_operator_keeps_the_rules_of_custom_operators(rotate_method):
    on_ranks(check_operator, 2, rotate_method)


MISTAKES = {
    "layout": 'layout: "zigzag" is not a sequence layout; use one of "headtail"',
    "rotate method": 'rotate_method: "ring" is not known; use one of "alltoall", "allgather"',
    "ranks": "layout: made for 4 ranks, but the mesh has 2; make it for 2 ranks",
    "half": "sequence length: 5 tokens on a rank cannot be split into two equal chunks",
    "heads": "H a multiple of K, not q [1, 4, 6, 8], k [1, 3, 6, 8]",
    "lengths": "H a multiple of K, not q [1, 4, 6, 8], k [1, 2, 4, 8]",
    "axes": "mesh: ring attention needs one axis, but this mesh has 2; select one",
    "documents": "needs documents [B, T], here [1, 6], not [6]",
}


def call_badly(world: World) -> dict[str, str]:
    """The error message for each mistake."""
    plane = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("dp", "cp"))
    mesh = plane["cp"]
    q, k = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    calls = {
        "layout": lambda: ring_attention(q, k, k, mesh, layout="zigzag"),
        "rotate method": lambda: ring_attention(q, k, k, mesh, rotate_method="ring"),
        "ranks": lambda: ring_attention(q, k, k, mesh, layout=make_layout("none", 4)),
        "half": lambda: ring_attention(q[:, :, :5], k[:, :, :5], k[:, :, :5], mesh),
        "heads": lambda: ring_attention(q, k[:, :1].expand(1, 3, 6, 8), k, mesh),
        "lengths": lambda: ring_attention(q, k[:, :, :4], k[:, :, :4], mesh),
        "axes": lambda: ring_attention(q, k, k, plane),
        "documents": lambda: ring_attention(q, k, k, mesh, documents=torch.zeros(6)),
    }
    answers = {}
    for mistake, call in calls.items():
        with pytest.raises((ConfigError, ValueError)) as raised:
            call()
        answers[mistake] = str(raised.value)
    return answers


def test_mistakes_get_one_clear_line():
    for answers in on_ranks(call_badly, 2):
        assert answers.keys() == MISTAKES.keys()
        for mistake, message in MISTAKES.items():
            assert message in answers[mistake]
            assert "\n" not in answers[mistake]
