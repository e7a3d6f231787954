"""What the host knows of documents: through batches, microbatches and compiled code."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

from titanlite.modules.attention import dense, make_layout
from titanlite.modules.attention import documents as module
from titanlite.modules.attention.documents import note, noted, same_document
from titanlite.modules.batch import FieldDims, make_batch

LENGTHS = [[5, 1, 10], [16], [8, 8], [1, 15]]


def documents_of(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])


@torch.library.custom_op("titanlite_tests::of_documents", mutates_args=())
def of_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention to each of the sequences in a row, as a GPU's kernels compute it."""
    assert longest == starts.diff().max()
    parts = (x.split(starts.diff().tolist()) for x in (q, k, v))
    found = [
        scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in one), is_causal=True, enable_gqa=True
        )[0]
        for one in zip(*parts, strict=True)
    ]
    return torch.cat(found, 1).transpose(0, 1).contiguous()


@of_documents.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    return torch.empty_like(q)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has kernels for sequences of different lengths, for causal attention."""
    monkeypatch.setattr(module, "takes_rows", lambda device: True)

    def stand_in(q, k, v, starts, _, longest, __, dropout, is_causal, debug, scale):
        assert is_causal
        return (of_documents(q, k, v, starts, longest),)

    monkeypatch.setattr(dense, "flash_in_a_row", stand_in)


def check(attend, documents: Tensor) -> None:
    """Attention to the documents against a dense mask."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(documents), h, 16, 8, generator=generator) for h in (4, 2, 2))
    mask = same_document(documents, documents).tril()
    exact = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = attend(*(x.bfloat16() for x in (q, k, v)), documents=documents)
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=3e-2)


def test_documents_in_a_row(with_kernels) -> None:
    documents = documents_of(LENGTHS)
    check(dense.attend, documents)
    known = noted(documents)
    assert known.starts.tolist() == [0, 5, 6, 16, 32, 40, 48, 49, 64]
    assert known.longest == 16
    # Two documents of one number may attend to each other; a batch of views knows its rows.
    again = torch.tensor([[0] * 4 + [1] * 4 + [0] * 8])
    check(dense.attend, again)
    assert noted(again).starts is None
    assert noted(documents[2:]).starts.tolist() == [0, 8, 16, 17, 32]


def test_compiled_code_finds_the_documents(with_kernels) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(dense.attend, backend=counter, fullgraph=True)
    for lengths in (LENGTHS, LENGTHS[:1] * 4, [[4] * 4] * 4, [[2] * 8] * 4, [[16]] * 4):
        documents = documents_of(lengths)
        note(documents, documents.numpy()[None].copy())
        check(attend, documents)
        (graph,) = counter.graphs[-1:]
        assert "of_documents" in graph.code
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_a_batch_keeps_what_the_host_knows(tmp_path: Path) -> None:
    documents = documents_of(LENGTHS)
    more = {"documents": (documents, FieldDims(0, 1))}
    batch = make_batch(torch.zeros(4, 16, dtype=torch.int64), more=more)
    layout = make_layout("headtail", 2)
    own = batch.shard(layout, 1)
    expected = torch.stack([layout.shard(documents, 1, rank) for rank in (0, 1)])
    for part, numbers in ((own, expected), (own.rows(1, 3), expected[:, 1:3])):
        assert noted(part["documents"]).numbers.tolist() == numbers.tolist()
    assert noted(batch.tokens_to(4)["documents"]) is None
    # Files stay readable without this package.
    torch.save(own["documents"], tmp_path / "documents.pt")
    assert noted(torch.load(tmp_path / "documents.pt", weights_only=True)) is None
    assert noted(copy.deepcopy(own["documents"])) is None


def test_ranges_decide_what_meets() -> None:
    known = note(torch.zeros(1, 4), np.array([[[0, 0, 1, 1]], [[1, 1, 3, 3]]]))
    first, last, both = slice(0, 2), slice(2, 4), slice(0, 4)
    assert known.compare(0, last, 1, first) == (True, True)
    assert known.compare(0, first, 1, both) == (False, False)
    assert known.compare(0, both, 1, both) == (True, False)
