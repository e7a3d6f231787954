"""The collectives of one step, counted on four ranks, are those of the formulas in docs/.

The formulas stand here as in the notes: L blocks, width D, vocabulary V, N tokens that a rank's
model sees in a step, m microbatches; a parameter's rows are filled up to a multiple of the shards.
"""

import itertools
import math

import pytest

from tests.benchmarks.communication import (
    FROM_RANK_TO_RANK,
    GLOBAL_BATCH_SIZE,
    PARALLELISM,
    PP,
    REPLICATE,
    SHARD,
    TP,
    Collective,
    count_plans,
    make_job_config,
    totals,
)
from titanlite.config import resolve_job
from titanlite.models.image_transformer.config import FLAVORS
from titanlite.models.llama3.config import FLAVORS as MOE_FLAVORS
from titanlite.ranks.launch import spawn
from titanlite.tools.planner.trace import trace_rank

# What else they send depends on the stage: of these, what goes between stages alone is told here.
STAGES_ALONE = ("pp2_tp2", "pp4", "pp2_interleaved", "pp2_zbv")
CASES = [
    *((plan, 1) for plan in PARALLELISM if plan not in STAGES_ALONE),
    *((plan, 2) for plan in ("ddp4", "fsdp4", "hsdp2x2", "tp4", "tp2_fsdp2", "tp2_ddp2")),
    ("tp4_async", 2),
    *((plan, 2) for plan in ("pp2_ddp2", "pp2_fsdp2")),
    *((f"{plan}+{mode}", 1) for plan in ("tp4", "tp4_async") for mode in ("full", "early", "op")),
    ("tp4+2", 1),
    *((f"{plan}+full", 1) for plan in ("fsdp4", "tp2_fsdp2")),
    ("tp2_fsdp2+op", 1),
]
EXPERT_CASES = ("ep4", "ep4+full", "ep4+op", "ep2_fsdp4", "ep4_tp2")
MODEL = FLAVORS["debug"]
L, D, V = MODEL.num_layers, MODEL.dim, MODEL.vocab_size
WORD = 4  # bytes of a float32
MOE, EXPERT_SEQ_LEN = MOE_FLAVORS["moe_debug"], 32

Expected = dict[tuple[str, str], tuple[int, int]]


@pytest.fixture(scope="module")
def counted() -> dict[tuple[str, int], list[tuple[list[Collective], int]]]:
    """For each case what each rank counted, all from one launch."""
    cases = [*CASES, *((plan, 1) for plan in STAGES_ALONE), ("pp4", 2)]
    cases += [(plan, 1) for plan in EXPERT_CASES]
    configs = [make_job_config(plan, microbatches=m) for plan, m in cases]
    by_rank = spawn(count_plans, 4, configs, timeout_seconds=240)
    return {case: [rank[index] for rank in by_rank] for index, case in enumerate(cases)}


