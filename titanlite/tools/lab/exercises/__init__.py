"""Exercises of the lab's notes that check themselves: `titanlite lab exercise`.

Each exercise is a module of this folder with the name of its function. It has the worked solution,
whose signature and docstring are the task, and EXERCISE with everything that judges an answer. To
add one, write such a module and name it in EXERCISES. The list loads no torch.
"""

# The name of each exercise: its note, and what it asks for.
EXERCISES: dict[str, tuple[int, str]] = {
    "shift": (1, "send to the next rank while receiving from the previous one"),
    "prefix_sum": (1, "the sum of all ranks up to one's own, in a chain"),
    "tree_broadcast": (2, "one rank's tensor to all ranks in log2(W) steps"),
    "ring_all_gather": (2, "every rank's tensor to all ranks, around a ring"),
    "ring_all_reduce": (2, "the sum of all ranks' tensors with 2 (W-1)/W n bytes per rank"),
    "bus_bandwidth": (3, "the bandwidth of a measured collective, in the definition of the note"),
    "average_gradients": (4, "average all gradients with a single all-reduce"),
    "uneven_batches": (4, "the gradient of the whole batch if ranks have unequal parts of it"),
    "buckets_in_order": (
        4,
        "all-reduces in the same order on all ranks, whatever fills first",
    ),
    "row_parallel": (5, "a layer whose weight is sharded by rows"),
    "column_backward": (5, "the backward pass of a layer whose weight is sharded by columns"),
    "pipeline_forward": (6, "microbatches through stages, one message each"),
    "one_f_one_b": (6, "the order of forward and backward passes of a stage in 1F1B"),
    "zero_step": (7, "an SGD step of which each rank computes only its shard"),
    "gradient_norm": (
        8,
        "the norm of gradients sharded on one axis and replicated on another",
    ),
    "rows_to_columns": (9, "reshard a matrix from rows to columns"),
    "backward_cycle": (10, "in which cycle of the clock a stage runs a backward pass"),
    "ring_attention": (11, "attention to keys and values that go around a ring"),
    "zigzag_positions": (11, "which tokens a rank holds, for equal work under a causal mask"),
    "uneven_all_to_all": (12, "an all-to-all with a different number of rows for each rank"),
}
