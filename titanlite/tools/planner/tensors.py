"""The account of every tensor of a job as a table."""

from collections.abc import Mapping, Sequence

from titanlite.parallelize.float8.apply import compact
from titanlite.parallelize.tensor_account import BUFFER, LOCAL, TensorAccount
from titanlite.tools.tables import beside


def describe(accounts: Mapping[str, TensorAccount], width: int) -> list[str]:
    """The accounts as a table in lines of `width`; equal tensors of several blocks share a row."""
    rows: dict[tuple[str, ...], list[TensorAccount]] = {}
    for name, one in accounts.items():
        shape = " x ".join(map(str, one.shape)) or "scalar"
        layout = ", ".join(f"{axis} {how}" for axis, how in one.layout.items()) or "one rank"
        by: dict[str, list[str]] = {}
        for axis, how in one.completed.items():
            by.setdefault(how, []).append(axis)
        gradient = "; ".join(f"{how}: {', '.join(axes)}" for how, axes in by.items())
        if not gradient:
            gradient = "each rank" if one.is_trained else "frozen"
        if one.kind == BUFFER:
            is_local = LOCAL in one.layout.values()
            gradient = "buffer; the first rank's is saved" if is_local else "buffer"
        # Blocks are in one stage each, and a shared parameter is in several.
        stages = _ranges(one.stages) if len(one.stages) > 1 else ""
        rows.setdefault((compact([name])[0], shape, stages, layout, gradient), []).append(one)
    table = [("tensor", "shape", "stages", "layout", "gradient completed by")]
    for (name, shape, stages, layout, gradient), members in rows.items():
        times = f" ({len(members)})" if len(members) > 1 else ""
        numbers = sorted({stage for one in members for stage in one.stages})
        held = f"each of {stages}" if stages else _ranges(numbers)
        table.append((f"{name}{times}", shape, held, layout, gradient))
    is_split = any(row[2] != "0" for row in table[1:])
    cells = zip(*(row if is_split else (*row[:2], *row[3:]) for row in table), strict=True)
    return beside([[one.ljust(max(map(len, column))) for one in column] for column in cells], width)


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-3, 6" """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
