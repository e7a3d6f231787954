"""On a rank: keeps what each line of the caller's code computes in the forward pass."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from titanlite.ranks.temporary import save_temporary
from titanlite.tools.verify.agreement import agreement, is_pending, values_of
from titanlite.tools.verify.caller_lines import FOREIGN, is_running, line_of_caller
from titanlite.tools.verify.evidence import EXPLAINED
from titanlite.tools.verify.record import OVER_PARTS, Key, operator_of
from titanlite.tools.verify.watching import group_of

# Larger values are not kept.
MOST_ELEMENTS, MOST_BYTES = 1 << 20, 1 << 28
# Their results may be written after they return.
COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor")
# Operators of which a row of the result depends on one row alone, and on the weights.
ROW_BY_ROW = ("mm", "addmm", "bmm", "linear", "matmul", "embedding", "view", "t", "transpose")
OF_DTENSOR = f"{Path(torch.distributed.tensor.__file__).parent}{os.sep}"
RANDOM = ("rand", "normal", "bernoulli", "native_dropout", "multinomial", "uniform", "exponential")
WAIT = torch.ops._c10d_functional.wait_tensor.default
# Numbers that are no values: sizes, too.
NO_VALUE = ("dtype", "layout", "device", "pin_memory", "memory_format", "end")
SAVED = ("places", "tensors", "sources", "numbers", "with_gradient", "inputs")
SAVED_BACKWARD = ("gradients", "passed", "outputs", "arrived")

Place = tuple[Key, int]
"""Which of the values of a key."""
Number = bool | int | float


@dataclass
class Values:
    """The values of one forward pass, in order."""

    of: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    places: list[Place] = field(default_factory=list)
    tensors: list[Tensor | None] = field(default_factory=list)
    sources: list[tuple[int, ...]] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    """What a value without sources is computed from, if that is no weight."""
    mixes: list[bool] = field(default_factory=list)
    """Whether an element of the value depends on several of what it is computed from."""
    is_free: list[bool] = field(default_factory=list)
    """Whether a value depends on no weight and no data, as positions counted from 0."""
    numbers: list[dict[str, Number]] = field(default_factory=list)
    """The numbers that each operator is given, by argument, without sizes."""
    with_gradient: list[tuple[int, ...] | None] = field(default_factory=list)
    """Those of its sources that have a gradient; None for a value computed without autograd."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The gradients of the values, by number."""
    passed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Numbers of a value and of one that it is computed from -> what it passes back to that."""
    behind: dict[int, list[int]] = field(default_factory=dict)
    """The values from which autograd's graph computes one, also by a function of the caller's."""
    outputs: dict[str, int] = field(default_factory=dict)
    """Call of a module -> the number of the value that it returned last."""
    completed: tuple[Place, Any] | None = None
    """The value that is reduced over a group of ranks before it is used, and that group."""
    groups: dict[str, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))
    """Call of a module -> the groups of ranks that exchange something inside it."""
    sent_by_loss: str = ""
    """The first line outside modules, after a forward pass began, that exchanges something."""
    unseen: dict[str, str] = field(default_factory=dict)
    """Call, "" for none -> the first line in it that sends what has a gradient."""
    exchanged: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """The values that a rank sends, not by a broadcast -> the line, and the ranks of its group."""
    written: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Call, "" for none -> a line in it that writes into what has a gradient, unseen by autograd,
    and the line that has computed that.
    """
    read: dict[int, str] = field(default_factory=dict)
    """The values that the host reads as a number -> the line."""
    passes: list[int] = field(default_factory=list)
    """The number of the forward pass, counted from 1, in which each value is computed."""
    num_passes: int = 0
    apart: list[str] = field(default_factory=list)
    """Lines that the backward pass computes again, with other values than in the forward pass."""
    overwritten: dict[str, None] = field(default_factory=dict)
    """Lines that save for the backward pass what is another tensor when that reads it."""
    num_bytes: int = 0
    _last: int = 0
    _exchanging: set[str] = field(default_factory=set)
    arrived: dict[int, None] = field(default_factory=dict)
    """The values to which a gradient comes."""
    _hooked: set[int] = field(default_factory=set)
    _nodes: dict[Any, int] = field(default_factory=dict)
    _makers: Any = field(default_factory=WeakTensorKeyDictionary)
    _stored: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    _of_line: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def note(self, calls: Sequence[str], line: str, operator: Any, given: Any, result: Any) -> None:
        """Note the first tensor that an operator returns, inside calls of modules."""
        name = operator.name().partition("::")[2].partition(".")[0]
        leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        if operator.namespace in COMMUNICATION:
            group = next(filter(None, map(group_of, tree_leaves(given))), None)
            # Ranks that deal out their rows need not have the same.
            is_dealt = "alltoall" in name.replace("_", "")
            sent = [] if "broadcast" in name else leaves
            self.note_group(calls, None if is_dealt else group, leaves, sent)
        elif name.endswith("_") and leaves:
            self._note_write(calls, line, leaves[0])
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name == "_local_scalar_dense" and leaves[0] in self._makers:
            self.read.setdefault(self._makers[leaves[0]], line)
        if not found:
            return
        sources = dict.fromkeys(self._makers[leaf] for leaf in leaves if leaf in self._makers)
        is_free = all(leaf in self._makers for leaf in leaves) and not name.startswith(RANDOM)
        is_first = leaves and not sources and not leaves[0].requires_grad
        is_by_row = torch.Tag.pointwise in operator.tags or name in ROW_BY_ROW
        graded = {self._makers[t]: t for t in leaves if t.requires_grad and t in self._makers}
        self.is_free.append(is_free and all(self.is_free[source] for source in sources))
        self.sources.append(tuple(sources))
        self.inputs.append(self._copy(operator, leaves[0]) if is_first else None)
        self.mixes.append(bool(leaves) and not is_by_row)
        self.tensors.append(self._copy(operator, found[0]))
        self.numbers.append(_numbers_in(operator, given))
        self.with_gradient.append(tuple(graded) if torch.is_grad_enabled() else None)
        self._add((calls[-1] if calls else "", line, str(operator)), found)
        if (address := _address(found[0])) and self._stored.get(address, lambda: None)() is None:
            self._stored[address] = weakref.ref(found[0])
        for number, one in graded.items():
            self._listen(number, one)

    def _note_write(self, calls: Sequence[str], line: str, into: Tensor) -> None:
        """Note an operator that writes into an alias, without a gradient, of what has one."""
        value = self._stored.get(_address(into), lambda: None)()
        is_alias = value is not None and value is not into and not into.requires_grad
        if value is not None and is_alias and value.requires_grad:
            source = self.places[self._makers[value]][0][1]
            self.written.setdefault(calls[-1] if calls else "", (line, source))

    def note_output(self, call: str, value: Tensor) -> None:
        """Note which value a call of a module returns; one that no operator is seen to compute, as
        of DTensors that are laid out otherwise, is a value of its own.
        """
        if value not in self._makers and value.requires_grad:
            self.is_free.append(False)
            self.sources.append(())
            self.inputs.append(None)
            self.mixes.append(False)
            self.tensors.append(None)
            self.numbers.append({})
            self.with_gradient.append(())
            self._add((call, "", "module.output.default"), [value])
        if value in self._makers:
            self.outputs[call] = self._makers[value]

    def _add(self, key: Key, found: Sequence[Tensor]) -> None:
        """The last value is that of `key`; these tensors have it."""
        number = len(self.places)
        self.passes.append(self.num_passes)
        self.places.append((key, len(self.of[key])))
        self.of[key].append(number)
        self._of_line[key[1:]].append(number)
        for one in found:
            self._makers[one] = number

    def note_again(self, line: str, operator: Any, result: Any) -> None:
        """Note what an operator returns that is computed again in the backward pass."""
        found = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), None)
        if found is None or line in self.apart or operator.namespace in COMMUNICATION:
            return
        own = values_of(found).cpu()
        forward = (self.tensors[number] for number in self._of_line[line, str(operator)][::-1])
        same = [one for one in forward if one is not None and one.shape == own.shape]
        # Memory that was never written, as where a pipeline learns shapes, may be NaN.
        same = [] if own.isnan().any() else same
        if same and all(agreement(own, one, one).difference > EXPLAINED for one in same):
            self.apart.append(line)

    def complete(self, operator: Any, given: Any, result: Any) -> Any:
        """The result of the operator noted last; over all ranks of a group, if it is to be."""
        if self.completed is None or not self.places or self.places[-1] != self.completed[0]:
            return result
        (place, group), self.completed = self.completed, None
        name, own = operator_of(place[0]), result.detach().clone()
        if name in ("sum", "mean"):
            dist.all_reduce(own, group=group)
            return own / group.size() if name == "mean" else own
        if name == "logsumexp":
            dist.all_reduce(own := own.exp(), group=group)
            return own.log()
        # A softmax, or its logarithm.
        local = given[0][0].detach().exp().sum(given[0][1], keepdim=True)
        dist.all_reduce(total := local.clone(), group=group)
        return own * local / total if name == "_softmax" else own + (local / total).log()

    def over_parts(self) -> dict[Place, tuple[int, ...]]:
        """The values that may need the other ranks' parts, too, with their shapes."""
        return {
            place: tuple(one.shape)
            for place, one in zip(self.places, self.tensors, strict=True)
            if one is not None and operator_of(place[0]) in OVER_PARTS
        }

    def note_group(
        self, calls: Sequence[str], group: Any, tensors: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """Note that the ranks of a group exchange tensors inside calls of modules, of which those
        `sent` may be reduced.
        """
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        line = line_of_caller(FOREIGN)
        self._exchanging.add(line)
        self.exchanged |= {self._makers[t]: (line, ranks) for t in sent if t in self._makers}
        for call in calls:
            self.groups[call].add(ranks)
        # DTensor has a backward pass for what it sends.
        if is_running(OF_DTENSOR):
            return
        # Single numbers are counts, or a loss to print.
        if not calls and self.num_passes and any(one.numel() > 1 for one in tensors):
            self.sent_by_loss = self.sent_by_loss or line
        # A function with a backward pass of its own computes without gradients.
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            self.unseen.setdefault(calls[-1] if calls else "", line)

    def lines_sent(self) -> dict[str, str]:
        """A line -> the other line that sends what it computes."""
        found = {}
        for number, (line, _) in self.exchanged.items():
            # The line that sends may copy it first.
            while self.places[number][0][1] == line and len(self.sources[number]) == 1:
                (number,) = self.sources[number]
            found[self.places[number][0][1]] = line
        return found

    def lines_behind(self, value: Tensor) -> set[str]:
        """The lines from which a tensor follows, and those that exchange something, since this was
        asked for last.
        """
        stack, seen = [self._makers.get(value, -1)], set[int]()
        while stack:
            if (number := stack.pop()) >= self._last and number not in seen:
                seen.add(number)
                stack += self.sources[number]
        self._last = len(self.places)
        return self._exchanging | {self.places[number][0][1] for number in seen}

    def follow(self, value: Tensor, alias: Tensor) -> None:
        """An alias has the value of a tensor."""
        if value in self._makers:
            self._makers[alias] = self._makers[value]
            self._listen(self._makers[value], value)
            self._nodes |= {alias.grad_fn: self._makers[value]} if alias.grad_fn else {}

    def is_unused(self, number: int) -> bool:
        """Whether a value is no part of a loss: what it is computed from has gradients, but none
        comes. For a value that nothing is computed from.
        """
        own = {*(self.with_gradient[number] or ())}
        return bool(own and self.arrived) and own <= self._hooked and not own & self.arrived.keys()

    def operands(self, number: int) -> list[Tensor | None]:
        """The values from which one is computed."""
        return [self.tensors[one] for one in self.sources[number]] or [self.inputs[number]]

    def save(self, folder: str, name: str = "values") -> None:
        """Save what the ranks compare theirs with."""
        save_temporary(
            {key: getattr(self, key) for key in (*SAVED, *SAVED_BACKWARD)},
            Path(folder) / f"{name}.pt",
        )

    def release(self) -> None:
        """Release the graph of the step."""
        self._nodes.clear()

    def _listen(self, number: int, value: Tensor) -> None:
        """Keep the gradient of a value, and those that its operator passes back."""
        node = value.grad_fn
        if number in self._hooked or node is None or value.output_nr:
            return
        self._hooked.add(number)
        self._nodes[node] = number
        before = [one for one, _ in node.next_functions]
        self.behind[number] = [self._nodes[one] for one in before if one in self._nodes]

        def arrive(own: Tensor) -> None:
            self.arrived[number] = None
            self._keep(self.gradients, number, own)

        value.register_hook(arrive)

        def keep(passed: Sequence[Tensor | None], _: Any) -> None:
            for source, one in zip(before, passed, strict=False):
                if one is not None and source in self._nodes:
                    self._keep(self.passed, (number, self._nodes[source]), one)

        node.register_hook(keep)

    def _keep(self, kept: dict[Any, Tensor], key: Any, gradient: Tensor) -> None:
        own = values_of(gradient)
        self.num_bytes += own.numel() * own.element_size()
        if not is_pending(gradient) and self.num_bytes <= MOST_BYTES:
            before = kept.get(key, torch.zeros(()))
            kept[key] = own.cpu() + before if before.shape in ((), own.shape) else own.cpu().clone()

    def _copy(self, operator: Any, value: Tensor) -> Tensor | None:
        is_open = operator.namespace in COMMUNICATION and operator is not WAIT
        # Memory without values, which the next line writes.
        is_open = is_open or "empty" in operator.name()
        if is_open or is_pending(value):
            return None
        local = values_of(value)
        if local.numel() > MOST_ELEMENTS or self.num_bytes > MOST_BYTES:
            return None
        self.num_bytes += local.numel() * local.element_size()
        return local.cpu().clone()


def _numbers_in(operator: Any, given: tuple[Any, Any]) -> dict[str, Number]:
    """The numbers among an operator's arguments, by name, without sizes."""
    args, by_name = given
    found: dict[str, Number] = {}
    for index, argument in enumerate(operator._schema.arguments):
        value = args[index] if index < len(args) else (by_name or {}).get(argument.name)
        is_size = str(argument.real_type) == "SymInt" and argument.name != "ignore_index"
        if isinstance(value, Number) and not is_size and argument.name not in NO_VALUE:
            found[argument.name] = value
    return found


def load_values(folder: str, name: str = "values") -> Values:
    """Those that one process has saved."""
    known = Values(**torch.load(Path(folder) / f"{name}.pt", mmap=True, weights_only=True))
    for number, (key, _) in enumerate(known.places):
        known.of[key].append(number)
    return known


def _address(tensor: Tensor) -> int:
    """Where a tensor's elements begin in memory; 0 for one that has none of its own."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else 0
