"""Bugs that were met in training code, each as one patch that a rank puts in force.

Each makes a context manager, and is taken to the ranks of a plan by `Verifier.verify(patch=...)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from titanlite.checkpoint import state
from titanlite.data.sampler import GlobalBatchSampler, read_batch
from titanlite.job import Job
from titanlite.models.image_transformer.model import ImageEmbeddings
from titanlite.models.llama3.model import RotaryEmbedding
from titanlite.modules.attention.layout import HeadTail
from titanlite.modules.batch import Batch
from titanlite.modules.experts import Balancer, ExpertLayer, balance, balancer, layer
from titanlite.modules.shards import local_part
from titanlite.parallelize.activation_checkpoint import apply as ac
from titanlite.parallelize.async_tensor_parallel import ring_product
from titanlite.parallelize.async_tensor_parallel.ring_product import ChunkRing
from titanlite.parallelize.compile import apply as compiling
from titanlite.parallelize.context_parallel import ring
from titanlite.parallelize.context_parallel.ring import RingAttention
from titanlite.parallelize.ddp import apply as ddp
from titanlite.parallelize.expert_parallel import apply as expert_parallel
from titanlite.parallelize.float8 import linear as float8_linear
from titanlite.parallelize.float8.torchao import find_recipe
from titanlite.parallelize.fsdp import apply as fsdp
from titanlite.parallelize.pipeline_parallel.apply import PipelineRunner, _Stage
from titanlite.parallelize.pipeline_parallel.stage_copies import StageCopies
from titanlite.parallelize.tensor_parallel import styles
from titanlite.training import initial_weights, loss, norm, step
from titanlite.training.norm import _like
from titanlite.training.step import Trainer


def reduced_twice() -> AbstractContextManager[Any]:
    """DDP's hook sums gradients that were summed already."""
    once = ddp._sum_bucket

    def twice(group, bucket):
        dist.all_reduce(bucket.buffer(), group=group)
        return once(group, bucket)

    return patch.object(ddp, "_sum_bucket", twice)


def larger_by_the_token_count() -> AbstractContextManager[Any]:
    """A pipeline's loss is a sum over tokens that nobody divides."""
    step = PipelineRunner.step

    def undivided(self, batch, loss_function, **rest):
        def sum_of_losses(logits, microbatch):
            return loss_function(logits, microbatch) * NUM_TARGETS

        step(self, batch, sum_of_losses, **rest)

    return patch.object(PipelineRunner, "step", undivided)


