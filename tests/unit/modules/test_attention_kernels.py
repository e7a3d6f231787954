"""Kernels and merge against the definition of softmax, and the choice of a kernel."""

import itertools
import math

import pytest
import torch

from titanlite.modules.attention.kernels import KERNELS, Scoring, choose_kernel, explain_choice
from titanlite.parallelize.context_parallel.ring import merge

by_name = {kernel.name: kernel for kernel in KERNELS}


def attention_by_definition(q, k, v, causal, scale):
    """(out, lse) in float64, with key/value heads repeated for their query heads."""
    groups = q.size(1) // k.size(1)
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def draw(num_queries, num_keys, num_heads=4, num_kv_heads=4, head_dim=8):
    generator = torch.Generator().manual_seed(num_queries + num_keys)
    heads = [num_heads, num_kv_heads, num_kv_heads]
    lengths = [num_queries, num_keys, num_keys]
    return [
        torch.randn(2, h, t, head_dim, dtype=torch.float64, generator=generator)
        for h, t in zip(heads, lengths, strict=True)
    ]


tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("name", ["CPU flash", "plain"])
@pytest.mark.parametrize("dtype", tolerance)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal"),
    [(9, 9, True), (1, 1, True), (9, 5, False), (1, 7, False)],
)
def test_kernel_against_the_definition(name, dtype, num_kv_heads, num_queries, num_keys, causal):
    exact = [
        part.to(dtype).double().requires_grad_()
        for part in draw(num_queries, num_keys, num_kv_heads=num_kv_heads)
    ]
    out, lse = attention_by_definition(*exact, causal, 0.3)
    torch.manual_seed(0)
    grad_out = torch.randn_like(out).to(dtype)
    grads = torch.autograd.grad(out, exact, grad_out.double())

    q, k, v = (part.detach().to(dtype) for part in exact)
    kernel = by_name[name]
    found_out, found_lse = kernel.forward(q, k, v, Scoring(causal, 0.3))
    found_grads = kernel.backward(grad_out, q, k, v, found_out, found_lse, Scoring(causal, 0.3))
    expected = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    for (what, value), found in zip(
        expected.items(), (found_out, found_lse, *found_grads), strict=True
    ):
        assert found.shape == value.shape
        assert found.dtype == dtype or what == "lse"
        # The softmax over a single key is always 1, so dq and dk are exactly zero: terms of about 1
        # cancel, and what they leave depends on the processor's order of summation.
        largest = value.abs().max().clamp(min=0.5)
        error = ((found.double() - value).abs().max() / largest).item()
        assert error <= tolerance[dtype], what


@pytest.mark.parametrize("name", ["CPU flash", "plain"])
def test_gradients_of_parts_of_the_keys_add_up(name):
    q, k, v = draw(6, 10)
    exact = [part.requires_grad_() for part in (q, k, v)]
    out, lse = attention_by_definition(*exact, False, 0.3)
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, exact, grad_out)
    q, k, v, out, lse = (part.detach() for part in (q, k, v, out, lse))
    parts = [
        by_name[name].backward(
            grad_out, q, k[:, :, keys], v[:, :, keys], out, lse, Scoring(False, 0.3)
        )
        for keys in (slice(0, 4), slice(4, 10))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], expected[0], rtol=0, atol=1e-13)
    for index in (1, 2):
        joined = torch.cat([part[index] for part in parts], 2)
        torch.testing.assert_close(joined, expected[index], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["CPU flash", "plain"])
@pytest.mark.parametrize("dtype", tolerance)
@pytest.mark.parametrize("num_keys", [11, 600])
def test_masked_keys_and_rows_without_keys(name, dtype, num_keys):
    """The parts of the keys merge to the whole; in each part some queries have no key at all."""
    exact = [p.to(dtype).double() for p in draw(9, num_keys, num_kv_heads=2)]
    q, k, v = (part.clone().requires_grad_() for part in exact)
    mask = torch.rand(2, 1, 9, num_keys, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, :, :4, : num_keys - 3] = False
    mask[1, :, 5:, 7:] = False
    mask[..., -1] |= ~mask.any(-1)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~mask, -torch.inf)
    out, lse = scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)
    grad_out = torch.randn_like(out).to(dtype)
    grads = torch.autograd.grad(out, (q, k, v), grad_out.double())

    kernel = by_name[name]
    q, k, v = (part.to(dtype) for part in exact)
    parts = [slice(0, num_keys - 3), slice(num_keys - 3, num_keys)]
    # Rounded once, as in a ring.
    kept = torch.promote_types(dtype, torch.float32)
    merged = torch.zeros(q.shape, dtype=kept), torch.full(q.shape[:3], -torch.inf, dtype=kept)
    for keys in parts:
        arguments = k[:, :, keys], v[:, :, keys], Scoring(False, 0.3, mask[..., keys])
        block = kernel.forward(q, *arguments)
        hidden = ~mask[..., keys].any(-1).expand(q.shape[:3])
        assert hidden.any()
        assert (block[1][hidden] == -torch.inf).all()
        assert not block[0][hidden].any()
        merge(*merged, *block)
    found = [
        kernel.backward(
            *(grad_out, q, k[:, :, keys], v[:, :, keys], merged[0].to(dtype), merged[1]),
            Scoring(False, 0.3, mask[..., keys]),
        )
        for keys in parts
    ]
    found_grads = [sum(dq for dq, _, _ in found)]
    found_grads += [torch.cat([of[index] for of in found], 2) for index in (1, 2)]
    for a, b in zip((*merged, *found_grads), (out, lse, *grads), strict=True):
        assert (a.double() - b).abs().max() <= 2 * tolerance[dtype] * b.abs().max()


