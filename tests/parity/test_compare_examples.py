"""`titanlite.compare` on code of other libraries: Hugging Face's transformers and accelerate."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import titanlite

pytestmark = pytest.mark.slow


# transformers: Llama under its own tensor-parallel plan.


def save_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=24,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def llama_loss(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def token_batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(24, (4, 9), generator=generator) for _ in range(2)]


def norm_of(model, *, is_local: bool = False):
    """Clip to norm 1 over DTensors and plain tensors; with `is_local`, by this rank's own norm."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    cut = [g.to_local() for g in gradients if isinstance(g, DTensor) and g.placements[0].is_shard()]
    squares = sum((g**2).sum() for g in cut) if cut else torch.zeros(())
    if cut and not is_local:
        dist.all_reduce(squares)
    whole = [
        g.to_local() if isinstance(g, DTensor) else g
        for g in gradients
        if not (isinstance(g, DTensor) and g.placements[0].is_shard())
    ]
    norm = (squares + sum((g**2).sum() for g in whole)).sqrt()
    for gradient in [*cut, *whole]:
        gradient.mul_((1.0 / norm).clamp(max=1.0))
    return norm


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers needs it for a tp_plan
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)

    def reference():
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def parallel(mesh):
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_plan="auto", tp_size=2)
        return LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float64, distributed_config=config
        )

    def without_reduction(mesh):
        from transformers.distributed.tensor_parallel import RowwiseParallel

        def keep_partial(self, module, output, mesh):
            return output.to_local()

        RowwiseParallel.transform_output_post_forward = keep_partial
        return parallel(mesh)

    return reference, parallel, without_reduction


def compare_llama(reference, parallel, **options):
    return titanlite.compare(
        reference,
        parallel,
        batches=token_batches(),
        loss=llama_loss,
        ranks={"tp": 2},
        clip=options.pop("clip", norm_of),
        **options,
    )


def test_the_plan_of_llama_agrees(llama):
    reference, parallel, _ = llama
    found = compare_llama(reference, parallel).check()
    # Its norms compute in float32, so that more than 1e-6 cannot be asked for.
    assert any("LlamaRMSNorm" in name or "norm" in name for name in found.narrowed)


def test_a_sum_that_is_missing_in_llama_is_named(llama):
    reference, _, without_reduction = llama
    found = compare_llama(reference, without_reduction)
    assert "model.layers.0.self_attn.o_proj is the first module" in found.cause
    assert "Summed over tp, the output is correct: it is a Partial" in found.cause


def test_a_norm_of_own_shards_in_llama_is_named(llama):
    def clip(model):
        return norm_of(model, is_local=True)

    reference, parallel, _ = llama
    found = compare_llama(reference, parallel, clip=clip)
    assert found.cause.startswith("ranks have different gradient norms")
    assert "gradients sharded over tp are counted as if they were replicated" in "".join(
        found.findings
    )


# accelerate: a loop with gradient accumulation.


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.second = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def net_loss(model, batch):
    x, targets = batch
    return torch.nn.functional.cross_entropy(model(x), targets)


def vector_batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def with_accelerate():
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": "29500"}
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    return model, optimizer, accelerator


def loop(built, batch, entered, run_backward):
    model, _, accelerator = built
    losses = []
    for x, targets in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        with entered(accelerator, model):
            loss = net_loss(model, (x, targets))
            run_backward(accelerator, loss)
            losses.append(loss.detach())
    return torch.stack(losses).mean()


def accumulate(built, batch):
    """Two microbatches, each of which accelerate divides by their number."""
    return loop(built, batch, lambda a, model: a.accumulate(model), lambda a, x: a.backward(x))


def accumulate_undivided(built, batch):
    """The loop calls backward() itself, so nothing is divided by the number of microbatches."""
    return loop(built, batch, lambda a, model: a.accumulate(model), lambda _, x: x.backward())


def accumulate_without_sync(built, batch):
    """Every microbatch, the last one too, runs under no_sync()."""
    return loop(built, batch, lambda a, model: a.no_sync(model), lambda a, x: a.backward(x))


def compare_loop(step):
    pytest.importorskip("accelerate")
    return titanlite.compare(
        Net,
        with_accelerate,
        batches=vector_batches(),
        loss=net_loss,
        ranks={"dp": 2},
        split="dp",
        step=step,
        optimizer=sgd,
    )


def test_a_loop_of_accelerate_agrees():
    found = compare_loop(accumulate).check()
    assert found.losses == "mean"


def test_a_loop_that_does_not_divide_is_named():
    found = compare_loop(accumulate_undivided)
    assert "all 4 gradients are 2 times as large as on one process" in found.cause
    assert "the number of microbatches" in found.cause


def test_a_loop_that_never_reduces_is_named():
    found = compare_loop(accumulate_without_sync)
    assert "all 4 gradients are correct only after a sum over dp" in found.cause
