"""Wrong edits of the library that verify was not developed with; see docs/verify.md.

    python tests/mutants/unseen.py [NAME ...]

`says` is what a right first sentence must contain. The list was complete before its first run.
"""

from __future__ import annotations

import sys

from harness import Mutant, judge
from mutants import (
    CP,
    CP_EP,
    DDP,
    DDP_FILE,
    DISPATCH,
    EP,
    FSDP,
    FSDP_FILE,
    HSDP,
    LLAMA3,
    OPTIMIZER,
    PIPELINE,
    PP,
    RING,
    SAMPLER,
    STEP,
    STYLES,
    TP,
    also,
    mutant,
)

GPT2 = {"model": {"name": "gpt2", "flavor": "tiny", "n_layers": 2}, "training": {"seq_len": 32}}
NORM = "titanlite/training/gradient_norm.py"
COPIES = "titanlite/parallelize/pipeline_parallel/stage_copies.py"
EXPERT_LOADS = "titanlite/modules/experts/balancer.py"
FLOAT8 = "titanlite/parallelize/float8/linear.py"
VALIDATES = {"validation": {"enable": True, "local_batch_size": 4}}
ROWWISE = {
    "model": {"converters": ["quantize.linear.float8"]},
    "quantize.linear.float8": {"recipe_name": "rowwise", "emulate": True},
}

UNSEEN: list[Mutant] = [
    mutant(
        "each rank adds the bias before the reduce-scatter",
        "TP",
        also(TP, **GPT2),
        r"attention.wo .*bias 2 times",
        STYLES,
        (
            "                partial = _product(module, x, weight)\n",
            "                partial = _product(module, x, weight)\n"
            "                if module.bias is not None:\n"
            "                    partial = partial + _local(module.bias)\n",
        ),
        (
            "            return output if module.bias is None else output + _local(module.bias, Partial())",
            "            return output",
        ),
    ),
    mutant(
        "ranks look up each other's part of the sequence",
        "TP",
        TP,
        r"embeddings.tok_emb is the first module",
        STYLES,
        (
            "own = indices.chunk(device_mesh.size(), dim=self.dim)[device_mesh.get_local_rank()]",
            "own = indices.chunk(device_mesh.size(), dim=self.dim)[-1 - device_mesh.get_local_rank()]",
        ),
    ),
    mutant(
        "a row of the vocabulary is looked up on two ranks",
        "TP",
        LLAMA3,
        r"tok_embeddings is the first module",
        STYLES,
        (
            "        first = device_mesh.get_local_rank() * rows\n",
            "        first = device_mesh.get_local_rank() * (rows - 1)\n",
        ),
    ),
    mutant(
        "the norm on shards has another eps",
        "SP",
        TP,
        r"layers.0.attention_norm is the first module",
        STYLES,
        (
            "            return F.rms_norm(x, module.normalized_shape, weight, module.eps)",
            "            return F.rms_norm(x, module.normalized_shape, weight)",
        ),
    ),
    mutant(
        "two layers with one input have each other's output",
        "TP",
        TP,
        r"layers.0.feed_forward.w1 is the first module",
        STYLES,
        (
            "                products = _products(layers, gather(shard))\n",
            "                products = _products(layers, gather(shard))\n"
            "                if len(products) == 2:\n"
            "                    products = products[::-1]\n",
        ),
    ),
    mutant(
        "ring attention forgets that it is causal",
        "CP",
        CP,
        r"layers.0.attention.inner is the first module .* on every rank",
        RING,
        (
            "        self.layout = layout\n        self.rotate_method = rotate_method\n",
            "        self.layout = layout\n        self.is_causal = False\n"
            "        self.rotate_method = rotate_method\n",
        ),
    ),
    mutant(
        "a gradient between stages is doubled",
        "PP",
        PP,
        r"pp 0\) are 2 times",
        PIPELINE,
        ("        return gradient.contiguous()\n", "        return gradient.contiguous() * 2\n"),
    ),
    mutant(
        "the sum of a tied weight's gradients reaches one stage",
        "PP",
        also(PP, **GPT2),
        r"tok_embeddings.weight is correct on rank 0.*wrong on rank 1",
        COPIES,
        (
            "                total.copy_(self._sum_over_ranks(weight.places, total))",
            "                summed = self._sum_over_ranks(weight.places, total.clone())\n"
            "                if weight.is_counted:\n"
            "                    total.copy_(summed)",
        ),
    ),
    mutant(
        "the last stage runs its blocks backwards",
        "PP",
        also(PP, model={"num_layers": 4}),
        r"runs before it, but after it on one process",
        PIPELINE,
        (
            "        parts.append(part)\n    return parts",
            "        parts.append(part)\n    blocks = parts[-1].layers._modules\n"
            "    for key in list(blocks)[::-1]:\n        blocks[key] = blocks.pop(key)\n"
            "    return parts",
        ),
    ),
    mutant(
        "units stay gathered after the backward pass",
        "FSDP",
        FSDP,
        r"stale weights",
        FSDP_FILE,
        (
            "            ignored_params=scalars,\n        )\n",
            "            ignored_params=scalars,\n        )\n"
            "        for part in module if isinstance(module, list) else [module]:\n"
            "            if isinstance(part, FSDPModule):\n"
            "                part.set_reshard_after_backward(False)\n",
        ),
    ),
    mutant(
        "shards are never summed over replicas",
        "HSDP",
        HSDP,
        r"gradients.*dp_replicate",
        STEP,
        (
            "            model.set_requires_all_reduce(enabled)",
            "            model.set_requires_all_reduce(False)",
        ),
    ),
    mutant(
        "half of a bucket is reduced",
        "DDP",
        DDP,
        r"gradients.*(data-parallel rank|sum over dp_replicate)",
        DDP_FILE,
        (
            "    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)\n"
            "    return work.get_future().then(lambda future: future.value()[0])\n",
            "    dist.all_reduce(bucket.buffer().chunk(2)[0], group=group)\n"
            "    done: torch.futures.Future[Tensor] = torch.futures.Future()\n"
            "    done.set_result(bucket.buffer())\n    return done\n",
        ),
    ),
    mutant(
        "clipping divides by the squared norm",
        "clipping",
        also(DDP, training={"max_norm": 0.1}),
        r"clipping is wrong",
        STEP,
        (
            "        clip_gradients(self.parameters, norm, self.max_norm)\n",
            "        clip_gradients(self.parameters, norm * norm, self.max_norm)\n",
        ),
    ),
    mutant(
        "momentum is dropped",
        "optimizer",
        also(DDP, optimizer={"name": "SGD", "momentum": 0.9}),
        r"momentum is 0",
        OPTIMIZER,
        ("SGD(param_groups, momentum=momentum, **options)", "SGD(param_groups, **options)"),
    ),
    mutant(
        "busy experts become more attractive",
        "experts",
        EP,
        r"balancing bias of layers.1.moe does not follow",
        EXPERT_LOADS,
        (
            "change = layer.expert_bias.new_tensor(signs) * layer.bias_step",
            "change = layer.expert_bias.new_tensor(signs) * -layer.bias_step",
        ),
    ),
    mutant(
        "the load of the first layer is that of all",
        "experts",
        EP,
        r"counts .* its router",
        EXPERT_LOADS,
        (
            "                row.copy_(tally.counts)\n",
            "                row.copy_(next(iter(self.layers.values())).tally.counts)\n",
        ),
    ),
    mutant(
        "the mean of the biases drifts",
        "experts",
        CP_EP,
        r"balancing bias of layers.1.moe does not follow",
        EXPERT_LOADS,
        (
            "            layer.expert_bias += change - change.mean()",
            "            layer.expert_bias += change",
        ),
    ),
    mutant(
        "gradients are halved on their way back to a token's rank",
        "EP",
        EP,
        r"experts.*0.5 times|backward.*moe",
        DISPATCH,
        (
            "_all_to_all(gradient, ctx.sent, ctx.received, ctx.name)",
            "_all_to_all(gradient * 0.5, ctx.sent, ctx.received, ctx.name)",
        ),
    ),
    mutant(
        "in evaluation a rank attends to its own tokens only",
        "CP",
        also(CP, **VALIDATES),
        r"first batch, layers.0.attention.inner",
        RING,
        (
            "        if attn_mask is not None or dropout_p:\n",
            "        if not self.training:\n"
            "            return torch.nn.functional.scaled_dot_product_attention(\n"
            "                q, k, v, is_causal=True, enable_gqa=True\n            )\n"
            "        if attn_mask is not None or dropout_p:\n",
        ),
    ),
    mutant(
        "every rank evaluates the first samples",
        "validation",
        also(FSDP, **VALIDATES),
        r"validation.*(samples|sequences|reads)",
        SAMPLER,
        (
            "        first = start + dp_rank * local_batch_size\n",
            "        first = start + 0 * dp_rank * local_batch_size\n",
        ),
    ),
    mutant(
        "ranks of tp draw the masks of the first tokens",
        "SP",
        also(TP, model={"dropout": 0.1}),
        r"embedding_dropout is the first module",
        STYLES,
        (
            "token_numbers = token_numbers.chunk(num_ranks, dim=self.dim)[rank]",
            "token_numbers = token_numbers.chunk(num_ranks, dim=self.dim)[0 * rank]",
        ),
    ),
    mutant(
        "an amax per token is that of a rank's features",
        "float8",
        also(TP, **ROWWISE),
        r"layers.0.attention.wo is the first float8 layer whose scales",
        FLOAT8,
        (
            "        return self.groups.features if self.cut == which else ()",
            "        return () if self.cut == which else ()",
        ),
    ),
    mutant(
        "partial gradients are reduced twice",
        "SP",
        TP,
        r"2 times .*degree of tp",
        NORM,
        (
            "        dist.all_reduce(joined, group=mesh.get_group(axis))\n",
            "        dist.all_reduce(joined, group=mesh.get_group(axis))\n"
            "        dist.all_reduce(joined, group=mesh.get_group(axis))\n",
        ),
    ),
    mutant(
        "the fortieth product of a process is wrong",
        "TP",
        TP,
        r"run again",
        STYLES,
        (
            "                partial = _product(module, x, weight)\n",
            "                partial = _product(module, x, weight)\n"
            "                CALLS.append(1)\n"
            "                if 16 < len(CALLS) < 24:\n                    partial = partial * 1.1\n",
        ),
        (
            "class RingStyle(ParallelStyle):",
            "CALLS: list[int] = []\n\n\nclass RingStyle(ParallelStyle):",
        ),
        steps=10,
    ),
    mutant(
        "a rank goes on by its own number of samples",
        "data",
        FSDP,
        r"data depend on the plan",
        SAMPLER,
        (
            "        self.state += self._global_batch_size\n",
            "        self.state += self._rank_batch_size\n",
        ),
    ),
]


def main(names: list[str]) -> int:
    """Print for each edit whether verify finds it, and what it says first."""
    for one in UNSEEN:
        if not names or one.name in names:
            verdict = judge(one)
            word = "right" if verdict.is_named(one) else "found" if verdict.is_found else "MISSED"
            print(f"{word:6}  {one.kind:10}  {one.name}: {verdict.cause}", flush=True)
            for more in verdict.findings[1:]:
                print(f"                    also: {more}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