def test_merge_is_attention_over_both_parts_in_any_order():
    q, k, v = draw(6, 12)
    out, lse = attention_by_definition(q, k, v, False, 1.0)
    parts = [
        attention_by_definition(q, k[:, :, keys], v[:, :, keys], False, 1.0)
        for keys in (slice(0, 3), slice(3, 4), slice(4, 12))
    ]
    for order in itertools.permutations(parts):
        merged_out, merged_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        for part in order:
            merge(merged_out, merged_lse, *part)
        torch.testing.assert_close(merged_out, out, rtol=0, atol=1e-14)
        torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-14)


def test_merge_of_masked_and_of_enormous_parts():
    infinite = torch.inf
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    cases = [  # lse before, lse of the part, (out, lse) after: out is 1 before, the part's is 2
        (-infinite, -infinite, 1.0, -infinite),
        (0.0, -infinite, 1.0, 0.0),
        (-infinite, 0.0, 2.0, 0.0),
        (3e38, -3e38, 1.0, 3e38),
        (-3e38, 3e38, 2.0, 3e38),
        (1e4, 1e4, 1.5, 1e4 + math.log(2)),
    ]
    for before, part, expected_out, expected_lse in cases:
        out, lse = one.expand(1, 1, 1, 1).clone(), torch.full((1, 1, 1), before)
        merge(out, lse, two.expand(1, 1, 1, 1), torch.full((1, 1, 1), part))
        assert (out.item(), lse.item()) == pytest.approx((expected_out, expected_lse), rel=1e-6)


def test_merge_does_not_hide_a_nan():
    out, lse = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1)
    merge(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_the_choice_of_kernel_prints(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert explain_choice("cpu", torch.float64, 7) == "CPU flash"
    assert explain_choice("cuda", torch.bfloat16, 64) == "CUDA flash"
    assert explain_choice("cuda", torch.float32, 64) == (
        "CUDA memory-efficient (not CUDA flash, which needs float16 or bfloat16)"
    )
    assert explain_choice("cuda", torch.float64, 64) == (
        "plain (not CUDA flash, which needs float16 or bfloat16; "
        "not CUDA memory-efficient, which needs float16, bfloat16 or float32)"
    )
    assert explain_choice("cuda", torch.bfloat16, 20).startswith("plain (not CUDA flash")
    assert explain_choice("mps", torch.float32, 64) == "plain (no fused kernel is used on mps)"
    assert choose_kernel("cpu", torch.float64, 7, masked=True).name == "CPU flash"
    assert choose_kernel("cuda", torch.bfloat16, 64, masked=True).name == "CUDA memory-efficient"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert "needs compute capability 8.0" in explain_choice("cuda", torch.float16, 64)
    assert choose_kernel("cuda", torch.float16, 64).name == "CUDA memory-efficient"


@pytest.mark.parametrize(
    ("name", "dtype"), [("CUDA flash", torch.bfloat16), ("CUDA memory-efficient", torch.float32)]
)
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal", "masked"),
    [(40, 40, True, False), (40, 24, False, False), (40, 21, False, True)],
)
def test_cuda_kernels_are_called_as_their_operators_want(
    name, dtype, num_queries, num_keys, causal, masked
):
    """Checks values on a GPU; without one, checks shapes and signatures with fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if masked and not by_name[name].takes_masks:
        pytest.skip("takes no mask")

    def tensors(device):
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, 4, num_queries, 16), (2, 2, num_keys, 16), (2, 2, num_keys, 16)]
        return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]

    def results(kernel, q, k, v):
        mask = None
        if masked:
            mask = torch.ones(2, 1, num_queries, num_keys, dtype=torch.bool, device=q.device)
            mask = mask.tril(-3)
        out, lse = kernel.forward(q, k, v, Scoring(causal, 0.25, mask))
        assert lse.dtype == torch.float32
        # In a ring, the final lse of a query is finite.
        finite = lse.masked_fill(lse == -torch.inf, 0)
        return out, finite, *kernel.backward(out, q, k, v, out, finite, Scoring(causal, 0.25, mask))

    if torch.cuda.is_available():
        found = results(by_name[name], *tensors("cuda"))
        expected = results(by_name["plain"], *tensors("cuda"))
        for a, b in zip(found, expected, strict=True):
            error = (a.double() - b.double()).abs().max() / b.abs().max()
            assert error <= (2e-2 if dtype == torch.bfloat16 else 2e-5)
    else:
        with FakeTensorMode():
            q, k, v = (torch.empty_like(part, device="cuda") for part in tensors("cpu"))
            out, lse, dq, dk, dv = results(by_name[name], q, k, v)
            assert lse.shape == q.shape[:3]
            assert (out.shape, dq.shape) == (q.shape, q.shape)
            assert (dk.shape, dv.shape) == (k.shape, v.shape)
