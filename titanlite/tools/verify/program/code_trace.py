"""On a rank: compares what modules receive and return with the reference's.

The part of the reference's tensor that a rank should have follows from sizes: a dimension as long
as the batch has the rank's rows, one as long as the sequence its columns, and one that is still n
times too long is cut into n chunks along an axis of n ranks. The tokens may also be flattened, or
cut into sequence shards first. If no such part fits, equal rows or columns are looked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from titanlite.modules.shards import local_part
from titanlite.ranks.temporary import save_temporary
from titanlite.tools.verify.agreement import (
    agreement,
    dense,
    scales_along,
    without_padding,
    wrong_places,
)
from titanlite.tools.verify.events import Events
from titanlite.tools.verify.program.batches import Where
from titanlite.tools.verify.program.local_parts import FusedCut, numbers_of
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.record import Agreement, ModuleOutput, called_by, is_input, module_of
from titanlite.tools.verify.tracing import Compared, Select, Tracer, gathered, in_all
from titanlite.tools.verify.wording import listed

# No more ways to cut an output than this are tried, and no larger gradients are saved.
MOST_WAYS = 64
# Indices that are named.
MOST_INDICES = 4
MOST_ELEMENTS = 1 << 24
# In no more calls of a module another order is looked for.
MOST_CALLS = 16


def _fits_no_cut(call: Tensor, whole: Tensor) -> bool:
    """Whether the sizes of several dimensions are none of an even cut: the caller chose them."""
    return sum(n % own > 0 for own, n in zip(call.shape, whole.shape, strict=False) if own) > 1


@dataclass
class CodeTracer(Tracer):
    """Compares a rank of other code; looks for the parts that fit."""

    where: Where | None
    request: Request
    tolerance: float
    sizes: dict[int, list[int]] = field(default_factory=dict, kw_only=True)
    """Number of microbatches -> how many of the rank's rows each of them has."""
    layouts: dict[tuple[int, int], Tensor] = field(default_factory=dict, kw_only=True)
    """Numbers of rows, the rank's and all -> which of all rows a tensor had, which others may."""
    orders: dict[tuple[int, int], Tensor] = field(default_factory=dict, kw_only=True)
    """The same, of what modules receive and return, in a step whose lines are watched."""
    subsets: dict[tuple[int, int], Tensor] = field(default_factory=dict, kw_only=True)
    """Numbers of rows, the rank's and all -> which it has, as of a graph's edges, or tokens."""
    padding: dict[int, Tensor] = field(default_factory=dict, kw_only=True)
    """Number of tokens -> which of them one process, which has them in other calls, lacks."""
    features: Tensor | None = field(default=None, kw_only=True)
    """Which features of the reference's the output that is compared has, if declared."""

    # The loss may be a mean over the rank's own part.
    scales_gradients = True

    def leaves_out(self, event: str) -> bool:
        """Whether the caller named the module, or it is a table of some rows alone.

        Such a table is given numbers of its own rows, and others may be masked after it.
        """
        module = module_of(event)
        return self.request.leaves_out(module) or module in self._tables_of_rows

    @functools.cached_property
    def _tables_of_rows(self) -> set[str]:
        local, found = self.subject.local, set[str]()
        for part in self.subject.modules:
            for name, module in part.named_modules():
                known = self.subject.name_of(part, name)
                table = local.get(f"{known}.weight")
                if type(module) in (nn.Embedding, nn.EmbeddingBag) and table is not None:
                    is_part = table.parameter.size(0) < table.shape[0]
                    is_part = is_part and not isinstance(table.parameter, DTensor)
                    found |= {known} if is_part else set()
        return found

    def tolerance_of(self, tensor: Tensor) -> float:
        return self.tolerance

    def batch_axes(self) -> tuple[str, ...]:
        cells = gathered(self.where and self.where.cells)
        groups = {a: dist.get_process_group_ranks(g) for a, g in self.subject.groups.items()}
        own = [axis for axis, ranks in groups.items() if len({cells[r] for r in ranks}) > 1]
        found = {axis for of_rank in gathered(own) for axis in of_rank}
        return tuple(axis for axis in groups if axis in found)

    def is_of_no_data(self, event: str, known: Mapping[str, Any]) -> bool:
        where, stack, seen = self.where, [event], {event}
        of_batch = set() if where is None else {where.num_rows, where.num_rows * where.num_columns}
        while stack:
            sizes = {size for one in known.get(stack[-1], ()) for size in one.shape}
            if where is None or where.num_rows < 2 or sizes & of_batch:
                return False
            new = [one for one in self.reference.flow.get(stack.pop(), ()) if one not in seen]
            stack += new
            seen |= {*new}
        return True

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's parts: the reference's are those after its step."""
        local = self.subject.local
        return {name: local_part(one.parameter.detach()) for name, one in local.items()}

    def compare(self, event: str, calls: list[Tensor], known: list[Tensor]) -> Compared | None:
        """A tensor compared with the best fitting parts of the reference's; None if none fits."""
        self.features = None if is_input(event) else self._declared(module_of(event))
        calls = calls[-(self.request.microbatches or len(calls)) :]
        compared = self._compare(calls, known)
        if compared is None and len(known) > 1:
            return self._as_tokens(calls, known)
        if len(calls) > 2 and (compared is None or compared[0].is_moved):
            # A pipeline's first step starts with a call that only finds shapes.
            compared = self._compare(calls[1:], known) or compared
        # What the caller cuts in ways of his own, as a part of a graph, has no counterpart.
        is_wrong = is_input(event) and compared is not None and compared[0].wrong_calls
        if is_wrong and _fits_no_cut(calls[0], known[0]):
            return None
        return compared

    def _declared(self, module: str) -> Tensor | None:
        """Which rows of the reference's weight a module has, if these are no chunk that follows
        from the sizes alone.
        """
        name = f"{module}.weight"
        is_fused = name in self.subject.local and isinstance(self.subject.local[name].cut, FusedCut)
        return self._rows_held(name) if is_fused or self.request.shard is not None else None

    def _rows_held(self, name: str) -> Tensor | None:
        """Which rows of the reference's matrix this rank has; None if it has parts of rows."""
        local = self.subject.local.get(name)
        if local is None or local.parameter.ndim != 2:
            return None
        numbers = local.part_of(torch.arange(local.shape.numel()).view(local.shape))
        is_whole = numbers.ndim == 2 and numbers.size(1) == local.shape[1]
        return numbers[:, 0] // local.shape[1] if is_whole else None

    def _compare(self, calls: list[Tensor], known: list[Tensor]) -> Compared | None:
        if len(known) not in (1, len(calls)) or not calls[0].ndim:
            return None
        sizes = [call.size(0) for call in calls]
        if len(known) == 1 and self.where and sum(sizes) == len(self.where.rows):
            self.sizes.setdefault(len(calls), sizes)
        if len(known) == 1 < len(calls) and (pieces := self._in_pieces(calls, known[0])):
            whole = known[0]
            right = [agreement(c, one(whole), whole) for c, one in zip(calls, pieces, strict=True)]
            return in_all(right, ()), pieces
        chosen: list[Select] = []
        found: list[Agreement] = []
        is_moved, is_chosen, elsewhere, is_padded = False, False, "", False
        has_some = self.where is not None and len(calls) > 1 and sum(sizes) < len(self.where.rows)
        for index, call in enumerate(calls):
            whole = known[index] if len(known) == len(calls) else known[0]
            share = (index, len(calls)) if len(known) == 1 else (0, 1)
            best: tuple[Agreement, Select] | None = None
            for select in self.ways(call, whole, share):
                part = select(whole)
                one = agreement(without_padding(call, part), part, whole)
                if best is None or one.error < best[0].error:
                    best = one, select
                if one.difference <= self.tolerance:
                    break
            if place := self._of_other_columns(call, whole):
                elsewhere = place
            elif best is None or not best[0].difference <= self.tolerance:
                # Rows of zeros are taken for padding only where no part of the reference's fits.
                moved = self._match(call, whole, share, may_pad=best is None)
                if moved is not None:
                    if best is not None and self._tokens(whole, share) is not None:
                        elsewhere = "the rows or columns of one process, in another order"
                    best = agreement(call, moved(whole), whole), moved
                    # A pipeline in two directions has some microbatches in each of its stages.
                    is_some = has_some and _is_block(_batch_rows(moved, call, whole))
                    is_some = is_some or isinstance(moved, FusedCut)
                    is_chosen, is_moved = True, is_moved or not is_some
            if best is None:
                return None
            found.append(best[0])
            chosen.append(best[1])
            is_padded = is_padded or best[1](whole).numel() < call.numel()
        wrong = [
            i for i, one in enumerate(found) if is_moved or not one.difference <= self.tolerance
        ]
        output = in_all(found, wrong)
        output.is_moved, output.elsewhere, output.is_padded = is_moved, elsewhere, is_padded
        if is_chosen and len(known) == 1:
            both = zip(chosen, calls, strict=True)
            rows = [row for one, call in both for row in _batch_rows(one, call, known[0])]
            output.rows, output.num_rows = tuple(rows), len(known[0]) * (len(rows) == sum(sizes))
        if len(wrong) == len(calls) and not is_moved and calls[0].is_floating_point():
            most = self.tolerance * max(one.abs().max().item() for one in known)
            wholes = known if len(known) == len(calls) else known * len(calls)
            parts = [(c, one(w)) for c, one, w in zip(calls, chosen, wholes, strict=True)]
            places = {wrong_places(*both, most) for both in parts}
            scales = {scales_along(*both) for both in parts}
            output.places = places.pop() if len(places) == 1 else ""
            output.scales = scales.pop() if len(scales) == 1 else ""
        number = len(calls) if len(known) == 1 else 1
        output.is_part = calls[0].numel() * number < known[0].numel()
        shape, every = calls[0].shape, known[0].shape
        length = 0 if self.where is None else self.where.num_columns
        output.cut_dims = tuple(
            dim
            for dim, (own, size) in enumerate(zip(shape, every, strict=False))
            if own < size and (dim < len(every) - 1 or size == length)
        )
        if output.is_part and (self.where is None or every[0] != self.where.num_rows):
            output.has_equal_rows = len(known[0].unique(dim=0)) < every[0]
        if not wrong and len(calls) == 1 and len(shape) > 2 and output.cut_dims == (1,):
            # Where the cut was in the middle, tokens that are flattened later lie apart.
            numbers = torch.arange(every[:2].numel()).view(*every[:2], *[1] * (len(every) - 2))
            own_tokens = chosen[0](numbers.expand(every)).flatten(2)[..., 0].flatten()
            self.subsets.setdefault((len(own_tokens), every[:2].numel()), own_tokens)
        is_cut = number > 1 and output.cut_dims == (0,) and shape[0] * number == every[0]
        if is_cut and wrong and self.where is not None and every[0] % self.where.num_rows:
            output.cut = f"{list(shape)}, {list(every)} on one process"
        return output, chosen

    def _as_tokens(self, calls: Sequence[Tensor], known: Sequence[Tensor]) -> Compared | None:
        """Tokens that one process has in other calls, as sequences one by one, without padding.

        What the first tensor of as many tokens does not have in common is padding in all of them.
        """
        every = *calls, *known
        if any(not one.is_floating_point() or one.ndim < 2 or not one.numel() for one in every):
            return None
        if len({one.size(-1) for one in every}) > 1 or calls[0].size(-1) < 2:
            return None
        own, theirs = (torch.cat([t.flatten(0, -2) for t in some]) for some in (calls, known))
        most = self.tolerance * max(theirs.abs().max().item(), 1e-300)
        is_there = _nearest_rows(own, theirs)[1] <= most
        padding = self.padding.setdefault(len(own), ~is_there)
        if 2 * padding.sum() > len(own):
            return None
        wrong = ~is_there & ~padding
        part = own.where(~wrong[:, None], 0)
        output = in_all([agreement(own, part, theirs)], (0,) if wrong.any() else ())
        output.tokens = int(padding.sum()), len(own)
        return output, [lambda whole: whole]

    def _in_pieces(self, calls: Sequence[Tensor], whole: Tensor) -> list[Select]:
        """What takes the parts of calls that each have all of this rank's rows, and together its
        part in another dimension, one after the other, as in chunks of the sequence; else none.
        """
        if self.where is None or any(len(call) != len(self.where.rows) for call in calls):
            return []
        for dim in range(1, calls[0].ndim):
            rest = {(*call.shape[:dim], *call.shape[dim + 1 :]) for call in calls}
            if len(rest) > 1 or calls[0].ndim != whole.ndim:
                continue
            own, sizes = torch.cat(list(calls), dim), [call.size(dim) for call in calls]
            for select in self.ways(own, whole, (0, 1)):
                part = select(whole)
                is_right = part.shape == own.shape
                if is_right and agreement(own, part, whole).difference <= self.tolerance:
                    return [
                        functools.partial(_piece, select, sizes, dim, i) for i in range(len(calls))
                    ]
        return []

    def _of_other_columns(self, call: Tensor, whole: Tensor) -> str:
        """Whose columns a tensor has, if they are a chunk, and not those of this rank; or ""."""
        if self.where is None or call.ndim != whole.ndim:
            return ""
        own, columns = len(self.where.columns), self.where.num_columns
        cut = [d for d, size in enumerate(whole.shape) if call.size(d) != size]
        if len(cut) != 1 or whole.size(cut[0]) != columns or call.size(cut[0]) != own:
            return ""
        chunks = whole.split(own, cut[0])
        found = [i for i, one in enumerate(chunks) if torch.equal(one, call)]
        if not found or torch.equal(whole.index_select(cut[0], self.where.columns), call):
            return ""
        return f"positions {found[0] * own} to {found[0] * own + own - 1} of {columns}"

    def in_order(self, kept: Events, known: Mapping[str, Any]) -> Mapping[str, Any]:
        def is_right(own: Tensor, whole: Tensor) -> bool:
            return any(
                (part := select(whole)).shape == own.shape
                and agreement(own, part, whole).difference <= self.tolerance
                for select in self.ways(own, whole, (0, 1))
            )

        for event, calls in kept.first.items():
            theirs, every = known["outputs"].get(event, ()), tuple(range(len(calls)))
            if 1 < len(theirs) == len(calls) <= MOST_CALLS and not self.order:
                order = tuple(
                    next((i for i in every if is_right(own, theirs[i])), -1) for own in calls
                )
                is_other = tuple(sorted(order)) == every != order
                self.order = order if is_other else ()
        if not self.order:
            return known
        return {**known} | {
            kind: {
                event: [own[i] for i in self.order] if len(own) == len(self.order) else own
                for event, own in known[kind].items()
            }
            for kind in ("outputs", "output_gradients")
        }

    def look_closer(
        self, event: str, output: ModuleOutput, kept: Events, known: Mapping[str, list[Tensor]]
    ) -> None:
        """Which indices a wrong tensor is wrong for, or whether its rows are those of others."""
        own, (select,), whole = kept.first[event][-1], self.chosen[event], known[event][0]
        part = select(whole)
        if is_input(event) and own.is_floating_point() and own.ndim:
            output.of_others = self._others(event, own, known)
        if own.shape != part.shape or own.ndim < 2 or not own.is_floating_point():
            return
        most = self.tolerance * whole.abs().max()
        apart = (own - part).abs().amax(-1) > most
        for other, calls in kept.first.items():
            indices = calls[-1]
            is_read = is_input(other) and called_by(other) == event and indices.ndim
            is_read = is_read and indices.dtype != torch.bool
            if is_read and not indices.is_floating_point() and indices.shape == apart.shape:
                wrong, rows = indices[apart].unique(), whole.flatten(0, -2)
                given = [t[0] for e, t in known.items() if is_input(e) and called_by(e) == event]
                is_small = len(rows) * own[apart].numel() < MOST_ELEMENTS
                for theirs in (t for t in given if t.shape == whole.shape[:-1] and is_small):
                    same = (own[apart][:, None] - rows).abs().amax(-1) <= most
                    steps = theirs.flatten() - indices[apart][:, None]
                    step = steps[same].mode().values if same.any() else 0
                    if (same & (steps == step)).any(1).sum() > len(same) / 2:
                        output.places = f"where the module reads {listed(wrong.tolist(), 4)}, and "
                        output.places += f"mostly gives the row of that index {int(step):+d}: look "
                        output.places += "at the first index of each rank's shard"
                if len(wrong) <= MOST_INDICES and not torch.isin(indices[~apart], wrong).any():
                    output.places = f"where the module reads {listed(wrong.tolist())}"
                    here = self._rows_held(f"{module_of(event)}.weight")
                    ends = () if here is None else (here[0] - 1, here[0], here[-1], here[-1] + 1)
                    if all(int(one) in map(int, ends) for one in wrong):
                        output.places += ", at the border of two shards of its weight: look at the "
                        output.places += "range of indices that each rank takes"
        if own.size(-1) == whole.size(-1) > 2 and output.is_moved is False:
            unit = [torch.nn.functional.normalize(t.flatten(0, -2)) for t in (own, whole, part)]
            if find_rows(unit[0], unit[1], self.tolerance) is not None:
                difference = agreement(unit[0], unit[2], unit[1]).difference
                output.has_other_rows = difference > self.tolerance
                sizes = own.flatten(0, -2).norm(dim=1) / part.flatten(0, -2).norm(dim=1)
                sizes = sizes[sizes.isfinite()]
                is_even = (
                    not len(sizes) or sizes.max() - sizes.min() <= self.tolerance * sizes.max()
                )
                output.has_scaled_rows = not (output.has_other_rows or is_even)

    def _others(
        self, event: str, own: Tensor, known: Mapping[str, list[Tensor]]
    ) -> tuple[str, ...]:
        """The modules of one kind, such as experts, among which a tensor's rows are dealt out."""
        kind, width = re.sub(r"\d+", "", event), own.size(-1) if own.ndim > 1 else 1
        rows = {
            other: calls[0].reshape(-1, width)
            for other, calls in known.items()
            if re.sub(r"\d+", "", other) == kind and calls[0].shape[1:] == own.shape[1:]
        }
        if len(rows) < 2:
            return ()
        every = torch.cat(list(rows.values()))
        most = self.tolerance * every.abs().max().item()
        if (found := find_rows(own.reshape(-1, width), every, most)) is None:
            return ()
        names = [other for other, one in rows.items() for _ in one]
        used = {names[row] for row in found[found >= 0].tolist()}
        # All of one other module is that module's input.
        return tuple(sorted(map(module_of, used - {event}))) if len(used) > 1 else ()

    def ways(self, call: Tensor, whole: Tensor, share: tuple[int, int]) -> Iterator[Select]:
        """The parts of `whole` that have the shape of `call`, a microbatch (index, count)."""
        if call.ndim == whole.ndim:
            per_dim = [
                list(self._ways_of_dim(call, whole, dim, share))
                or list(self._padded(call, whole, dim, share))
                for dim in range(call.ndim)
            ]
            for cuts in itertools.islice(itertools.product(*per_dim), MOST_WAYS):
                yield functools.partial(_cut, cuts)
        yield from self._known_layout(call, whole)
        grid = self._tokens(whole, share)
        if grid is None or call.ndim < 2:
            return
        own, width = call[..., 0].numel(), call.size(-1)
        if own == 0 or grid.numel() % own or width == 0 or whole.size(-1) % width:
            return
        count, features = grid.numel() // own, whole.size(-1) // width
        for index in self._indices(count):
            # Sequence shards, rows or flattened tokens, in order, or the sequence dimension first.
            columns = grid.chunk(count, 1)[index] if grid.size(1) % count == 0 else grid[:, :0]
            for tokens in (columns, columns.T, grid.flatten().chunk(count)[index]):
                is_turned = tokens is not columns and tokens.ndim == 2
                if tokens.numel() != own or (is_turned and call.shape[:-1] != tokens.shape):
                    continue
                for feature in self._indices(features):
                    chunk = feature, features
                    yield functools.partial(_take_rows, tokens.flatten(), chunk, call.shape)

    def _known_layout(self, call: Tensor, whole: Tensor) -> Iterator[Select]:
        """Rows in the order of another tensor of this step, and a chunk of their features."""
        if call.ndim < 2 or whole.ndim < 2 or not call.size(-1) or whole.size(-1) % call.size(-1):
            return
        rows = self.layouts.get((call[..., 0].numel(), whole[..., 0].numel()))
        count = whole.size(-1) // call.size(-1)
        if rows is None:
            return
        for index in self._indices(count):
            yield functools.partial(_take_rows, rows, (index, count), call.shape)

    def in_known_order(self, own: Tensor, whole: Tensor) -> bool:
        """Whether a tensor, such as a vector, has its rows in the order of a module's."""
        if own.ndim != whole.ndim or own.shape[1:] != whole.shape[1:]:
            return False
        rows = self.orders.get((len(own), len(whole)))
        if rows is None:
            return False
        part = _rows_or_zero(whole.flatten(1) if whole.ndim > 1 else whole[:, None], rows)
        return agreement(own, part.view(own.shape), whole).difference <= self.tolerance

    def _tokens(self, whole: Tensor, share: tuple[int, int]) -> Tensor | None:
        """The numbers [rows, columns] of this rank's tokens among all rows of `whole`."""
        if self.where is None or whole.ndim < 2 or self.where.num_columns == 1:
            return None
        if whole[..., 0].numel() != self.where.num_rows * self.where.num_columns:
            return None
        return self._rows(share)[:, None] * self.where.num_columns + self.where.columns[None]

    def _match(
        self,
        call: Tensor,
        whole: Tensor,
        share: tuple[int, int],
        *,
        may_pad: bool,
        keeps: bool = True,
    ) -> Select | None:
        """Rows, or columns of this rank's tokens, of the reference, in the order of `call`."""
        if call.ndim < 2 or whole.ndim < 2 or not call.numel():
            return None
        if not call.is_floating_point():
            chosen = _chosen(call, whole)
            where = self.where
            if chosen is not None and where is not None:
                # Samples and tokens in another order may be the error itself.
                is_other = whole.size(chosen.dim) not in (where.num_rows, where.num_columns)
                chosen = chosen if is_other else None
            if chosen is not None:
                self.subsets[len(chosen.numbers), whole.size(chosen.dim)] = chosen.numbers
            return chosen or _trimmed(call, whole)
        if not may_pad and not call.flatten(0, -2).any(1).all():
            return None
        own, known = call.flatten(0, -2), whole.flatten(0, -2)
        most = self.tolerance * max(known.abs().max().item(), 1e-300)
        if own.size(1) == known.size(1) > 1 and own.size(0) > 1:
            rows = find_rows(own, known, most)
            if rows is not None:
                if keeps and len(rows) < len(known):
                    # All rows in another order may be the error itself.
                    self.layouts.setdefault((len(rows), len(known)), rows)
                return lambda tensor: _rows_or_zero(tensor.flatten(0, -2), rows).view(call.shape)
        grid = self._tokens(whole, share)
        tokens = torch.arange(known.size(0)) if grid is None else grid.flatten()
        if own.size(0) == len(tokens) > 1 and own.size(1) <= known.size(1):
            columns = find_rows(own.T, known[tokens].T, most)
            if columns is not None:
                return lambda tensor: _rows_or_zero(
                    tensor.flatten(0, -2)[tokens].T, columns
                ).T.reshape(call.shape)
        return None

    def has_rows_of(self, own: Tensor, whole: Tensor, share: tuple[int, int]) -> bool:
        """Whether a tensor has rows, or columns, of the reference's, in any order."""
        return self._match(own, whole, share, may_pad=False, keeps=False) is not None

    def finds_moved(self, call: Tensor, whole: Tensor, share: tuple[int, int]) -> bool | None:
        """Whether a tensor has rows or columns of the reference's in another order.

        None for consecutive rows of it, which code that chooses rows may give.
        """
        if not self.has_rows_of(call, whole, share):
            return False
        own, known = call.flatten(0, -2), whole.flatten(0, -2)
        if own.size(1) != known.size(1) or len(own) >= len(known):
            return True
        first = int((known - own[0]).abs().amax(1).argmin())
        rows = known[first : first + len(own)]
        is_block = rows.shape == own.shape
        is_block = is_block and agreement(own, rows, known).difference <= self.tolerance
        return None if is_block else True

    def _ways_of_dim(
        self, call: Tensor, whole: Tensor, dim: int, share: tuple[int, int]
    ) -> Iterator[tuple[Tensor | None, int, int]]:
        """Selections of one dimension: the numbers to take first, then a chunk (index, count)."""
        own, size = call.size(dim), whole.size(dim)
        is_last = dim == call.ndim - 1
        if size == 1 < own:
            # One process broadcasts what the rank has for each row.
            yield torch.zeros(own, dtype=torch.long), 0, 1
        if is_last and self.features is not None and len(self.features) == own < size:
            yield self.features, 0, 1
        if own < size and (own, size) in self.subsets:
            yield self.subsets[own, size], 0, 1
        for base in self._bases(own, size, share):
            left = size if base is None else len(base)
            if left == own:
                yield base, 0, 1
            elif own and left % own == 0:
                for index in self._indices(left // own):
                    yield base, index, left // own

    def _padded(
        self, call: Tensor, whole: Tensor, dim: int, share: tuple[int, int]
    ) -> Iterator[tuple[Tensor | None, int, int]]:
        """Chunks of one dimension that was padded to be cut, without the padding."""
        own, size = call.size(dim), whole.size(dim)
        for base in self._bases(own, size, share) if own else ():
            numbers = torch.arange(size) if base is None else base
            count = math.ceil(len(numbers) / own)
            for index in self._indices(count):
                yield numbers[index * own :][:own], 0, 1

    def _bases(self, own: int, size: int, share: tuple[int, int]) -> list[Tensor | None]:
        """What a dimension's numbers may be before it is cut; None for all of them."""
        bases: list[Tensor | None] = [None] if own == size else []
        if self.where is not None:
            rows = self._rows(share)
            columns, num_columns = self.where.columns, self.where.num_columns
            if size == self.where.num_rows:
                bases.append(rows)
            if size == num_columns and num_columns > 1:
                if own == len(columns):
                    # A chunk of the same size has other columns, as where they are dealt in turn.
                    return [columns]
                bases.append(columns)
            if size == self.where.num_rows * num_columns and num_columns > 1:
                bases.append((rows[:, None] * num_columns + columns[None]).flatten())
            times = size // self.where.num_rows
            if times > 1 and size % self.where.num_rows == 0:
                # Several rows for each of the batch: batches below each other, or row by row.
                copies = torch.arange(times)
                bases.append((copies[:, None] * self.where.num_rows + rows[None]).flatten())
                bases.append((rows[:, None] * times + copies[None]).flatten())
        return bases + [None] * (own != size)

    def _rows(self, share: tuple[int, int]) -> Tensor:
        assert self.where is not None
        index, count = share
        rows = self.where.rows
        if count in self.sizes:
            return rows.split(self.sizes[count])[index]
        return rows.chunk(count)[index] if len(rows) % count == 0 else rows

    def _indices(self, count: int) -> Iterator[int]:
        """This rank's index among `count` along one axis, or along two taken together."""
        if count == 1:
            yield 0
        for number in (1, 2):
            for axes in itertools.combinations(self.grid.axes_in_use, number):
                if self.grid.degree_of(axes) == count:
                    yield self.grid.place_on(axes, self.rank)


def _cut(cuts: Sequence[tuple[Tensor | None, int, int]], whole: Tensor) -> Tensor:
    for dim, (numbers, index, count) in enumerate(cuts):
        if numbers is not None:
            whole = whole.index_select(dim, numbers)
        whole = whole.chunk(count, dim)[index] if count > 1 else whole
    return whole


def _piece(select: Select, sizes: list[int], dim: int, index: int, whole: Tensor) -> Tensor:
    return select(whole).split(sizes, dim)[index]


def _batch_rows(select: Select, call: Tensor, whole: Tensor) -> list[int]:
    """The rows, of dimension 0, that a selection takes; none if they could be taken for others."""
    if call.shape[1:] != whole.shape[1:] or len(whole.flatten(1).unique(dim=0)) < len(whole):
        return []
    numbers = (select(torch.arange(1, whole.numel() + 1).view(whole.shape)) - 1) // whole[0].numel()
    # A first token, say, may be that of several rows. Padding, which is 0, becomes row -1: none.
    return list(numbers.flatten(1).mode(1).values.tolist())


def _is_block(rows: Sequence[int]) -> bool:
    return bool(rows) and list(rows) == list(range(rows[0], rows[0] + len(rows)))


def _take_rows(rows: Tensor, feature: tuple[int, int], shape: torch.Size, whole: Tensor) -> Tensor:
    """Some rows, and a chunk (index, count) of their features, in a shape."""
    index, count = feature
    return _rows_or_zero(whole.flatten(0, -2), rows).chunk(count, -1)[index].reshape(shape)


def _trimmed(call: Tensor, whole: Tensor) -> Select | None:
    """Rows of the reference's, in any order, without an end of all of them that may be padding."""
    is_part = call.ndim == whole.ndim == 2 and 1 < call.size(1) < whole.size(1)
    if not is_part or call.numel() * len(whole) > MOST_ELEMENTS:
        return None
    same = (call[:, None] == whole[None, :, : call.size(1)]).all(-1)
    rows = same.double().argmax(1)
    return (lambda tensor: tensor[rows, : call.size(1)]) if same.any(1).all() else None


def _chosen(call: Tensor, whole: Tensor) -> FusedCut | None:
    """Some of the reference's numbers in one dimension, in order, as the edges of a part of a graph
    are; not a chunk, which may be that of another rank.
    """
    cut = [
        d for d, sizes in enumerate(zip(call.shape, whole.shape, strict=False)) if len({*sizes}) > 1
    ]
    if len(cut) != 1 or call.ndim != whole.ndim:
        return None
    numbers = numbers_of(call, whole, cut[0])
    steps = {later - one for one, later in itertools.pairwise(numbers)}
    is_chosen = len(numbers) > 1 and min(steps) > 0 and steps != {1}
    return FusedCut(cut[0], torch.tensor(numbers)) if is_chosen else None


def find_rows(own: Tensor, known: Tensor, most: float) -> Tensor | None:
    """For each row of `own` a row of `known` within `most`, -1 for a row of zeros; or None."""
    chosen, apart = _nearest_rows(own, known)
    is_zero = ~own.any(1)
    chosen[is_zero] = -1
    if is_zero.all() or not (apart <= most)[~is_zero].all():
        return None
    return chosen


def _nearest_rows(own: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of `own` the row of `known` that equals it, if one does, and how far it is."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(own.size(1), generator=generator, dtype=torch.float64)
    order = (known.double() @ direction).sort()
    place = torch.searchsorted(order.values, own.double() @ direction)
    # The nearest row may lie on either side, and rounding may exchange neighbours.
    beside = torch.stack([(place + step).clamp(0, len(order.values) - 1) for step in (-1, 0, 1)])
    rows = order.indices[beside]
    apart = (known[rows] - own).abs().amax(-1)
    best = apart.min(0)
    return rows.gather(0, best.indices[None])[0], best.values


def same_rows(own: Tensor, whole: Tensor) -> bool:
    """Whether a matrix has only rows of another, in any order."""
    part = local_part(own.detach()).cpu()
    if part.ndim != 2 or whole.ndim != 2 or part.size(1) != whole.size(1) or not part.any():
        return False
    return find_rows(part, whole, 0.0) is not None


def has_elements_of(own: Tensor, whole: Tensor) -> bool:
    """Whether a tensor has the elements of another, in any order."""
    part = local_part(own.detach()).cpu()
    is_same = part.numel() == whole.numel() and part.numel() > 1
    return is_same and torch.equal(part.flatten().sort().values, whole.flatten().sort().values)


def _rows_or_zero(whole: Tensor, rows: Tensor) -> Tensor:
    return whole[rows.clamp(min=0)] * (rows >= 0).to(whole.dtype)[:, None]


def save_part(path: Path, tracer: CodeTracer, batch: Any, digest: str, wrong: Sequence[str]) -> str:
    """Save a rank's part of the batch and its wrong gradients for `find_shares`."""
    local, rank = tracer.subject.local, tracer.rank
    gradients, num_elements = {}, 0
    for name in sorted(wrong, key=lambda name: local[name].shape.numel()):
        gradient = local[name].parameter.grad
        num_elements += local[name].shape.numel()
        if gradient is None or num_elements > MOST_ELEMENTS:
            continue
        elements = local[name].part_of(
            torch.arange(local[name].shape.numel()).view(local[name].shape),
            gradient if isinstance(gradient, DTensor) else None,
        )
        own = dense(local_part(gradient.detach())).cpu().flatten()
        if own.numel() == elements.numel():
            gradients[name] = own.clone(), elements.flatten().clone()
    own = tree_map(lambda leaf: local_part(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    found = {"rank": rank, "batch": own, "digest": digest, "gradients": gradients}
    found["sizes"] = tracer.sizes
    save_temporary(found, path)
    return str(path)
