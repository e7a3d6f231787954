"""The sizes that the code stays below, so that a newcomer can read the core whole."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "titanlite/tools"

# In lines. A larger limit is a change of its own, which says why. The library's was 70,000. It has
# grown by the world of threads (ranks/), by what verify sees of other people's code (its lines,
# numbers, padding, exchanges), by jobs of TorchTitan (tools/torchtitan), a schema for editors,
# completion for shells, points of exercises, ranks that share a GPU, a loss by rows, pipelines,
# experts and CPU offload of planned jobs of TorchTitan, published runs and their software as the
# planner's input, Muon with its formula and its plan, attention within documents, a thread that
# reads ahead, the planner's allocator and ranges, further runs that look for a rank's own part,
# fine-tuning (adapters, conversations, peft's folders, a folder compared with transformers),
# averages of weights, scores of attention that transformers' models have, what a plan advises, and
# the uses of a weight in compare, experts of transformers, rings and windows of attention without
# masks, what an eleventh and a twelfth set of programs needed (copies of rows, values in another
# order, lines of a backward pass, losses over parts; modules that do not run, rates; operators of
# one side alone, values computed again, overwritten or of another microbatch, starting weights in
# another order, random updates; memory that several layers share, elements in another order;
# microbatches of the own rank, shares of an update, what autograd does not see, sums of copies;
# typed calls of ranks; one gloo device for all groups of a pool, and what an eighteenth set needed:
# axes of equal size, learning rates, rows that all ranks read, shares over two axes; a nineteenth:
# what comes back through each line, the optimizer's own numbers and options, gradients that a step
# clears; a twentieth: what arrives at a custom backward pass, or is received for nothing; the calls
# of schedules by hand, fused matrices; gradients line by line and numbers of lines, after a
# twenty-first set; means where a sum is meant, rows of other microbatches, after another; terms of
# a loss, tokens in other calls and in pieces, and a run that is judged apart from the one that is
# recorded, after one with models of transformers and PyTorch's own APIs; calls in another order or
# without a backward pass, what a step leaves out or counts otherwise, runs of a tensor with factors
# of their own, masks of padding, writes behind autograd, after two more; torch.func, TorchScript
# and jagged tensors, several optimizers, chunks that are not equal, what a function takes, and what
# a first call does wrong, after thirty correct programs; and after a twenty-eighth set the caller's
# own operators, what buffers were before a step, an optimizer that reduces along a cut dimension,
# losses of parts alone), and the streams and gaps of a planned GPU, and a search that tries what is
# near the fastest plans, not all (also with larger microbatches; tested on drawn hardware). The
# core, which has the first three of these, experts and rings, stays below 34,000. A disk that is
# full took 30 lines of each.
CORE, LIBRARY, TESTS = 33_999, 86_480, 48_020
# In words, as `wc -w` counts them: Start and Guide of the site, and all pages.
GUIDES, PAGES = 25_720, 73_720
# The tokens of a line, blank lines and comments counted: long lines gain nothing.
TOKENS_OF_A_LINE = 8.5

# Of a function, without its docstring.
LONGEST = 80
LONG = {
    "titanlite/tools/simulate/command.py:_parser": "a list of options",
    "titanlite/tools/simulate/engine.py:run": "the loop over events is inline for speed",
    "titanlite/tools/verify/norms.py:_ways_of_counting": "a list of wrong ways to count",
}
"""The functions that are longer, each with the reason."""


def lines(paths: Iterable[Path]) -> int:
    """The lines of these files, or those that their tokens would fill, if these are more."""
    texts = [path.read_text() for path in paths]
    num_lines = sum(text.count("\n") for text in texts)
    num_tokens = sum(
        token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
        for text in texts
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return max(num_lines, round(num_tokens / TOKENS_OF_A_LINE))


def library() -> list[Path]:
    return [*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "models").rglob("*.py")]


def test_the_core_stays_readable() -> None:
    assert lines(path for path in library() if TOOLS not in path.parents) <= CORE


def test_the_library_stays_below_its_limit() -> None:
    assert lines(library()) <= LIBRARY


def test_the_tests_stay_below_their_limit() -> None:
    assert lines((ROOT / "tests").rglob("*.py")) <= TESTS


def test_no_two_classes_have_one_name() -> None:
    # But the lab builds each parallelism once more, and families of models read alike.
    own = [path for path in library() if {"lab", "models"}.isdisjoint(path.parts)]
    names = re.findall(r"^class (\w+)", "\n".join(path.read_text() for path in own), re.MULTILINE)
    assert len(names) == len(set(names))


def test_the_pages_stay_below_their_limits() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    guides = re.findall(r"[\w/]+\.md", site[site.index("- Start:") : site.index("- Reference:")])
    assert len(guides) > 30
    assert _words(ROOT / "docs" / page for page in guides) <= GUIDES
    assert _words((ROOT / "docs").rglob("*.md")) <= PAGES


def _words(pages: Iterable[Path]) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def test_a_long_line_counts_as_several(tmp_path: Path) -> None:
    short, long = tmp_path / "short.py", tmp_path / "long.py"
    short.write_text("x = [\n" + "    1,\n" * 20 + "]\n")
    long.write_text(f"x = [{', '.join(['1'] * 200)}]\n")
    assert lines([short]) == 22
    assert lines([long]) == round(405 / TOKENS_OF_A_LINE)


def test_functions_are_short() -> None:
    for path in library():
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = node.end_lineno - body[0].lineno + 1 if body else 0
                assert length <= LONGEST or f"{name}:{node.name}" in LONG, f"{name}:{node.name}"
