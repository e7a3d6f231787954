"""Wrong edits of the code that starts ranks and lets them communicate, ten of each world."""

from tests.promises.breaking import Break, Promise

THREADS = ("unit/ranks/test_threads.py",)
PROCESSES = ("unit/ranks/test_launch.py", "unit/ranks/test_settings.py", "unit/test_start.py")


def wrong(name: str, tests: tuple[str, ...], where: str, old: str, new: str) -> Promise:
    return Promise(name, "", "", Break(where, old, new), tests)


OF_THREADS = [
    wrong("a mean is a sum", THREADS, "_reduced", "kind == Reduction.AVG", "False"),
    wrong(
        "a factor is for the first rank alone",
        *(THREADS, "_reduced", "one if factor == 1 else one * factor", "one"),
    ),
    wrong(
        "all ranks get the part of the first",
        *(THREADS, "ThreadGroup.reduce_scatter", "given[number][rank]", "given[number][0]"),
    ),
    wrong(
        "what is sent to all is that of the next rank",
        *(
            THREADS,
            "ThreadGroup.alltoall",
            "_write(part, given[rank]",
            "_write(part, given[rank - 1]",
        ),
    ),
    wrong(
        "a broadcast is always the first rank's",
        *(THREADS, "ThreadGroup.broadcast", "(opts.rootRank, opts.rootTensor)", "(0, 0)"),
    ),
    wrong(
        "a message is taken from whoever sends first",
        *(
            THREADS,
            "ThreadGroup._meet",
            "if source in (-1, one.source) or one.source == -1",
            "if one",
        ),
    ),
    wrong(
        "Python's generator is the same for all ranks",
        *(THREADS, "State.apply", "random.setstate(self.python)", "pass"),
    ),
    wrong(
        "different collectives meet",
        THREADS,
        "ThreadGroup._join",
        "elif under_way.call.likeness() != call.likeness()",
        "elif False",
    ),
    wrong(
        "autograd sees what is computed for others",
        *(THREADS, "_write", "tensor.data.copy_(value)", "tensor.copy_(value)"),
    ),
    wrong(
        "meshes of two worlds are equal",
        *(THREADS, "MeshIdentities.get_ident", "self._number_of_world * MOST_THREADS + ", ""),
    ),
    wrong(
        "the last error of a world counts",
        *(THREADS, "Turns._end", "self.failure or (number, error)", "(number, error)"),
    ),
]
OF_PROCESSES = [
    wrong(
        "results are in reverse order",
        *(PROCESSES, "Ranks.receive_all"),
        "[pickles.loads(messages[rank]) for rank in range(len(self))]",
        "[pickles.loads(messages[rank]) for rank in reversed(range(len(self)))]",
    ),
    wrong(
        "a rank that lost its peers is blamed first",
        *(PROCESSES, "_raise_first_cause", 'error[1]["lost_peer"])', 'not error[1]["lost_peer"])'),
    ),
    wrong(
        "any number of ranks fits",
        PROCESSES,
        "check_local_ranks",
        "if num_ranks <= most:",
        "if True:",
    ),
    wrong(
        "the user's own limit is ignored",
        *(
            PROCESSES,
            "check_local_ranks",
            "by_machine if allowed is None else allowed",
            "by_machine",
        ),
    ),
    wrong(
        "a user's mistake is an error of a rank",
        *(PROCESSES, "_raise_first_cause", "raise mistake", "pass"),
    ),
    wrong(
        "the signal that killed a rank is not named",
        *(PROCESSES, "_how_ended", "was killed by", "ended by"),
    ),
    wrong(
        "deterministic algorithms stay on",
        *(PROCESSES, "own_settings", "undo.callback(set_deterministic, deterministic())", "pass"),
    ),
    wrong(
        "Python's generator is not put back",
        *(PROCESSES, "generators_restored", "random.setstate(states[0])", "pass"),
    ),
    wrong(
        "the rank on a machine is taken as the rank",
        *(
            PROCESSES,
            "torchrun_place",
            '("RANK", "WORLD_SIZE", "LOCAL_RANK"',
            '("LOCAL_RANK", "WORLD_SIZE", "RANK"',
        ),
    ),
    wrong(
        "each rank takes all cores",
        *(PROCESSES, "open_world", "num_cores() // place.local_world_size", "num_cores()"),
    ),
]
