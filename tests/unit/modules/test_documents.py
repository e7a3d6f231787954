"""What the host knows of documents: through batches, microbatches and compiled code."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from flash import kernels_of_a_gpu
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

from titanlite.modules.attention import dense, make_layout
from titanlite.modules.attention.documents import note, noted, same_document
from titanlite.modules.attention.layout import Tile
from titanlite.modules.batch import FieldDims, make_batch

LENGTHS = [[5, 1, 10], [16], [8, 8], [1, 15]]


def documents_of(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])


def check(attend, documents: Tensor | None, window: int | None = None) -> None:
    """Attention to the documents, and its gradients, against a dense mask."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    inputs = [torch.randn(4, heads, 16, 8, **options) for heads in (4, 2, 2)]
    mask = torch.ones(16, 16, dtype=torch.bool).tril().triu(1 - (window or 16))
    if documents is not None:
        mask = mask & same_document(documents, documents)
    exact = scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    found = attend(*inputs, documents=documents, window=window)
    grads = (torch.autograd.grad(out.square().sum(), inputs) for out in (found, exact))
    for own, of_mask in zip((found, *next(grads)), (exact, *next(grads)), strict=True):
        torch.testing.assert_close(own, of_mask, rtol=0, atol=1e-13)


@kernels_of_a_gpu()
def test_documents_in_a_row() -> None:
    documents = documents_of(LENGTHS)
    with patch.object(dense, "_mask", None):
        for window in (None, 1, 3, 8):
            check(dense.attend, documents, window)
            check(dense.attend, None, window)
    known = noted(documents)
    starts, _, *longest = known.rows.bounds
    assert (starts.tolist(), longest) == ([0, 5, 6, 16, 32, 40, 48, 49, 64], [16, 16])
    # Two documents of one number may attend to each other; a batch of views knows its rows.
    again = torch.tensor([[0] * 4 + [1] * 4 + [0] * 8] * 4)
    check(dense.attend, again)
    assert noted(again).rows is None
    assert noted(documents[2:]).rows.bounds[0].tolist() == [0, 8, 16, 17, 32]


@kernels_of_a_gpu()
def test_compiled_code_finds_the_documents() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(dense.attend, backend=counter, fullgraph=True)
    for lengths in (LENGTHS, LENGTHS[:1] * 4, [[4] * 4] * 4, [[2] * 8] * 4, [[16]] * 4):
        documents = documents_of(lengths)
        note(documents, documents.numpy()[None].copy())
        check(attend, documents)
        (graph,) = counter.graphs[-1:]
        assert "_flash_attention_forward" in graph.code
    assert counter.frame_count <= 3
    check(attend, None, 3)
    assert "_flash_attention_forward" in counter.graphs[-1].code
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
    one = Tile(last, first, False)
    assert known.parts(0, 1, one) == ([one], None)
    assert known.parts(0, 1, Tile(first, both, False)) == ([], None)
    assert known.parts(0, 1, Tile(both, both, False)) == (
        [Tile(last, first, False, sequences=slice(0, 1))],
        None,
    )
    whole = Tile(both, both, True)
    assert known.parts(0, 0, whole) == ([whole], known)
    assert known.in_a_row(0, 0, whole).bounds[0].tolist() == [0, 2, 4]
    # Keys of a later document than their queries are not in order.
    assert known.in_a_row(0, 1, whole) is None