def unit_shapes(tp: int) -> dict[str, list[tuple[int, int]]]:
    """FSDP unit -> the (rows, columns) of its parameters on the first rank of `tp`."""
    hidden, kv_dim = MODEL.ffn_hidden_dim // tp, MODEL.kv_heads * MODEL.head_dim // tp
    block = [(D // tp, D), (kv_dim, D), (kv_dim, D), (D, D // tp)]
    block += [(hidden, D), (hidden, D), (D, hidden), (D, 1), (D, 1)]
    rows = (V, MODEL.image_height, MODEL.image_width, MODEL.image_channels)
    return {
        "embeddings": [(count, D) for count in rows],
        **{f"layers.{index}": block for index in range(L)},
        "head": [(D, 1), (math.ceil(V / tp), D)],
    }


def padded_elements(shapes: list[tuple[int, int]], shards: int) -> int:
    """Elements of a unit, each parameter's rows filled up to a multiple of `shards`."""
    return sum(math.ceil(rows / shards) * shards * columns for rows, columns in shapes)


def data_parallel(plan: str, m: int) -> Expected:
    """docs/data_parallel.md, docs/fsdp.md, docs/hsdp.md, docs/pipeline_parallel.md."""
    degrees = PARALLELISM[plan]
    tp, replicas, shards = degrees.get(TP, 1), degrees.get(REPLICATE, 1), degrees[SHARD]
    if replicas * shards == 1:
        return {}
    stages = degrees.get(PP, 1)
    if shards * tp * stages == 1:
        return {("all_reduce", "dp_replicate"): (1, WORD * MODEL.num_parameters)}
    expected: Expected = {}
    units = {name: padded_elements(s, shards) for name, s in unit_shapes(tp).items()}
    if stages > 1:
        # The first of two stages, gathered once a run of the schedule.
        units = {name: units[name] for name in list(units)[: len(units) // 2]}
        gathered = m * len(units), m * WORD * sum(units.values())
        of_shards = {(kind, "dp_shard"): gathered for kind in ("all_gather", "reduce_scatter")}
        of_replicas = {("all_reduce", "dp_replicate"): (len(units), WORD * sum(units.values()))}
        return of_shards if shards > 1 else of_replicas
    total = sum(units.values())
    if shards > 1:
        kept = units["head"] + units[f"layers.{L - 1}"]
        again = {"fsdp4_never": 0, "fsdp4_always": total}.get(plan, total - kept)
        num_again = {"fsdp4_never": 0, "fsdp4_always": L + 2}.get(plan, L)
        gathered_word = 2 if plan == "fsdp4_bf16" else WORD
        gathered = gathered_word * (total + again)
        expected["all_gather", "dp_shard"] = (m * (L + 2 + num_again), m * gathered)
        expected["reduce_scatter", "dp_shard"] = (m * (L + 2), m * WORD * total)
    if replicas > 1:
        expected["all_reduce", "dp_replicate"] = (L + 2, WORD * total // shards)
    return expected


def tensor_parallel(plan: str, checkpointing: str, m: int) -> Expected:
    """docs/tensor_parallel.md, with what docs/activation_checkpoint.md adds; docs/async_tp.md."""
    degrees = PARALLELISM[plan]
    n = degrees.get(TP, 1)
    if n == 1:
        return {}
    dp = degrees.get(REPLICATE, 1) * degrees[SHARD]
    N = GLOBAL_BATCH_SIZE * MODEL.seq_len // dp
    sequence = WORD * N * D
    gathers_again = {"full": 2 * L, "early": 2 * L, "2": L // 2 * 2, "op": 2 * L}
    scatters_again = {"full": 2 * L, "early": L, "2": L // 2 * 2}
    gathers = 4 * L + 1 + gathers_again.get(checkpointing, 0)
    scatters = 4 * L + 1 + scatters_again.get(checkpointing, 0)
    rings: Expected = {}
    if degrees.get("enable_async_tensor_parallel"):
        # The head's own pair stays as it is. What a ring's backward pass needs is seen to be there
        # after the ring has run, so that stopping early spares none.
        scatters += L if checkpointing == "early" else 0
        rings["gather ring", "tp"] = (m * (gathers - 1), (gathers - 1) * sequence)
        rings["scatter ring", "tp"] = (m * (scatters - 1), (scatters - 1) * sequence)
        gathers = scatters = 1
    num_gathers, gathered = gathers * m, gathers * sequence

    rows = V + MODEL.image_height + MODEL.image_width + MODEL.image_channels
    whole, whole_bytes = 4 + 2 * L + 1, WORD * D * (rows + 2 * L + 1)
    # FSDP2 makes each microbatch's pending sums one by one, plain TP a step's at once.
    num_reductions, reduced = (m * whole, m * whole_bytes) if dp > 1 else (1, whole_bytes)
    if degrees.get("disable_loss_parallel"):
        num_gathers += m
        gathered += WORD * N * math.ceil(V / n) * n
    else:
        num_reductions += 2 * m
        reduced += 3 * WORD * N
    return {
        ("all_gather", "tp"): (num_gathers, gathered),
        ("reduce_scatter", "tp"): (m * scatters, scatters * sequence),
        ("all_reduce", "tp"): (num_reductions, reduced),
        **rings,
    }


@pytest.mark.parametrize(("plan", "m"), CASES, ids=[f"{plan}-{m}" for plan, m in CASES])
def test_a_step_sends_what_the_notes_say(counted, plan, m):
    parallelism, _, checkpointing = plan.partition("+")
    expected = {
        **data_parallel(parallelism, m),
        **tensor_parallel(parallelism, checkpointing, m),
        ("all_reduce", "world"): (2, 4 * 8),  # targets; loss, gradient norm and stop
    }
    found, total = counted[plan, m][0]
    collectives = [one for one in found if one.kind not in FROM_RANK_TO_RANK]
    assert totals(collectives) == expected
    # Of what is sent from rank to rank it sees nothing.
    seen = [collective for collective in collectives if "ring" not in collective.kind]
    assert total == len(seen), "CommDebugMode saw a collective that was not counted"


@pytest.mark.parametrize("plan", EXPERT_CASES)
def test_experts_send_what_the_note_says(counted, plan):
    """docs/expert_parallel.md.

    As many rows arrive on all ranks as are sent, so the sum over ranks is exact.
    """
    by_rank = [collectives for collectives, _ in counted[plan, 1]]
    num_calls, num_bytes = dispatch(plan)
    found = [totals(collectives)["all_to_all", "ep"] for collectives in by_rank]
    assert [count for count, _ in found] == [num_calls] * 4
    assert sum(size for _, size in found) == 4 * num_bytes
    # Targets; sequences; loss, norm and stop; slots of each expert, those dropped, auxiliary loss.
    layers, experts = MOE.num_expert_layers, MOE.moe_num_experts
    sums, summed = 4, 7 * 8 + layers * 8 * experts
    if "tp2" in plan:
        # Those of each sequence, over tp.
        sums, summed = sums + layers, summed + layers * 8 * experts * GLOBAL_BATCH_SIZE // 2
    assert [totals(of)["all_reduce", "world"] for of in by_rank] == [(sums, summed)] * 4


@pytest.mark.parametrize("plan", ["ep4+full", "ep4_tp2"])
def test_a_traced_plan_of_experts_spreads_tokens_evenly(plan):
    trace = trace_rank(resolve_job(make_job_config(plan), 4), 0)
    found = [one.num_bytes for one in trace.communications if one.kind == "all_to_all"]
    assert (len(found), sum(found)) == dispatch(plan)


def dispatch(plan: str) -> tuple[int, int]:
    """The all-to-alls of a step of one microbatch, and the mean of their bytes over ranks."""
    counts = 8 * MOE.moe_num_experts
    tokens = GLOBAL_BATCH_SIZE * EXPERT_SEQ_LEN // 4
    rows = WORD * tokens * MOE.moe_top_k * MOE.dim
    forwards = 2 if plan.endswith("+full") else 1
    calls, num_bytes = forwards * 3 + 2, forwards * (counts + 2 * rows) + 2 * rows
    return MOE.num_expert_layers * calls, MOE.num_expert_layers * num_bytes


@pytest.mark.parametrize(("plan", "m"), CASES, ids=[f"{plan}-{m}" for plan, m in CASES])
def test_every_rank_issues_the_same_collectives_in_the_same_order(counted, plan, m):
    # Another order of collectives of one shape gives wrong numbers in silence.
    orders = [
        [(c.kind, c.axis) for c in collectives if c.kind not in FROM_RANK_TO_RANK]
        for collectives, _ in counted[plan, m]
    ]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize(
    ("plan", "m"),
    [
        *((plan, 1) for plan in ("pp2_ddp2", "pp2_fsdp2", *STAGES_ALONE)),
        *((plan, 2) for plan in ("pp2_ddp2", "pp2_fsdp2", "pp4")),
    ],
)
def test_stages_send_activations_on_and_gradients_back(counted, plan, m):
    """docs/pipeline_parallel.md: 2 w N D bytes a boundary and step, 1/tp of it under TP."""
    resolved = resolve_job(make_job_config(plan, microbatches=m), 4)
    dims, place = resolved.dims, resolved.pipeline.schedule.stage_to_rank
    N = GLOBAL_BATCH_SIZE * MODEL.seq_len // dims.dp
    num_microbatches = m * resolved.pipeline.schedule.num_microbatches
    for rank, (found, _) in enumerate(counted[plan, m]):
        pp = dims.coordinates(rank)["pp"]
        # A boundary within a rank, as at the foot of a V, sends nothing.
        boundaries = [pair for pair in itertools.pairwise(place) if pair[0] != pair[1]]
        count = sum(pp in pair for pair in boundaries)
        between = {
            key: value for key, value in totals(found).items() if key[0] in FROM_RANK_TO_RANK
        }
        both = count * num_microbatches, count * WORD * N * D // dims.tp
        assert between == {("send", "pp"): both, ("receive", "pp"): both}


def test_fsdp_gathers_the_next_block_before_it_reduces_this_one(counted):
    collectives, _ = counted["fsdp4", 1][0]
    names = {
        WORD * padded_elements(shapes, 4): name.split(".")[0]
        for name, shapes in unit_shapes(1).items()
    }
    order = [f"{c.kind} {names[c.num_bytes]}" for c in collectives if c.axis == "dp_shard"]
    assert order == [
        "all_gather embeddings",
        "all_gather layers",
        "all_gather layers",
        "all_gather head",
        # Backward: the block before is on its way while this one's gradients are reduced. The last
        # block is still there.
        "reduce_scatter head",
        "all_gather layers",
        "reduce_scatter layers",
        "all_gather embeddings",
        "reduce_scatter layers",
        "reduce_scatter embeddings",
    ]


def test_hsdp_sends_between_groups_a_shard_where_ddp_sends_the_whole(counted):
    ddp = totals(counted["ddp4", 1][0][0])["all_reduce", "dp_replicate"][1]
    hsdp = totals(counted["hsdp2x2", 1][0][0])["all_reduce", "dp_replicate"][1]
    assert ddp / 2 <= hsdp <= 1.01 * ddp / 2