NUM_TARGETS = sum(63 - 64 * image // 16 for image in range(8))


def shown_loss_divided_by_cp() -> AbstractContextManager[Any]:
    compute = Trainer._compute_gradients

    def divided(self, batches):
        loss, num_targets = compute(self, batches)
        return loss / self.world_mesh["cp"].size(), num_targets

    return patch.object(Trainer, "_compute_gradients", divided)


def mean_of_means() -> AbstractContextManager[Any]:
    """Each rank divides by the number of its own targets, and then by the number of ranks."""

    def count(self, batches):
        return sum(int(batch.count_targets()) for batch in batches) * dist.get_world_size()

    return patch.object(Trainer, "_count_targets", count)


def shards_start_alike() -> AbstractContextManager[Any]:
    """Every rank draws as if its shard were the first."""

    def first_of(full, like):
        part = local_part(like)
        return full[tuple(slice(0, size) for size in part.shape)]

    return patch.object(initial_weights, "shard_of", first_of)


def pending_input_to_a_compiled_block() -> AbstractContextManager[Any]:
    return patch.object(compiling, "_wait_for_inputs", lambda module, inputs: inputs)


def waiting_cuts_the_way_back() -> AbstractContextManager[Any]:
    """What a compiled block waits for comes back without its gradient's history."""
    return patch.object(compiling._Wait, "apply", lambda tensor: tensor.wait())


def jumps_in_positions_start_documents() -> AbstractContextManager[Any]:
    """Attention is masked where positions jump, as by transformers' mask for packed documents.

    In the headtail layout each rank's two chunks then take each other, and all chunks of other
    ranks, for other documents.
    """

    def within_chunks(self, q, k, v, *_, **__):
        chunks = zip(*(tensor.chunk(2, dim=2) for tensor in (q, k, v)), strict=True)
        outputs = [F.scaled_dot_product_attention(*chunk, is_causal=True) for chunk in chunks]
        return torch.cat(outputs, dim=2)

    return patch.object(RingAttention, "forward", within_chunks)


def one_counter_for_both_passes() -> AbstractContextManager[Any]:
    """Selective checkpointing counts on where the forward pass ended when it recomputes.

    PyTorch 2.13 remembers what it saved. Before, it asked the policy again, and took the next of an
    operator's saved outputs, as these two modes do.
    """

    class Mode(TorchDispatchMode):
        def __init__(self, counter, saved, is_recompute):
            super().__init__()
            self.counter, self.saved, self.is_recompute = counter, saved, is_recompute

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is not ac.aten.mm.default:
                return operator(*args, **(kwargs or {}))
            self.counter["mm"] += 1
            keeps = self.counter["mm"] % 2 == 1
            if keeps and self.is_recompute and self.saved:
                return self.saved.pop(0)
            out = operator(*args, **(kwargs or {}))
            if keeps and not self.is_recompute:
                self.saved.append(tree_map_only(type(out), lambda x: x.detach(), out))
            return out

    def contexts(shapes, tally):
        counter, saved = {"mm": 0}, []
        return Mode(counter, saved, False), Mode(counter, saved, True)

    return patch.object(ac, "_selective_contexts", contexts)


def norms_not_reduced() -> AbstractContextManager[Any]:
    """Under sequence parallelism each rank keeps its own share of the norms' gradients."""

    def keep_own(parameters):
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad is not local_part(parameter.grad):
                parameter.grad = _like(parameter, local_part(parameter.grad))

    return patch.object(step, "reduce_partial_gradients", keep_own)


def wrong_output_layout() -> AbstractContextManager[Any]:
    """The plain model's w2 leaves its sum to be made by nobody."""
    import plain_model.plan

    (right,) = plain_model.plan.PLANS.values()
    wrong = {"layers.*.w2": RowwiseParallel(output_layouts=Partial())}
    return patch.dict(right.tensor_parallel, wrong)


def positions_from_zero() -> AbstractContextManager[Any]:
    """Each rank of cp counts its tokens from 0."""
    whole = Job._own_part

    def counted_from_zero(self, batch):
        batch = whole(self, batch)
        return batch.replace(positions=torch.arange(len(batch.positions)))

    return patch.object(Job, "_own_part", counted_from_zero)


def positions_for_the_first_stage_alone() -> AbstractContextManager[Any]:
    """The stages of a pipeline after the first count their tokens by themselves."""
    forward = _Stage.forward_one_chunk

    def without_fields(self, chunk, args, kwargs=None, **rest):
        return forward(self, chunk, args, kwargs if self.is_first else {}, **rest)

    return patch.object(_Stage, "forward_one_chunk", without_fields)


def positions_from_zero_in_the_model() -> AbstractContextManager[Any]:
    """The embeddings do not look at the positions they are given."""
    whole = ImageEmbeddings.forward

    def forward(self, tokens, device=None, positions=None):
        return whole(self, tokens, device)

    return patch.object(ImageEmbeddings, "forward", forward)


def rotary_angles_from_zero() -> AbstractContextManager[Any]:
    """Rotary embeddings count a rank's tokens from 0."""
    rotate = RotaryEmbedding.forward

    def from_zero(self, q, k, positions):
        return rotate(self, q, k, torch.arange(positions.size(-1), device=positions.device))

    return patch.object(RotaryEmbedding, "forward", from_zero)


def documents_forgotten_on_a_hop() -> AbstractContextManager[Any]:
    """Ring attention has the mask of documents for a rank's own keys, and for no others."""
    parts = ring._parts

    def own_documents_only(rotation, key_rank, q, documents, *scoring):
        own = key_rank == rotation.group.rank()
        return parts(rotation, key_rank, q, documents if own else None, *scoring)

    return patch.object(ring, "_parts", own_documents_only)


def padding_counts_as_classes() -> AbstractContextManager[Any]:
    """Loss parallelism pads the vocabulary to equal shards, which the softmax takes as classes."""
    unpadded = loss.token_loss_sum

    def padded(logits, targets, **keys):
        if isinstance(logits, DTensor):
            missing = -logits.size(-1) % logits.device_mesh.size()
            logits = F.pad(logits.full_tensor(), (0, missing))
        return unpadded(logits, targets, **keys)

    return patch.object(loss, "token_loss_sum", padded)


def norm_counts_replicas() -> AbstractContextManager[Any]:
    return patch.object(norm, "_is_counted_here", lambda parameter, mesh: True)


def tied_gradients_not_summed() -> AbstractContextManager[Any]:
    """Each stage keeps the gradient of its own use of a tied weight."""
    return patch.object(StageCopies, "sum_gradients", lambda self: None)


def norm_counts_copies() -> AbstractContextManager[Any]:
    """Every stage that has a copy of a tied weight counts its gradient."""
    return patch.object(StageCopies, "repeated", lambda self: [])


def norm_misses_strided_shards() -> AbstractContextManager[Any]:
    """`Placement.is_shard()` is false for FSDP2's cut of what tensor parallelism has cut."""
    return patch.object(norm, "is_sharded", lambda placement: placement.is_shard())


def data_by_rank() -> AbstractContextManager[Any]:
    """Each data-parallel rank reads on from its own place, by its own batch."""

    def draw(self, whole):
        own = whole // self._dp_degree
        first = self.state // whole * own + self._dp_rank
        self.state += whole
        return [
            read_batch(self._dataset, range(start, start + self._local_batch_size), {})
            for start in range(first, first + own, self._local_batch_size)
        ]

    return patch.object(GlobalBatchSampler, "draw", draw)


def last_microbatch_dropped() -> AbstractContextManager[Any]:
    """The first stage forgets the gradients of the last microbatch."""
    backward = _Stage.backward_one_chunk

    def forgetful(self, chunk, *args, **kwargs):
        last = self.is_first and chunk == 3
        parameters = list(self.submod.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        result = backward(self, chunk, *args, **kwargs)
        if last:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
        return result

    return patch.object(_Stage, "backward_one_chunk", forgetful)


def ring_skips_a_block() -> AbstractContextManager[Any]:
    """Rank 1 leaves out the keys of the last rank that it meets, rank 0."""
    tiles = HeadTail.tiles

    def all_but_one(self, query_rank, key_rank, n, causal):
        skipped = (query_rank, key_rank) == (1, 0)
        return [] if skipped else tiles(self, query_rank, key_rank, n, causal)

    return patch.object(HeadTail, "tiles", all_but_one)


def replicas_drift() -> AbstractContextManager[Any]:
    """From step 2 on one rank's optimizer takes a step of another size."""
    update = Trainer._update

    def drift(self, norm):
        if dist.get_rank() == 1 and self.scheduler.last_epoch == 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.5
        return update(self, norm)

    return patch.object(Trainer, "_update", drift)


def halved_on_one_rank() -> AbstractContextManager[Any]:
    """One replica scales its gradients once more than the others."""
    compute = Trainer._compute_gradients

    def halved(self, batches):
        found = compute(self, batches)
        if dist.get_rank() == 1:
            for part in self.parts:
                for parameter in part.parameters():
                    parameter.grad.mul_(0.5)
        return found

    return patch.object(Trainer, "_compute_gradients", halved)


def input_gradient_not_reduced() -> AbstractContextManager[Any]:
    """A product with a part of the weight, by hand: each rank's gradient of its input is a share.

    The commonest mistake of tensor parallelism written without DTensor.
    """
    from plain_model.model import Block

    def forward(self, x, positions):
        seen = x.cumsum(1) / (positions + 1)[None, :, None]
        return x + self.w2(F.gelu(F.linear(self.norm(x + seen), self.w1.weight.to_local())))

    return patch.object(Block, "forward", forward)


def larger_between_modules() -> AbstractContextManager[Any]:
    """The block's own code scales what it gives to its last module."""
    from plain_model.model import Block

    def forward(self, x, positions):
        seen = x.cumsum(1) / (positions + 1)[None, :, None]
        return x + self.w2(1.5 * F.gelu(self.w1(self.norm(x + seen))))

    return patch.object(Block, "forward", forward)


def detached_between_modules() -> AbstractContextManager[Any]:
    """The block's own code cuts off the backward pass."""
    from plain_model.model import Block

    def forward(self, x, positions):
        seen = x.cumsum(1) / (positions + 1)[None, :, None]
        return x + self.w2(F.gelu(self.w1(self.norm(x + seen).detach())))

    return patch.object(Block, "forward", forward)


def masks_of_the_first_tokens() -> AbstractContextManager[Any]:
    """A rank of cp draws dropout's masks as if it held the first tokens of each sequence."""
    shard = Batch.shard

    def first(self, layout, rank):
        part = shard(self, layout, rank)
        return part.replace(token_numbers=self["token_numbers"][:, : part.tokens.size(1)])

    return patch.object(Batch, "shard", first)


def optimizer_state_forgotten() -> AbstractContextManager[Any]:
    """A checkpoint holds the weights alone, and says that it holds all."""
    return patch.object(state, "optimizer_pieces", lambda job: {})


def reduced_in_bfloat16() -> AbstractContextManager[Any]:
    """FSDP2 reduces gradients in the dtype that it computes in."""
    shard = fsdp.fully_shard

    def low(module, *, mp_policy, **options):
        return shard(module, mp_policy=replace(mp_policy, reduce_dtype=torch.bfloat16), **options)

    return patch.object(fsdp, "fully_shard", low)


def ring_counts_up() -> AbstractContextManager[Any]:
    """A ring's gather puts a chunk where the one of the rank on the other side belongs.

    On two ranks those are the same.
    """
    return patch.object(ChunkRing, "gathered", lambda self, step: (self.rank + step) % self.size)


def ring_leaves_out_a_product() -> AbstractContextManager[Any]:
    """Rank 1 does not add its own product to the sum that has come to it."""
    add = ring_product.add

    def but_on_one_rank(total, product):
        if dist.get_rank() != 1:
            add(total, product)

    return patch.object(ring_product, "add", but_on_one_rank)


def amax_of_own_tokens() -> AbstractContextManager[Any]:
    """Each rank scales what it casts to float8 by its own largest magnitude."""

    def local(amaxes):
        return [amax for amax, _ in amaxes]

    return patch.object(float8_linear, "reduce_max", local)


def rowwise_cast_tensorwise() -> AbstractContextManager[Any]:
    """A tensor-parallel style multiplies every float8 layer by the tensorwise recipe."""
    product = styles._product

    def tensorwise(layer, x, weight):
        layer.recipe = find_recipe("tensorwise")
        return product(layer, x, weight)

    return patch.object(styles, "_product", tensorwise)


def style_without_float8() -> AbstractContextManager[Any]:
    """A tensor-parallel style multiplies by itself, in full precision."""
    return patch.object(styles, "_product", lambda layer, x, weight: F.linear(x, weight))


def shared_experts_gradient_not_reduced() -> AbstractContextManager[Any]:
    """TorchTitan #4054: below the experts each rank of tp has its own share of the gradient.

    The input of the shared experts is gathered, and its gradient taken for a replicated one.
    """
    forward, to_local = ExpertLayer.forward, DTensor.to_local
    inside = []

    def in_experts(self, x, positions):
        inside.append(True)
        try:
            return forward(self, x, positions)
        finally:
            inside.pop()

    def as_it_is(self, *, grad_placements=None):
        if inside and self.ndim == 3 and grad_placements == [Partial()]:
            grad_placements = None
        return to_local(self, grad_placements=grad_placements)

    return _both(
        patch.object(ExpertLayer, "forward", in_experts),
        patch.object(DTensor, "to_local", as_it_is),
    )


def bias_added_before_the_sum() -> AbstractContextManager[Any]:
    """TorchTitan #4245: each rank of tp adds the bias of the output to its part of the sum.

    The sum then has the bias as many times as there are ranks.
    """
    product = styles._product

    def biased(layer, x, weight):
        partial = product(layer, x, weight)
        # The first rank's is added after the sum.
        if layer.bias is None or dist.get_rank() == 0:
            return partial
        return partial + layer.bias.to_local()

    return patch.object(styles, "_product", biased)


def _scaled_expert_gradients(factor: float) -> AbstractContextManager[Any]:
    swiglu = layer.swiglu

    def scaled(x, w1, w2, w3, *rest, **others):
        weights = (_scale_gradient(w, factor) for w in (w1, w2, w3))
        return swiglu(x, *weights, *rest, **others)

    return patch.object(layer, "swiglu", scaled)


def expert_gradients_averaged_over_their_shards() -> AbstractContextManager[Any]:
    """FSDP divides the gradients of experts by the number of ranks of their own mesh, efsdp."""
    return _scaled_expert_gradients(0.5)


def expert_gradients_doubled() -> AbstractContextManager[Any]:
    """PyTorch #160285: ep's gradients are already sums over its ranks, and not divided again.

    TorchTitan #1551 and Megatron-LM #5956 correct the divisor.
    """
    return _scaled_expert_gradients(2.0)


def experts_left_out_of_the_norm() -> AbstractContextManager[Any]:
    """Megatron-LM #5916: with ep and tp, only the first rank of tp counts its experts."""
    axes_of = norm.axes_of

    def as_replicated_over_tp(name):
        axes = axes_of(name)
        return tuple(axis for axis in axes if axis != "tp") if len(axes) > 1 else axes

    return patch.object(norm, "axes_of", as_replicated_over_tp)


def sequence_loss_by_microbatch() -> AbstractContextManager[Any]:
    """Megatron-LM #5798: the auxiliary loss is a mean over the sequences of a microbatch."""
    whole = layer.sequence_loss

    def mean(scores, *rest):
        loss = whole(scores, *rest)
        return None if loss is None else loss / scores.size(1)

    return patch.object(layer, "sequence_loss", mean)


def counted_in_the_forward_pass() -> AbstractContextManager[Any]:
    """Tokens are counted where they are routed, which recomputation does again."""

    def observe(weights, chosen, num_experts, loss, tally, *_):
        tally.add(balance.count_slots(chosen.reshape(1, -1), num_experts)[0], None)
        return weights

    return patch.object(layer, "observe", observe)


def bias_updated_every_microbatch() -> AbstractContextManager[Any]:
    compute = Trainer._forward_backward

    def with_update(self, batch, num_targets, *, is_last):
        sums = compute(self, batch, num_targets, is_last=is_last)
        if not is_last:
            self.balancer.finish()
            self.balancer.update()
        return sums

    return patch.object(Trainer, "_forward_backward", with_update)


def counts_of_own_tokens() -> AbstractContextManager[Any]:
    """Every rank balances by the tokens that it routes itself."""
    finish = Balancer.finish

    def own(self):
        with patch.object(balancer.dist, "all_reduce"):
            finish(self)

    return patch.object(Balancer, "finish", own)


def shared_experts_reduced_twice() -> AbstractContextManager[Any]:
    """The output of the shared experts, complete on each rank of tp, is summed over tp."""

    def forward(self, x, positions):
        shared = self.shared_experts(x)
        total = shared.detach().clone()
        dist.all_reduce(total)
        return self._routed(x, positions=positions) + shared + (total - shared.detach())

    return patch.object(ExpertLayer, "forward", forward)


def wrong_offset_of_experts_on_one_rank() -> AbstractContextManager[Any]:
    """Rank 1 takes its second expert for its first."""
    swiglu = layer.swiglu

    def shifted(x, w1, w2, w3, *rest, **others):
        if dist.get_rank() == 1:
            w1, w2, w3 = (w.roll(1, 0) for w in (w1, w2, w3))
        return swiglu(x, w1, w2, w3, *rest, **others)

    return patch.object(layer, "swiglu", shifted)


def combined_in_another_order() -> AbstractContextManager[Any]:
    """What comes back from the experts is taken to be in the order of the tokens."""
    return patch.object(layer, "gather_back", lambda rows, order: rows)


def padded_rows_have_gradients() -> AbstractContextManager[Any]:
    """Each expert's rows are padded to a multiple of 8 by old values, which are not masked."""
    swiglu = layer.swiglu

    def padded(x, w1, w2, w3, counts, **rest):
        parts, kept, sizes = [], [], counts.tolist()
        for rows, size in zip(x.split(sizes), sizes, strict=True):
            more = -size % 8 if size else 0
            parts += [rows, rows[-1:].detach().expand(more, -1)]
            kept += [True] * size + [False] * more
        larger = [size + (-size % 8 if size else 0) for size in sizes]
        rest["sizes"] = larger
        out = swiglu(torch.cat(parts), w1, w2, w3, torch.tensor(larger), **rest)
        is_row = torch.tensor(kept, dtype=torch.bool)
        pad = out[~is_row].sum()
        return out[is_row] + (pad - pad.detach())

    return patch.object(layer, "swiglu", padded)


def router_gradient_not_reduced() -> AbstractContextManager[Any]:
    """TorchTitan #2387: each rank of tp updates its gate by the gradient of its own tokens."""
    return patch.object(expert_parallel, "Partial", Replicate)


def _scale_gradient(tensor, factor: float):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    return Scale.apply(tensor)


@contextmanager
def _both(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield
