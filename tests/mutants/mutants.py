"""Wrong edits of the library, of kinds that training frameworks have shipped.

Each is one edit or a few, with the job that exposes it and a pattern for the first sentence of
verify's diagnosis, which must name the module or axis and the kind of error. The edits affect both
the plan and its reference.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Edit, Mutant

Sections = dict[str, dict[str, Any]]


def plan(**degrees: Any) -> Sections:
    return {"parallelism": {"data_parallel_shard_degree": 1, **degrees}}


def also(sections: Sections, **more: dict[str, Any]) -> Sections:
    merged = {section: dict(keys) for section, keys in sections.items()}
    for section, keys in more.items():
        merged[section] = merged.get(section, {}) | keys
    return merged


ALONE = plan()
TP = plan(tensor_parallel_degree=2)
CP = plan(context_parallel_degree=2)
CP4 = plan(context_parallel_degree=4)
CP_GATHER = plan(context_parallel_degree=2, context_parallel_rotate_method="allgather")
CP_STRIPED = plan(context_parallel_degree=2, context_parallel_load_balancer="striped")
PP = plan(pipeline_parallel_degree=2)
LLAMA3 = also(
    TP, model={"name": "llama3", "flavor": "tiny", "n_layers": 2}, training={"seq_len": 32}
)
FSDP = plan(data_parallel_shard_degree=2)
EXPERTS: Sections = {
    "model": {"name": "llama3", "flavor": "moe_debug"},
    "training": {"seq_len": 32},
}
EP = also(plan(data_parallel_shard_degree=2, expert_parallel_degree=2), **EXPERTS)
TP_EP = also(
    plan(tensor_parallel_degree=2, expert_parallel_degree=2),
    **also(EXPERTS, training={"local_batch_size": 8}),
)
CP_EP = also(
    plan(context_parallel_degree=2, expert_parallel_degree=2),
    **also(EXPERTS, training={"local_batch_size": 8}),
)
DDP = plan(data_parallel_replicate_degree=2)
HSDP = also(
    plan(data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
    training={"local_batch_size": 2},
)
TP_FSDP = plan(tensor_parallel_degree=2, data_parallel_shard_degree=2)
PP_DDP = plan(pipeline_parallel_degree=2, data_parallel_replicate_degree=2)
ACCUMULATE = {"training": {"local_batch_size": 2}}
MIXED = also(FSDP, training={"mixed_precision_param": "bfloat16"})
FULL, OPERATORS = (
    {"activation_checkpoint": {"mode": "full"}},
    {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
)


def mutants(
    kind: str, job: Sections, file: str, *, steps: int = 3, options: tuple[str, ...] = ()
) -> Callable[..., list[Mutant]]:
    """Of edits of one file that one job exposes: (name, says, old text, new text, ...) each."""

    def made(*entries: tuple[str, ...]) -> list[Mutant]:
        found = []
        for name, says, *texts in entries:
            pairs = zip(texts[::2], texts[1::2], strict=True)
            edits = tuple(Edit(file, old, new) for old, new in pairs)
            found.append(Mutant(name, kind, edits, job, says, steps, options))
        return found

    return made


STEP, NORM = "titanlite/training/step.py", "titanlite/training/norm.py"
STYLES, PLAN = "titanlite/parallelize/tensor_parallel/styles.py", "models/image_transformer/plan.py"
RING, ROTATION = (
    "titanlite/parallelize/context_parallel/ring.py",
    "titanlite/parallelize/context_parallel/rotation.py",
)
LAYOUT, PIPELINE = (
    "titanlite/modules/attention/layout.py",
    "titanlite/parallelize/pipeline_parallel/apply.py",
)
FSDP_FILE, DDP_FILE = "titanlite/parallelize/fsdp/apply.py", "titanlite/parallelize/ddp/apply.py"
INITIALIZE, SAMPLER = "titanlite/training/initial_weights.py", "titanlite/data/sampler.py"
OPTIMIZER, DIMS = "titanlite/training/optimizer.py", "titanlite/mesh/parallel_dims.py"
AC, JOB = "titanlite/parallelize/activation_checkpoint/apply.py", "titanlite/job.py"
MODEL, BATCH = "models/image_transformer/model.py", "titanlite/modules/batch.py"
SHARDS, LOSS = "titanlite/modules/shards.py", "titanlite/training/loss.py"
DATA_PARALLEL_STEP = "titanlite/parallelize/fsdp/step.py"
EP_FILE, DISPATCH = (
    "titanlite/parallelize/expert_parallel/apply.py",
    "titanlite/modules/experts/dispatch.py",
)
BALANCE, BALANCER = "titanlite/modules/experts/balance.py", "titanlite/modules/experts/balancer.py"
EMA, AVERAGING = (
    {"weight_averaging": {"method": "ema", "decay": 0.9}},
    "titanlite/training/averaging.py",
)
MUON, MUON_FILE = {"optimizer": {"name": "Muon"}}, "titanlite/training/muon.py"
LORA = "titanlite/modules/lora.py"
LORA_TINY: Sections = {
    "model": {"name": "llama3", "flavor": "tiny", "n_layers": 2},
    "training": {"dataset": "pydoc", "seq_len": 32},
    "lora": {"rank": 4},
}
LORA_TP = also(TP, **LORA_TINY)
CAPACITY, EXPERT_LAYER = (
    "titanlite/modules/experts/capacity.py",
    "titanlite/modules/experts/layer.py",
)
KERNELS = "titanlite/modules/attention/kernels.py"
# Of transformers: a window in every second layer, and attention to sinks or soft-capped scores.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 17,
    "sliding_window": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attn_logit_softcapping": 0.5,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos")},
}


def of_transformers(config_class: str, sections: Sections) -> Sections:
    values = {f"values.{key}": value for key, value in SIZES.items()}
    model = {"name": "hf", "flavor": "config", "config_class": config_class, **values}
    return also(sections, model=model, training={"dataset": "digits"})


GPT_OSS_CP, GEMMA2_CP = (of_transformers(f"{name}Config", CP) for name in ("GptOss", "Gemma2"))
MIXTRAL_EP, MIXTRAL_TP_EP = (
    of_transformers("MixtralConfig", plan(**{f"{axis}_degree": 2}, expert_parallel_degree=2))
    for axis in ("data_parallel_shard", "tensor_parallel")
)

GROWING = {"training": {"batch_size_schedule": [[2, 16]]}}


def of_loss(name: str) -> Sections:
    """A job of own_jobs.py with a loss that titanlite has by name."""
    return {
        "experimental": {"custom_import": "own_jobs"},
        "model": {"name": name, "flavor": "default"},
        "training": {"dataset": name, "loss": name},
    }


GATHER, WEIGHTS = "_GatherSamples.apply(tensor, dim, group)", 'weights_BT=batch["weights"]'
TOTAL = "return self._total(everyone, whole)"
SQUARED = "    return errors.where(targets != IGNORE_INDEX, 0.0).sum()\n"
SUM_OF_WEIGHTS = (
    '    return batch["weights"].where(batch.targets != IGNORE_INDEX, 0.0).double().sum()\n'
)
LOSS_EDITS: dict[str, tuple[tuple[str, ...], ...]] = {
    "weighted_cross_entropy": (
        (
            "weights are divided by their sum on a rank",
            r"mean over the weights or targets of the samples",
            f"{WEIGHTS}, **used)",
            f"{WEIGHTS} / sum_of_weights(batch), **used)",
        ),
        (
            "weighted losses are divided by the number of targets",
            r"has targets of the weight \d+\.\d+ but divides its loss by",
            SUM_OF_WEIGHTS,
            "    return batch.count_targets()\n",
        ),
    ),
    "squared_error": (
        (
            "squared errors have the mean of a rank",
            r"mean over the samples",
            SQUARED,
            SQUARED.replace("sum", "mean"),
        ),
    ),
    "contrastive": (
        (
            "gradients of embeddings are a rank's own share",
            r"0\.5 times as large .* 1 over the degree of dp_",
            "return own * ctx.group.size(), None",
            "return own, None",
        ),
        (
            "embeddings are gathered without gradients",
            r"does not depend on one\.up\.weight|no gradient of the output of the model arrives",
            GATHER,
            GATHER.replace("tensor,", "tensor.detach(),"),
        ),
        (
            "negatives are those of one rank",
            r"a rank compares its samples only with its own",
            "for group in reversed(self._groups):",
            "for group in self._groups[:0]:",
            f"{TOTAL} / number",
            TOTAL,
        ),
    ),
}

MUTANTS = [
    # Accumulation: also wrong on one process.
    *mutants("accumulation", also(FSDP, **ACCUMULATE), STEP)(
        (
            "mean of means over the parts of a step",
            r"accumulation is wrong.*(mean of|wrong coefficients|times as large)",
            "                loss_function(call_model(self.parts[0], batch), batch).backward()",
            "                num_targets = self._count_targets([batch]) * self.count\n"
            "                loss_function(call_model(self.parts[0], batch), batch).backward()",
            "        for index, batch in enumerate(batches):\n",
            "        self.count = len(batches)\n        for index, batch in enumerate(batches):\n",
        ),
        (
            "gradients of a step are kept for the next one",
            r"from step 2 on|begins at step 2|accumulation is wrong|step 2",
            "        self.scheduler.step()\n        self.optimizer.zero_grad(set_to_none=True)\n"
            "        return lr\n\n    def _skip",
            "        self.scheduler.step()\n"
            "        if self.scheduler.last_epoch != 1 or not self.many:\n"
            "            self.optimizer.zero_grad(set_to_none=True)\n"
            "        return lr\n\n    def _skip",
            "        for index, batch in enumerate(batches):\n",
            "        self.many = len(batches) > 1\n        for index, batch in enumerate(batches):\n",
        ),
    ),
    *mutants("accumulation", also(DDP, **ACCUMULATE), STEP)(
        (
            "the last part of a step is forgotten",
            r"accumulation is wrong.*microbatch",
            "        self._require_gradients()\n",
            "            if is_last and len(batches) > 1 and self.stages is None:\n"
            "                for p, g in saved:\n                    p.grad = g\n"
            "            saved = [(p, None if p.grad is None else p.grad.clone())"
            " for p in self.parameters]\n"
            "        self._require_gradients()\n",
        ),
        (
            "gradients are exchanged with every part, and with those before once more",
            r"wrong coefficients|times as large",
            "                self._set_replica_sync(enabled=is_last)\n",
            "                self._set_replica_sync(enabled=True)\n",
        ),
    ),
    # Tensor and sequence parallelism.
    *mutants("TP", LLAMA3, STYLES)(
        (
            "a part of a table answers for tokens of the others",
            r"tok_embeddings is the first module",
            "            found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)\n",
            "",
        )
    ),
    *mutants("TP", TP, STYLES)(
        (
            "a row-wise output is not reduced",
            r"layers\.0\.(attention\.wo|attention|feed_forward)",
            "moved(partial, device_mesh, Partial(), Shard(self.scatter_dim))",
            "moved(partial, device_mesh, Replicate(), Shard(self.scatter_dim))",
        )
    ),
    *mutants("SP", TP, STYLES)(
        (
            "the gathered input's gradient is not reduced",
            r"backward pass.*(attention|feed_forward|norm)",
            "            return whole.to_local(grad_placements=[Partial()])",
            "            return whole.to_local(grad_placements=[Replicate()])",
        ),
        (
            "a norm's gradient stays each rank's own",
            r"norm.*tp",
            "            weight = _local(module.weight, Partial())\n            return F.rms_norm",
            "            weight = _local(module.weight)\n            return F.rms_norm",
        ),
        (
            "an embedding's gradient stays each rank's own",
            r"emb.*tp",
            "            return F.embedding(own, _local(module.weight, Partial()),"
            " module.padding_idx)",
            "            return F.embedding(own, _local(module.weight), module.padding_idx)",
        ),
        (
            "every rank looks up the first stretch",
            r"embeddings",
            "            own = indices.chunk(device_mesh.size(), dim=self.dim)"
            "[device_mesh.get_local_rank()]",
            "            own = indices.chunk(device_mesh.size(), dim=self.dim)[0]",
        ),
    ),
    *mutants("TP", TP, PLAN)(
        (
            "the output is scattered along the wrong dimension",
            r"wo|attention|does not run",
            '            "layers.*.attention.wo": RowwiseLocal(scatter_dim=0),',
            '            "layers.*.attention.wo": RowwiseLocal(scatter_dim=1),',
        ),
        (
            "wk and wv are left out of the plan",
            r"attention|does not run",
            '            "layers.*.attention": GatherColwise(0, "wq", "wk", "wv"),',
            '            "layers.*.attention": GatherColwise(0, "wq"),',
        ),
        (
            "w1 and w3 swap their outputs",
            r"feed_forward",
            '            "layers.*.feed_forward": GatherColwise(0, "w1", "w3"),',
            '            "layers.*.feed_forward": _Swapped(0, "w1", "w3"),',
            "PLANS = {\n",
            "class _Swapped(GatherColwise):\n    def _apply(self, module, mesh):\n"
            "        module = super()._apply(module, mesh)\n"
            "        module.w1.forward, module.w3.forward = module.w3.forward, module.w1.forward\n"
            "        return module\n\n\nPLANS = {\n",
        ),
        (
            "logits are taken for whole where they are sharded",
            r"output|loss|does not run",
            "                input_layouts=Shard(0), output_layouts=Shard(-1),"
            " use_local_output=False\n",
            "                input_layouts=Shard(0), output_layouts=Shard(-1),"
            " use_local_output=True\n",
        ),
        ("the final norm is given no style", r"norm", '            "norm": NormLocal(),\n', ""),
    ),
    *mutants("TP", TP, NORM)(
        (
            "pending sums are never made",
            r"still Partial|Partial.*tp",
            "            if now == Partial() and wanted == Replicate():\n",
            "            if True:\n                continue\n"
            "            if now == Partial() and wanted == Replicate():\n",
        )
    ),
    # Context parallelism.
    *mutants("CP", CP, LAYOUT)(
        (
            "the tail half sees its own head twice",
            r"attention\.inner",
            "            return [Tile(slice(0, n), slice(0, n // 2), False)]",
            "            return [Tile(slice(0, n), slice(0, n), False)]",
        ),
        (
            "keys of higher ranks are left out",
            r"attention\.inner",
            "        return [Tile(slice(n // 2, n), slice(0, n), False)]",
            "        return []",
        ),
    ),
    *mutants("CP", CP_STRIPED, LAYOUT)(
        (
            "stripes see the diagonal of the next rank",
            r"attention\.inner",
            "        return [Tile(slice(1, n), slice(0, n - 1), True)]",
            "        return [Tile(slice(0, n), slice(0, n), True)]",
        )
    ),
    *mutants("CP", CP4, ROTATION)(
        (
            "the gradient of travelled keys is dropped",
            r"backward pass.*attention\.inner",
            "                grad += travelled\n",
            "                pass\n",
        )
    ),
    *mutants("CP", CP, ROTATION)(
        (
            "the gradient that comes home is overwritten",
            r"backward pass.*attention\.inner",
            "                own_grad[:, :, returned_keys] += returned",
            "                own_grad[:, :, returned_keys] = returned",
        )
    ),
    *mutants("CP", CP, RING)(
        (
            "the softmax's denominator forgets a block",
            r"backward pass.*attention\.inner",
            "    lse.copy_(torch.logaddexp(lse, block_lse))",
            "    lse.copy_(torch.maximum(lse, block_lse))",
        ),
        (
            "blocks are averaged in place of merged",
            r"attention\.inner",
            "    share = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -torch.inf, 0)",
            "    share = torch.full_like(lse, 0.5).masked_fill_(lse == -torch.inf, 1)",
        ),
        (
            "the backward pass uses another scale",
            r"backward pass.*attention\.inner",
            "out[rows], lse[rows], how\n",
            "out[rows], lse[rows], how._replace(scale=scale * 1.5)\n",
        ),
    ),
    *mutants("CP", CP_GATHER, ROTATION)(
        (
            "gathered keys are one rank off",
            r"attention\.inner",
            "                yield key_rank, blocks[key_rank]",
            "                yield key_rank, blocks[rank]",
        ),
        (
            "gathered gradients are not summed over ranks",
            r"backward pass.*attention\.inner",
            "        _reduce_scatter(own_grad, grads.flatten(0, 1), group=self.group)\n",
            "        own_grad = grads[self.group.rank()]\n",
        ),
    ),
    *mutants("CP", CP, BATCH)(
        (
            "positions are not cut with the tokens",
            r"positions are wrong under context parallelism",
            "        return cut\n",
            "        own = self.positions[: len(self.positions) // layout.num_ranks]\n"
            "        return cut.replace(positions=own)\n",
        )
    ),
    *mutants("CP", CP, JOB)(
        (
            "targets are made after the sequence is cut",
            r"targets",
            "            batch = batch.shard(self.layout, self.dims.token_rank(self.world.rank))",
            "            from titanlite.modules.batch import make_targets\n\n"
            "            batch = batch.shard(self.layout, self.dims.token_rank(self.world.rank))\n"
            "            batch = batch.replace(targets=make_targets(batch.tokens))",
        )
    ),
    *mutants("CP", CP, DIMS)(
        (
            "the loss counts on one rank of cp alone",
            r"targets|cp|loss",
            '        same = set(axes_where(batch="same")) - set(axes_where(weights="stages"))',
            '        same = {"tp", "cp"}',
        )
    ),
    *mutants("CP", GPT_OSS_CP, RING)(
        (
            "a window has one key more",
            r"layers\.0\.self_attn\.titanlite_attention",
            "tile.within((window - 1 - first) // step)",
            "tile.within((window - first) // step)",
        ),
        (
            "the sinks count in each step of the ring",
            r"layers\.0\.self_attn\.titanlite_attention",
            "    rotation.forward(_pack(k, v), visit)\n    if sinks is not None:\n"
            "        merge(out, lse, torch",
            "    rotation.forward(_pack(k, v), visit)\n"
            "    for _ in range(rotation.group.size() if sinks is not None else 0):\n"
            "        merge(out, lse, torch",
        ),
    ),
    *mutants("CP", GEMMA2_CP, KERNELS)(
        (
            "scores are capped after they are masked",
            r"layers\.0\.self_attn\.titanlite_attention",
            "        if how.softcap is not None:\n"
            "            scores = torch.tanh(scores / how.softcap).mul_(how.softcap)\n",
            "",
            "~how.mask, -torch.inf)\n        return scores\n",
            "~how.mask, -torch.inf)\n        if how.softcap is not None:\n"
            "            scores = torch.tanh(scores / how.softcap).mul_(how.softcap)\n"
            "        return scores\n",
        )
    ),
    # Pipeline parallelism.
    *mutants("PP", PP, PIPELINE)(
        (
            "microbatches' gradients are averaged",
            r"number of microbatches|microbatch",
            '            "scale_grads": False,',
            '            "scale_grads": True,',
        ),
        (
            "the loss is that of the first microbatch's targets",
            r"loss|target|microbatch",
            "            microbatch = self._batch.rows(first, first + rows.numel())",
            "            microbatch = self._batch.rows(0, rows.numel())",
        ),
    ),
    *mutants("PP", PP, "titanlite/config/pipeline.py")(
        (
            "two stages have swapped blocks",
            r"layers|start|module|does not run",
            "    return tuple(tuple(names[a:b]) for a, b in itertools.pairwise(cuts))",
            "    parts = [list(names[a:b]) for a, b in itertools.pairwise(cuts)]\n"
            "    i, j = parts[0].index('layers.0'), parts[1].index('layers.1')\n"
            "    parts[0][i], parts[1][j] = parts[1][j], parts[0][i]\n"
            "    return tuple(map(tuple, parts))",
        )
    ),
    *mutants("PP", PP_DDP, PIPELINE)(
        (
            "replicas of stages exchange nothing",
            r"told not to reduce",
            "            stage.reduces_over_replicas = is_last",
            "            stage.reduces_over_replicas = False",
        )
    ),
    *mutants("PP", PP, STEP)(
        (
            "the loss of a pipeline is shown on the last rank alone",
            r"loss",
            "        loss = whole_sum / num_targets\n",
            "        loss = whole_sum / num_targets\n"
            "        if self.stages is not None and not loss_sum:\n            loss *= 0.5\n",
        )
    ),
    # Data parallelism, sharded and replicated.
    *mutants("FSDP", FSDP, FSDP_FILE)(
        (
            "FSDP averages",
            r"degree of dp_shard.*(averaged|divided)",
            "            module.set_gradient_divide_factor(1.0)\n",
            "            module.set_gradient_divide_factor(float(dp_mesh.size()))\n",
        ),
        (
            "FSDP's blocks average, the rest sums",
            r"layers.*(degree of dp_shard|0\.5 times)|0\.5 times.*dp_shard",
            "            module.set_gradient_divide_factor(1.0)\n",
            "            inside = module in blocks.values()\n"
            "            module.set_gradient_divide_factor(float(dp_mesh.size()) if inside else 1.0)\n",
        ),
    ),
    *mutants("DDP", DDP, DDP_FILE)(
        (
            "DDP averages",
            r"degree of dp_replicate.*(averaged|divided)",
            "    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)",
            "    bucket.buffer().div_(group.size())\n"
            "    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)",
        ),
        (
            "DDP's last bucket is not reduced",
            r"dp_replicate|rank",
            "    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)",
            "    tensor = bucket.buffer()\n"
            "    if bucket.is_last():\n        tensor = tensor.clone()\n"
            "    work = dist.all_reduce(tensor, group=group, async_op=True)",
            "    return work.get_future().then(lambda future: future.value()[0])",
            "    return work.get_future().then(lambda future: bucket.buffer())",
        ),
    ),
    *mutants("HSDP", HSDP, STEP)(
        (
            "replicas of shards never exchange",
            r"told not to reduce",
            "            model.set_requires_all_reduce(enabled)\n",
            "            model.set_requires_all_reduce(False)\n",
        )
    ),
    *mutants("data", FSDP, SAMPLER)(
        (
            "ranks read the same samples",
            r"data depend on the plan|read sequences",
            "        first = self.state + self._dp_rank * own\n",
            "        first = self.state\n",
        ),
        (
            "the sampler moves on by a rank's part",
            r"data depend on the plan|sequences",
            "        self.state += global_batch_size\n",
            "        self.state += own\n",
        ),
    ),
    *mutants("data", also(FSDP, **GROWING), SAMPLER)(
        (
            "the sampler moves on by another step's batch",
            r"step 3 does not train on samples 24 to 39",
            "        self.state += global_batch_size\n",
            "        self.state += 8\n",
        )
    ),
    *mutants("accumulation", also(FSDP, **GROWING), STEP)(
        (
            "each step divides by the targets of the first",
            r"step 2 has \d+ targets but divides its loss by \d+",
            "        return (int(total) if total.is_integer() else total) or 1\n",
            "        self._count = getattr(self, '_count', total)\n        return self._count\n",
        )
    ),
    # Losses by name.
    *(
        replace(one, name=f"{one.name} ({plan})")
        for plan, job in (("DDP", DDP), ("FSDP", FSDP))
        for of, edits in LOSS_EDITS.items()
        for one in mutants("loss", also(job, **of_loss(of)), LOSS)(*edits)
    ),
    *mutants("data", HSDP, DIMS)(
        (
            "data shards are numbered by the wrong axis",
            r"data depend on the plan",
            '        return self.place_on(axes_where(batch="samples"), rank)',
            '        return self.place_on(axes_where(batch="samples")[:1], rank)',
        )
    ),
    # Starting values.
    *mutants("start", FSDP, INITIALIZE)(
        (
            "shards are drawn by rank",
            r"start",
            "        local_part(parameter).copy_(shard_of(full, parameter))",
            "        local = local_part(parameter)\n"
            "        draw(name, local, generator_for(seed, name))\n"
            "        if full.shape == local.shape:\n            local.copy_(full)",
        )
    ),
    *mutants("start", DDP, INITIALIZE)(
        (
            "one table is drawn by the process's random state",
            r"start with different values|start",
            "        draw(name, full, generator_for(seed, name))",
            '        generator = torch.default_generator if "tok_emb" in name else'
            " generator_for(seed, name)\n"
            "        draw(name, full, generator)",
        )
    ),
    *mutants("start", also(TP, **FULL), INITIALIZE)(
        (
            "names with wrapper prefixes seed the draw",
            r"start",
            "        name = canonical_name(name)\n        name",
            "        name",
        )
    ),
    # Experts.
    *mutants("EP", EP, DISPATCH)(
        (
            "outputs return in the experts' order, not in that of arrival",
            r"layers.1.moe routes every token as one process does, .* layers.1.moe.experts differs",
            "        outputs = _Permute.apply(outputs, back, order)\n",
            "        outputs = _Permute.apply(outputs, order, back)\n",
        ),
        (
            "the gradients of the rows that an expert received are sorted the other way",
            r"layers\.\d\.moe\.experts.* returns? a wrong gradient|layers\.\d\.moe",
            "        outputs = compute(_Permute.apply(own, order, back), own_counts, sizes)\n",
            "        outputs = compute(_Permute.apply(own, order, order), own_counts, sizes)\n",
        ),
    ),
    *mutants(
        "EP",
        also(EP, model={"moe_sequence_loss_coeff": 0.0}, training={"local_batch_size": 2}),
        BALANCE,
    )(
        (
            "only the last microbatch is counted",
            r"tokens of each expert of layers.1.moe",
            "        self.counts = counts if self.counts is None else self.counts + counts\n",
            "        self.counts = counts\n",
        )
    ),
    *mutants("EP", EP, BALANCER)(
        (
            "tokens by expert are those of one rank",
            r"tokens of each expert of layers.1.moe.* sum the counts",
            "        dist.all_reduce(self._sums)\n",
            "        own = self._sums[:-2].clone()\n        dist.all_reduce(self._sums)\n"
            "        self._sums[:-2] = own\n",
        )
    ),
    *mutants("EP", CP_EP, BALANCE)(
        (
            "the auxiliary loss takes the fractions of a rank's own tokens",
            r"auxiliary loss",
            '        counts_BE = functional.wait_tensor(functional.all_reduce(counts_BE, "sum", name))\n',
            "        counts_BE = counts_BE * _resolve_process_group(GroupName(name)).size()\n",
        )
    ),
    *mutants("EP", EP, STEP)(
        (
            "the auxiliary loss is divided by a rank's own sequences",
            r"auxiliary loss is 2 times as large",
            "            self.balancer.start(self._count_sequences(batches))\n",
            "            self.balancer.start(sum(batch.num_sequences for batch in batches))\n",
        )
    ),
    *mutants("EP", TP_EP, EP_FILE)(
        (
            "the gate's gradient is that of a rank's tokens",
            r"gate.weight.* correct only after a sum over tp",
            "            return module.product(x, _local(module.weight, Partial()))\n",
            "            return module.product(x, _local(module.weight, Replicate()))\n",
        )
    ),
    # Three slots a token: 54 on each rank, and 8 experts.
    *mutants(
        "EP", also(TP_EP, debug={"moe_force_load_balance": True}, training={"seq_len": 36}), EP_FILE
    )(
        (
            "ranks of tp think that they hold the first tokens of a sequence",
            r"layers.1.moe.router sends \d+ of \d+ tokens to other experts",
            "            layer.token_shard = tp_mesh.get_local_rank(), tp_mesh.size()\n",
            "            layer.token_shard = 0, tp_mesh.size()\n",
        )
    ),
    *mutants("EP", also(CP_EP, model={"moe_capacity_factor": 0.8}), CAPACITY)(
        (
            "places in an expert are given in the order of ranks, not of the sequence",
            r"layers.1.moe",
            "    in_order = torch.empty_like(whole_TBK).index_copy_(0, everyone, whole_TBK)\n",
            "    in_order = whole_TBK\n",
        )
    ),
    *mutants("EP", EP, NORM)(
        (
            "the norm counts experts on the first rank of each axis of the world",
            r"gradient norm is .* of the gradients of routed experts, only those on dp_shard 0",
            "                sharded_axes |= set(axes_of(axis))\n",
            "                sharded_axes |= {axis}\n",
        )
    ),
    *mutants("EP", MIXTRAL_EP, EXPERT_LAYER)(
        (
            "the router's weights multiply what comes back, and then once more",
            r"layers.0.mlp.experts",
            "self.exchange(rows, order.counts, self._compute)\n",
            "self.exchange(rows, order.counts, self._compute)\n"
            "            factors = weights_NK.flatten().index_select(0, order.by_expert)\n"
            "            outputs = outputs * factors.unsqueeze(-1)\n",
        )
    ),
    *mutants("EP", MIXTRAL_EP, DISPATCH)(
        (
            "rows for experts of other ranks add nothing",
            r"layers.0.mlp.experts",
            "        return _AllToAll.apply(outputs, sent, received, self.group_name)\n",
            "        back = _AllToAll.apply(outputs, sent, received, self.group_name).split(sent)\n"
            "        here = dist.get_rank() % self.size\n"
            "        return torch.cat([part * (rank == here) for rank, part in enumerate(back)])\n",
        )
    ),
    *mutants("EP", MIXTRAL_TP_EP, EP_FILE)(
        (
            "the tokens' gradient is that of a rank's shard",
            r"layers.\d.mlp|tp",
            "moved(whole, tp_mesh, Replicate(), Shard(0)) for",
            "whole.chunk(tp_mesh.size())[tp_mesh.get_local_rank()] for",
        )
    ),
    # The norm and clipping.
    *mutants("norm", TP, NORM)(
        (
            "replicated gradients count on every rank",
            r"norm.*replicated over tp are counted 2 times",
            "        if parameter.grad is not None and _is_counted_here(parameter, world_mesh)\n",
            "        if parameter.grad is not None\n",
        )
    ),
    *mutants("norm", FSDP, STEP)(
        (
            "the norm is each rank's own",
            r"norm",
            "        norm = sums[1] = sums[1]",
            "        norm = sums[1] = squares",
        ),
        (
            "norms are added, not their squares",
            r"norm",
            "        _sum_loss_and_norm(sums)\n        norm = sums[1] = sums[1].sqrt()",
            "        sums[1] = squares.sqrt()\n        _sum_loss_and_norm(sums)\n        norm = sums[1]",
        ),
    ),
    *mutants("norm", TP_FSDP, SHARDS)(
        (
            "strided shards are taken for replicas",
            "",
            "    return isinstance(placement, Shard | _StridedShard)",
            "    return isinstance(placement, Shard)",
        )
    ),
    *mutants("clipping", also(FSDP, training={"max_norm": 0.1}), STEP)(
        (
            "clipping scales by the local norm",
            r"clipping",
            "        clip_gradients(self.parameters, norm, self.max_norm)\n",
            "        from titanlite.modules.shards import local_part\n\n"
            "        own = [local_part(p.grad) for p in self.parameters if p.grad is not None]\n"
            "        norm = torch.stack([g.norm() for g in own]).norm()\n"
            "        clip_gradients(self.parameters, norm, self.max_norm)\n",
        )
    ),
    *mutants("clipping", also(TP, training={"max_norm": 0.1}), STEP)(
        (
            "gradients are clipped twice",
            r"clipping is wrong",
            "        clip_gradients(self.parameters, norm, self.max_norm)\n",
            "        clip_gradients(self.parameters, norm, self.max_norm)\n"
            "        clip_gradients(self.parameters, norm, self.max_norm)\n",
        )
    ),
    # The optimizer and its schedule.
    *mutants("schedule", FSDP, STEP)(
        (
            "the schedule is stepped once a rank",
            r"learning rate",
            "+ 1)\n        self.scheduler.step()\n",
            "+ 1)\n        for _ in range(dist.get_world_size()):\n            self.scheduler.step()\n",
        )
    ),
    *mutants("schedule", FSDP, OPTIMIZER)(
        (
            "warm-up begins at zero",
            r"learning rate",
            "        return (step + 1) / warmup_steps",
            "        return step / warmup_steps",
        )
    ),
    *mutants("TP", also(TP, training={"label_smoothing": 0.1}), LOSS)(
        (
            "label smoothing is over a rank's part of the vocabulary",
            r"the backward pass of the loss itself is wrong",
            "label_smoothing / ctx.vocab_size",
            "label_smoothing / logits.size(-1)",
        )
    ),
    *mutants("TP", also(TP, training={"z_loss": 0.01}), LOSS)(
        (
            "each rank of tp counts the z-loss",
            r"the loss is .* only the reported loss is wrong",
            "z_loss * logs.square()",
            "z_loss * _reduced(logs.square(), 'sum', group)",
        )
    ),
    *mutants(
        "schedule",
        also(DDP, training={"steps": 6}, lr_scheduler={"warmup_steps": 1, "decay_ratio": 0.5}),
        OPTIMIZER,
        steps=6,
    )(
        (
            "the decay begins a step early",
            r"learning rate",
            "    decay_start = total_steps + 1 - decay_steps",
            "    decay_start = total_steps - decay_steps",
        )
    ),
    *mutants("optimizer", also(TP, parallelism={"disable_loss_parallel": False}), OPTIMIZER)(
        (
            "one mesh's parameters are left out of the optimizer",
            r"optimizer.*group",
            '            "params": group,\n',
            '            "params": group[1:],\n',
        )
    ),
    *mutants("optimizer", FSDP, OPTIMIZER)(
        (
            "weight decay is that of another key",
            r"optimizer.*weight_decay",
            "weight_decay if rule.decays else 0.0",
            "weight_decay / 2 if rule.decays else 0.0",
        )
    ),
    *mutants("optimizer", also(FSDP, optimizer={"no_weight_decay": ["*norm*"]}), OPTIMIZER)(
        (
            "weights that must not decay do",
            r"optimizer.*weight_decay is 0.1 instead of 0",
            "weight_decay if rule.decays else 0.0",
            "weight_decay",
        )
    ),
    *mutants(
        "optimizer", also(FSDP, **{"optimizer.lr_multipliers": {'"output.*"': 0.5}}), OPTIMIZER
    )(
        (
            "the multipliers of the learning rate are left out",
            r"optimizer.*initial_lr",
            '            "lr": lr * rule.lr_multiplier,\n',
            "",
        )
    ),
    *mutants("optimizer", DDP, OPTIMIZER)(
        (
            "beta1 and beta2 are swapped",
            r"optimizer.*betas",
            "betas=(beta1, beta2)",
            "betas=(beta2, beta1)",
        )
    ),
    # LoRA.
    *mutants("LoRA", LORA_TP, LORA)(
        (
            "the gradient of a whole adapter of a cut layer is not reduced",
            r"lora_a.weight.*correct only after a sum over tp",
            "grad_placements=[Partial()] if is_whole else None",
            "",
        ),
        (
            "alpha / rank is divided by the ranks of tp",
            r"attention.wq.lora_b.*2 times too seldom",
            "        (placement,) = self.weight.placements\n",
            "        (placement,) = self.weight.placements\n        self.scale /= mesh.size()\n",
        ),
        (
            "the adapters are cut otherwise than their layer",
            r"the plan does not run.*attention.wq.lora_b",
            "((self.lora_a, 1), (self.lora_b, 0))",
            "((self.lora_a, 0), (self.lora_b, 1))",
        ),
    ),
    *mutants("LoRA", LORA_TP, STYLES)(
        (
            "a row-parallel adapter is added behind the reduction",
            r"attention.wo.lora_a is the first module.*a Partial that has not been reduced",
            "                partial = _product(module, x, weight)\n",
            "                both, partial = _product(module, x, weight), F.linear(x, weight)\n",
            "Partial(), Shard(self.scatter_dim))\n            return output if",
            "Partial(), Shard(self.scatter_dim))\n"
            "                parts = (both - partial).chunk(device_mesh.size(), self.scatter_dim)\n"
            "                output = output + parts[device_mesh.get_local_rank()]\n"
            "            return output if",
        ),
        (
            "the base is trained once it is cut",
            r"is frozen on one process, but has a gradient under the plan",
            "nn.Parameter(cut, own.requires_grad)",
            "nn.Parameter(cut)",
        ),
    ),
    *mutants("LoRA", also(DDP, **LORA_TINY), LORA)(
        (
            "each rank draws its own B",
            r"replicas start with different values.*lora_b.weight",
            "            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)\n",
            "            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)\n"
            "            whole *= 1 + torch.distributed.get_rank() * (name == 'lora_b')\n",
        )
    ),
    # Muon.
    *mutants("Muon", also(FSDP, **MUON), MUON_FILE)(
        (
            "shards are orthogonalized",
            r"whether the update needs the whole tensor, as those of Muon",
            "        by_axis[largest].append(parameter)",
            "        by_axis[None].append(parameter)",
        ),
        (
            "tall matrices come back transposed",
            r"not that of Muon",
            "    return x.mT if is_tall else x",
            "    return x.reshape(x_BMN.shape)",
        ),
        (
            "Muon updates the head",
            r"the optimizer does not match the job: output.weight is updated by Muon",
            "not is_hidden(name) or",
            '"emb" in name or',
        ),
    ),
    *mutants("Muon", also(TP_FSDP, **MUON), MUON_FILE)(
        (
            "the shards of TP are orthogonalized",
            r"all sharded over tp.*whether the update needs the whole tensor",
            "shard_of(compute(whole_tensor(rest, dims)), rest, dims)",
            "compute(part)",
        )
    ),
    *mutants("Muon", also(FSDP, **MUON), OPTIMIZER)(
        (
            "momentum is kept as shards",
            r"momentum_buffer",
            "= torch.zeros_like(parameter)",
            "= torch.zeros_like(local_part(parameter))",
        ),
        (
            "weight decay on what Muon does not own",
            r"update of step 1 is not that of AdamW",
            "            return super()._init_group(group, *lists)\n",
            '            for p in group["params"]:\n'
            '                p.mul_(1 - group["lr"] * group["weight_decay"])\n'
            "            return super()._init_group(group, *lists)\n",
        ),
    ),
    # The average of the weights.
    *mutants("averaging", also(FSDP, **EMA), STEP)(
        (
            "an average of the weights before the step",
            r"the average of .* after step 1 is not 0.9 times its previous value",
            "        self.optimizer.step()\n        if self.average is not None:\n"
            "            self.average.update(self.scheduler.last_epoch + 1)\n",
            "        if self.average is not None and self.scheduler.last_epoch:\n"
            "            self.average.update(self.scheduler.last_epoch)\n"
            "        self.optimizer.step()\n",
        )
    ),
    *mutants("averaging", also(TP_FSDP, **EMA), AVERAGING)(
        (
            "the average's share is that of the weights",
            r"the average of .* after step 2 is not 0.9 times its previous value",
            "multi_avg_fn(self._decay)",
            "multi_avg_fn(1 - self._decay)",
        )
    ),
    *mutants("averaging", also(FSDP, weight_averaging={"method": "last_k", "k": 2}), AVERAGING)(
        (
            "the mean of other weights than the last",
            r"the average of .* after step 2 is not the mean of its newest 2 values",
            "number % len(self._weights)",
            "0",
        )
    ),
    *mutants(
        "averaging", also(FSDP, **EMA, validation={"enable": True, "local_batch_size": 4}), STEP
    )(
        (
            "the last weights are validated instead of their average",
            r"validation loss is .* have a mean loss of",
            "        with self.averaged():\n            totals",
            "        if True:\n            totals",
        )
    ),
    # Recomputation and compile.
    *mutants("AC", also(FSDP, **FULL), MODEL)(
        (
            "recomputed blocks see other activations",
            r"activation.checkpoint|recompute",
            "        a_TBD = self.attention(self.attention_norm(x_TBD), cache=cache)\n",
            "        again = 1.001 if torch._C._current_graph_task_id() != -1 else 1\n"
            "        a_TBD = self.attention(self.attention_norm(x_TBD), cache=cache) * again\n",
        )
    ),
    # The loss.
    *mutants("loss", FSDP, BATCH)(
        (
            "left-out targets count in the denominator",
            r"targets|loss",
            "        return (self.targets != IGNORE_INDEX).sum()",
            "        return torch.tensor(self.targets.numel(), device=self.targets.device)",
        )
    ),
    *mutants("loss", TP, DIMS)(
        (
            "targets are counted on every rank of tp",
            r"targets.*tp|degree of tp",
            "        return all(position[axis] == 0 for axis in same)",
            "        return True",
        )
    ),
    *mutants("loss", DDP, STEP)(
        (
            "a mean over each rank's targets",
            r"mean of means|targets|wrong coefficients",
            "        total = float(self._summed(torch.stack(counts).sum().double()))",
            "        total = float(torch.stack(counts).sum() * dist.get_world_size())",
        )
    ),
    *mutants("validation", also(DDP, validation={"enable": True, "local_batch_size": 4}), STEP)(
        (
            "evaluation averages batches' means",
            r"validation loss|loss",
            "            totals[0, 1] += self.loss.count(batch)\n",
            "            totals[0, 1] += 64 * batch.num_sequences\n",
        )
    ),
    # Mixed precision.
    *mutants("precision", FSDP, FSDP_FILE, options=("--dtype=bfloat16",))(
        (
            "gradients are reduced in bfloat16",
            r"dtype|bfloat16|reduc",
            "    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)",
            "    policy = MixedPrecisionPolicy(param_dtype=param_dtype,"
            " reduce_dtype=torch.bfloat16)",
        )
    ),
    *mutants("mixed precision", MIXED, DATA_PARALLEL_STEP)(
        (
            "the job's own reductions are in the dtype of computation",
            r"gradients are not reduced in the job's dtype float32: .* is in bfloat16",
            "        reduce_dtype=DTYPES[reduce] if is_mixed else None,",
            "        reduce_dtype=DTYPES[param] if is_mixed else None,",
        )
    ),
    *mutants("mixed precision", MIXED, "titanlite/plain_job.py")(
        (
            "weights are kept in the dtype of computation",
            r"weights are not in training\.dtype float32: .* is in bfloat16",
            "resolved.model, DTYPES[resolved.config.training.dtype])",
            "resolved.model, DTYPES[resolved.config.training.param_dtype])",
        )
    ),
    *mutants("optimizer", FSDP, STEP)(
        (
            "gradients are never cleared",
            r"step 1 does not clear the gradients of .*, so the next step adds to them",
            "        self.scheduler.step()\n        self.optimizer.zero_grad(set_to_none=True)\n"
            "        return lr\n\n    def _skip",
            "        self.scheduler.step()\n        return lr\n\n    def _skip",
        )
    ),
]

REFACTORINGS: list[Mutant] = [
    *mutants("same", FSDP, STEP)(
        (
            "targets counted batch by batch",
            "",
            "        counts = [torch.as_tensor(self.loss.count(b.on_host or b)) for b in batches]\n",
            "        counts = []\n        for batch in batches:\n"
            "            counts.append(self.loss.count(batch))\n",
        )
    ),
    *mutants("same", FSDP, SAMPLER)(
        (
            "samples dealt out in turn",
            "",
            "            read_batch(self._dataset, range(start, start + size), self._fields,"
            " self._seed)\n            for start in range(first, stop, size)\n",
            "            read_batch(\n                self._dataset,\n"
            "                [base + i * count + self._dp_rank for i in range(start, start + size)],\n"
            "                self._fields,\n                self._seed,\n            )\n"
            "            for start in range(0, own, size)\n",
            "        self.state += global_batch_size\n",
            "        base, count = self.state, self._dp_degree\n        self.state += global_batch_size\n",
        )
    ),
    *mutants("same", TP_FSDP, NORM)(
        (
            "the norm is summed in another order",
            "",
            "        squares = torch.stack(norms).square().sum().to(device, non_blocking=True)",
            "        squares = torch.stack(norms[::-1]).square().sum().to(device, non_blocking=True)",
        )
    ),
    *mutants("same", DDP, STEP)(
        (
            "the loss is divided after the backward pass of the sum",
            "",
            "            return loss / num_targets\n",
            "            return loss * (1.0 / num_targets)\n",
        )
    ),
    *mutants("same", TP, STYLES)(
        (
            "projections are multiplied one by one",
            "",
            "            products = whole.split([w.size(0) for w in weights], dim=-1)",
            "            products = [F.linear(x, weight) for weight in weights]",
        )
    ),
    *mutants("same", FSDP, FSDP_FILE)(
        (
            "head and last block are freed at once",
            "",
            "len(group) == 1 else group, always if is_needed_first else reshard)",
            "len(group) == 1 else group, reshard)",
        )
    ),
    *mutants("same", DDP, DDP_FILE)(
        ("smaller buckets", "", "BUCKET_CAP_MB = 100", "BUCKET_CAP_MB = 1")
    ),
    *mutants("same", CP, RING)(
        (
            "a block's triangles are cut up",
            "",
            "    if kernel.smallest_triangle is not None:\n"
            "        tiles = [part for tile in tiles for part in tile.split(kernel.smallest_triangle)]",
            "    tiles = [part for tile in tiles for part in tile.split(8)]",
        ),
        (
            "heads before dimensions in the packed message",
            "",
            "    return torch.stack([k.transpose(1, 2), v.transpose(1, 2)])",
            "    return torch.stack([k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()])",
        ),
    ),
    *mutants("same", ALONE | FSDP, STEP)(
        (
            "gradients are cleared to zero",
            "",
            "        self.scheduler.step()\n        self.optimizer.zero_grad(set_to_none=True)\n"
            "        return lr\n\n    def _skip",
            "        self.scheduler.step()\n        self.optimizer.zero_grad(set_to_none=False)\n"
            "        return lr\n\n    def _skip",
        )
    ),
    *mutants("same", also(TP, **FULL), AC)(
        (
            "every block is recomputed",
            "",
            "        if is_checkpointed(key, index, every):",
            "        if True:",
        )
    ),
    *mutants("same", PP, MODEL)(
        (
            "the first rank of the pipeline sends a copy",
            "",
            "        if self.output is None:\n            return x_TBD\n",
            "        if self.output is None:\n            return x_TBD.clone()\n",
        )
    ),
]
