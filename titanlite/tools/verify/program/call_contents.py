"""On a rank: what the calls of modules run, unlike on one process, and read of other microbatches.

Parallel code has its own lines, so that often no single line is the first wrong one. But it has no
reason to leave out an activation, a norm or a mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from titanlite.tools.verify.program.values import COMMUNICATION, Values
from titanlite.tools.verify.record import around, module_of, operator_of

# Operators that compute nothing.
ARRANGE = (
    *("view", "_unsafe_view", "reshape", "transpose", "t", "permute", "clone", "alias", "split"),
    *("split_with_sizes", "chunk", "slice", "select", "unbind", "index", "cat", "stack", "expand"),
    *("squeeze", "unsqueeze", "flatten", "unflatten", "contiguous", "index_select", "as_strided"),
    "lift_fresh",
)
# What parallel code may compute besides, or otherwise.
FREE = (
    *(*ARRANGE, "add", "sub", "rsub", "mul", "div", "neg", "mm", "addmm", "bmm", "baddbmm", "mv"),
    *("dot", "linear", "matmul", "sum", "mean", "amax", "amin", "max", "min", "maximum", "minimum"),
    *("eq", "ne", "lt", "le", "gt", "ge", "any", "all", "arange", "fill", "copy", "_to_copy"),
    *("detach", "gather", "embedding", "remainder", "floor_divide", "bincount", "nonzero"),
    *("repeat", "constant_pad_nd", "roll", "flip", "cumsum", "sort", "argsort"),
    *("_local_scalar_dense", "scalar_tensor", "lerp", "addcmul", "equal", "eye", "set"),
)
BEGINNINGS = ("new_", "zero", "one", "empty", "full", "scatter", "index_", "logical_", "bitwise_")
# What one may write out: with these operators, those.
SOFTMAXES = ("_softmax", "_log_softmax", "logsumexp", "nll_loss_forward")
NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm")
WRITTEN_OUT = {
    **dict.fromkeys(("exp", "log", "log1p"), SOFTMAXES),
    **dict.fromkeys(("sqrt", "rsqrt", "pow", "square", "reciprocal", "var", "std"), NORMS),
}
# They may stand for each other.
MASKS = ("where", "triu", "tril", "masked_fill")
# What code that has only a part of the rows or columns computes besides.
ALSO_OF_PARTS = {*WRITTEN_OUT, "masked_fill", "clamp", "clamp_min", "clamp_max"}

Operators = Mapping[str, dict[str, str]]
"""Call of a module -> the operators that it runs itself -> a line of each."""


def left_out(values: Values, known: Values) -> dict[str, tuple[str, str]]:
    """For calls of modules that run here, an operator with its line that one process alone runs."""
    return _apart(_operators(values), _operators(known))


def added(values: Values, known: Values) -> dict[str, tuple[str, str]]:
    """The same for an operator that only this rank runs."""
    found = _apart(_operators(known), _operators(values))
    return {call: one for call, one in found.items() if one[0] not in ALSO_OF_PARTS}


def _apart(own: Operators, theirs: Operators) -> dict[str, tuple[str, str]]:
    found = {}
    for call, operators in theirs.items():
        module = module_of(call)
        inside, there = _inside(own, module), _inside(theirs, module)
        more = _others(inside) - there
        if not inside or not more <= ALSO_OF_PARTS:
            continue
        here = inside.union(*(own[outer] for outer in around(module) if outer in own))
        here.update(*(WRITTEN_OUT.get(name, ()) for name in more))
        if apart := sorted(_others(operators) - here):
            found[call] = apart[0], operators[apart[0]]
    return found


def carried(values: Values, num_microbatches: int) -> dict[str, tuple[str, str, bool]]:
    """For calls of modules, the first line that reads what an earlier microbatch computes in
    another line, with that, and whether it writes there what was there before.
    """
    found: dict[str, tuple[str, str, bool]] = {}
    if num_microbatches < 2 or values.num_passes % num_microbatches:
        return found
    per_microbatch = values.num_passes // num_microbatches
    index = [(number - 1) // per_microbatch for number in values.passes]
    for number, ((call, line, _), _) in enumerate(values.places):
        for source in values.sources[number]:
            if call and 0 <= index[source] < index[number]:
                there = values.places[source][0]
                writes = operator_of(there).endswith("_")
                found.setdefault(call, (line, there[1], writes))
    return found


def _operators(values: Values) -> Operators:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for (call, line, operator), _ in values.places:
        if not operator.startswith((*COMMUNICATION, "fsdp")):
            name = operator_of((call, line, operator)).rstrip("_")
            found[call].setdefault("masked_fill" if name in MASKS else name, line)
    return found


def _inside(operators: Operators, module: str) -> set[str]:
    """The operators that calls of a module run, and those of modules in it."""
    calls = [c for c in operators if module in (own := module_of(c), *around(own))]
    return {name for call in calls for name in operators[call]}


def _others(names: Iterable[str]) -> set[str]:
    return {name for name in names if name not in FREE and not name.startswith(BEGINNINGS)}
