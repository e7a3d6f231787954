"""The cost of a plan: CPU-seconds per step over all ranks, relative to a plain PyTorch loop.

    python tests/benchmarks/plan_overhead.py [--model llama] [--steps 15] [--runs 3] [plan ...]
    python tests/benchmarks/plan_overhead.py --model experts ep4
    python tests/benchmarks/plan_overhead.py --model experts --against dense "one rank"

The plain loop ("bare") runs in one process. Wall time on shared cores is noise, and so is the ratio
of two separate runs. So the plan's ranks and the plain process take turns step by step, and each
waits while the other runs. Every process has one thread and the same allocator setting. The control
compares the plain loop with itself. The model is an image transformer, the "small" Llama 3 of 5
million parameters on sequences of 1,024 bytes, or "moe_tiny" on these. "ddp4 by hand" and the like
are the plain loop on four ranks with PyTorch's DDP, FSDP2, parallelize_module or pipelining. With
--against, the plain loop trains another model: "dense" has as many parameters per token as
moe_tiny, without experts.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from titanlite.config import JobConfig, make_parallel_dims, resolve_job
from titanlite.ranks.launch import Place, spawn

JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "image": {
        "model": {
            "flavor": "cifar",
            "dim": 256,
            "num_layers": 4,
            "num_heads": 8,
            "image_height": 32,
            "image_width": 32,
            "image_channels": 1,
            "ffn_hidden_dim": 688,
        },
        "training": {"dataset": "synthetic"},
    },
    "llama": {
        "model": {"name": "llama3", "flavor": "small"},
        "training": {"dataset": "pydoc", "seq_len": 1024},
    },
    "experts": {
        "model": {"name": "llama3", "flavor": "moe_tiny"},
        "training": {"dataset": "pydoc", "seq_len": 1024},
    },
    "dense": {
        "model": {"name": "llama3", "flavor": "moe_tiny", "moe_num_experts": 0, "multiple_of": 8},
        "training": {"dataset": "pydoc", "seq_len": 1024},
    },
}
BATCH_SIZE = 8
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"data_parallel_shard_degree": 1},
    "ddp4": {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
    "fsdp4": {"data_parallel_shard_degree": 4},
    "tp2_fsdp2": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
    "tp4": {"tensor_parallel_degree": 4, "data_parallel_shard_degree": 1},
    # Eight microbatches of one sequence.
    "pp4": {
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "data_parallel_shard_degree": 1,
    },
    "cp4": {"context_parallel_degree": 4, "data_parallel_shard_degree": 1},
}
EXPERT_PLANS = {"ep4": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 4}}
BY_HAND = {
    "image": tuple(f"{plan} by hand" for plan in ("ddp4", "fsdp4", "tp2_fsdp2", "tp4", "pp4")),
    "llama": ("ddp4 by hand", "fsdp4 by hand"),
}
DEGREES_BY_HAND = {"ddp4": (4, 1), "fsdp4": (4, 1), "tp2_fsdp2": (2, 2), "tp4": (1, 4)}
"""Of data and tensor parallelism, in plain loops on four ranks; a pipeline has neither."""
TARGETS = {"control": 1.0, "one rank": 1.03, "ddp4": 1.12, "fsdp4": 1.12, "tp2_fsdp2": 1.30,
           "tp4": 1.60, "pp4": 1.15, "cp4": 1.20, "ep4": 1.40}  # fmt: skip


def plan_config(model: str, plan: dict[str, Any]) -> JobConfig:
    """The job under a plan; a data-parallel rank has its sequences in one microbatch."""
    dp = plan.get("data_parallel_replicate_degree", 1) * plan["data_parallel_shard_degree"]
    batch = {"global_batch_size": BATCH_SIZE, "local_batch_size": BATCH_SIZE // dp}
    return JobConfig.from_dict(
        {
            **JOBS[model],
            "training": {**JOBS[model]["training"], **batch},
            "parallelism": plan,
            "activation_checkpoint": {"mode": "none"},
        }
    )


def bare_loop(config: JobConfig, by_hand: str = "", rank: int = 0) -> Callable[[], None]:
    """A step of the same model and batch in plain PyTorch, on one process or `by_hand` on four."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh

    from titanlite.config import load_model_spec
    from titanlite.config.data import source_arguments, spec_for
    from titanlite.data.sampler import read_batch

    resolved = resolve_job(config, 1)
    model = load_model_spec(config).load_part("build")(resolved.model)
    name = by_hand.removesuffix(" by hand")
    num_parts, num_slices = DEGREES_BY_HAND.get(name, (1, 1))
    size = BATCH_SIZE // num_parts
    run = model
    if name in DEGREES_BY_HAND:
        mesh = init_device_mesh("cpu", (num_parts, num_slices), mesh_dim_names=("dp", "tp"))
        if num_slices > 1:
            split_by_hand(model, mesh["tp"])
        if "fsdp" in name:
            shard_by_hand(model, mesh["dp"])
    if name == "ddp4":
        run = torch.nn.parallel.DistributedDataParallel(model)
    elif name == "pp4":
        pipeline = pipeline_by_hand(model, rank)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    spec = spec_for(config)
    dataset = spec.make(**source_arguments(config, resolved.model, resolved.seq_len, "train"))
    sample = 0

    def step() -> None:
        nonlocal sample
        first = sample + (rank // num_slices * size if num_parts > 1 else 0)
        batch = read_batch(dataset, range(first, first + size), spec.fields)
        sample += BATCH_SIZE
        if name == "pp4":
            pipeline(batch)
        else:
            logits = run(batch.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()) / num_parts
            loss.backward()
            loss.item()
        if name == "tp4":  # AdamW takes no Partial gradients of norms
            for weight in model.parameters():
                weight.grad = weight.grad.redistribute(placements=weight.placements)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard_by_hand(model: Any, mesh: Any) -> None:
    """FSDP2 on every block, as its documentation does; on gloo, gradients must be summed."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    *blocks, last = model.layers.values()
    for module in (next(model.children()), *blocks):
        fully_shard(module, mesh=mesh)
    for module in (last, [model.norm, model.output], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def split_by_hand(model: Any, mesh: Any) -> None:
    """PyTorch's tensor and sequence parallel styles, as in its tutorial."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    rows = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    # FSDP2 takes no empty shard, which a table of one row would have.
    columns = tp.ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    tables = {name: table.weight.size(0) for name, table in model.embeddings.named_children()}
    gather = tp.PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    scatter = tp.RowwiseParallel(output_layouts=Shard(0))
    norm = tp.SequenceParallel(sequence_dim=0)
    plan = {
        **{f"embeddings.{x}": rows if n >= mesh.size() else columns for x, n in tables.items()},
        **{f"layers.*.{name}": norm for name in ("attention_norm", "ffn_norm")},
        **{f"layers.*.{name}": gather for name in ("attention", "feed_forward")},
        **{f"layers.*.attention.w{name}": tp.ColwiseParallel() for name in "qkv"},
        **{f"layers.*.feed_forward.w{name}": tp.ColwiseParallel() for name in "13"},
        **{f"layers.*.{name}": scatter for name in ("attention.wo", "feed_forward.w2")},
        "norm": norm,
        "output": tp.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    tp.parallelize_module(model, mesh, plan)


def pipeline_by_hand(model: Any, rank: int) -> Callable[[Any], None]:
    """A block on each of four ranks, in PyTorch's 1F1B with a sequence per microbatch."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model.layers = torch.nn.ModuleDict({str(rank): model.layers[str(rank)]})
    if rank > 0:
        model.embeddings = None
    if rank < 3:
        model.norm = model.output = None

    def loss(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    stage = PipelineStage(model, rank, 4, torch.device("cpu"))
    schedule = Schedule1F1B(stage, BATCH_SIZE, loss)

    def step(batch: Any) -> None:
        losses: list[Any] = []
        schedule.step(
            *([batch.tokens] if rank == 0 else []),
            target=batch.targets if rank == 3 else None,
            losses=losses if rank == 3 else None,
        )
        for one in losses:
            one.item()

    return step


def take_turns(
    place: Place,
    model: str,
    against: str,
    plan: dict[str, Any] | None,
    num_ranks: int,
    steps: int,
    path: str,
    by_hand: str = "",
) -> list[float]:
    """CPU-seconds of each step of this process; the last process runs the plain loop."""
    import torch
    import torch.distributed as dist

    from titanlite.ranks.settings import keeping_freed_memory
    from titanlite.ranks.world import open_world

    turns = dist.FileStore(path)
    is_bare = place.rank == num_ranks

    def loop(step: Callable[[], object]) -> list[float]:
        torch.set_num_threads(1)
        seconds = []
        for index in range(steps + 1):
            # The plan's ranks start when the plain process has finished, and vice versa.
            if is_bare:
                turns.wait([f"{index}/{rank}" for rank in range(num_ranks)])
            elif index:
                turns.wait([f"{index - 1}/{num_ranks}"])
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
            turns.set(f"{index}/{place.rank}", "done")
        return seconds[1:]

    alone = plan_config(against, PLANS["one rank"])
    if is_bare or (plan is None and not by_hand):
        with keeping_freed_memory():
            return loop(bare_loop(alone))
    from titanlite.job import build_job

    place = replace(place, world_size=num_ranks, local_world_size=num_ranks)
    if by_hand:
        with open_world(place):
            return loop(bare_loop(alone, by_hand, place.rank))
    assert plan is not None
    resolved = resolve_job(plan_config(model, plan), num_ranks)
    with open_world(place) as world:
        return loop(build_job(resolved, world).step)


def measure(model: str, against: str, name: str, steps: int) -> tuple[float, float, float]:
    """Median CPU-seconds of the plan and of the plain loop, and the median ratio per turn."""
    import tempfile

    plan, by_hand = (PLANS | EXPERT_PLANS).get(name), name if name.endswith("by hand") else ""
    num_ranks = 4 if by_hand else 1
    if plan is not None:
        num_ranks = make_parallel_dims(plan_config(model, plan), None).world_size
    with tempfile.TemporaryDirectory() as folder:
        turns = f"{folder}/turns"
        seconds = spawn(
            take_turns, num_ranks + 1, model, against, plan, num_ranks, steps, turns, by_hand
        )
    totals = [sum(step) for step in zip(*seconds[:num_ranks], strict=True)]
    bare = seconds[num_ranks]
    ratios = [total / alone for total, alone in zip(totals, bare, strict=True)]
    return statistics.median(totals), statistics.median(bare), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(JOBS), default="image")
    parser.add_argument("--against", choices=list(JOBS), help="the plain loop's model")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("plans", nargs="*")
    arguments = parser.parse_args()
    print(f"medians of {arguments.steps} alternating steps, CPU-seconds over all ranks")
    print(f"{'plan':14} {'plan':>8} {'bare':>8} {'ratio':>7} {'target':>7} {'of runs':>11}")
    for name in arguments.plans or ["control", *PLANS, *BY_HAND.get(arguments.model, ())]:
        against = arguments.against or arguments.model
        of_run = partial(measure, arguments.model, against, name, arguments.steps)
        found = [of_run() for _ in range(arguments.runs)]
        total, bare, ratio = map(statistics.median, zip(*found, strict=True))
        ratios = [one[2] for one in found]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}" if len(found) > 1 else ""
        targets = TARGETS | ({"one rank": 1.4} if arguments.against else {})
        target = f"{targets[name]:7.2f}" if name in targets else ""
        line = f"{name:14} {total:8.3f} {bare:8.3f} {ratio:7.3f} {target:7} {spread:>11}"
        print(line.rstrip(), flush=True)


if __name__ == "__main__":
    main()
