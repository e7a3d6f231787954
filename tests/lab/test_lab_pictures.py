"""The pictures of the notes are those of the code, and the page steps through a run."""

import re
from pathlib import Path

import pytest
from lab_pictures import PICTURES, draw_all

from titanlite.tools.figures.messages import (
    Arrow,
    Bar,
    MessagePicture,
    WorkBox,
    draw_page,
    draw_svg,
)
from titanlite.tools.lab import Mesh, VirtualCluster
from titanlite.tools.lab.pictures import name_parts, parts_of

DOCS = Path(__file__).parents[2] / "docs"
NAMES = [name for part in PICTURES.values() for name in part]


@pytest.fixture(scope="module")
def drawn():
    return draw_all()


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_of_the_notes_is_that_of_its_run(drawn, name):
    shown = (DOCS / "images" / "lab" / f"{name}.svg").read_text()
    assert draw_svg(drawn[name]) == shown, "run: python docs/lab_pictures.py docs/images/lab"


def test_every_note_opens_with_a_picture_and_every_picture_is_shown():
    shown = []
    for note in (DOCS / "lab").glob("[0-9]*.md"):
        text = note.read_text()
        assert re.match(r"# .*\n\n!\[.+\]\(\.\./images/lab/\w+\.svg\)\n", text), note
        shown += re.findall(r"\(\.\./images/lab/(\w+)\.svg\)", text)
    assert sorted(shown) == sorted(NAMES)


def test_what_ranks_hold_becomes_their_result_step_by_step(drawn):
    ring = drawn["all_reduce"]
    assert ring.held[0] == [[f"{letter}{part}" for part in range(4)] for letter in "abcd"]
    sums = [f"a{part}+b{part}+c{part}+d{part}" for part in range(4)]
    assert ring.held[6] == [sums] * 4
    # After the reduce-scatter, each rank holds one whole sum.
    for rank, held in enumerate(ring.held[3]):
        assert [part for part in sums if part in held] == [sums[rank]]


def test_tagged_values_name_their_parts():
    assert name_parts(parts_of([3, 202, 1111]), 4) == "a2 a1+c1 a0+b0+c0+d0"
    assert name_parts(parts_of([10, 20, 10]), 2) == "b b0"
    with pytest.raises(ValueError, match="12 is not a sum of one part"):
        parts_of([12])


def test_names_are_escaped_and_the_page_loads_nothing():
    picture = MessagePicture(
        "a <b> & c",
        "</script>",
        ["rank 0", "rank 1"],
        2,
        [Arrow(0, 1, 0, "<i>", "rank 0 to rank 1: <i>")],
        [WorkBox(1, 1, 2, "F0")],
        [Bar((0, 1), 1, "all_reduce", "all_reduce 0")],
        held=[[["x"], []]] * 3,
    )
    svg, page = draw_svg(picture), draw_page(picture)
    assert "<i>" not in svg
    assert "a &lt;b&gt; &amp; c" in svg
    assert page.count("</script>") == 1
    assert set(re.findall(r"https?://[^'\"\s]*", page)) == {"http://www.w3.org/2000/svg"}


def test_a_record_draws_itself():
    with VirtualCluster(Mesh(rank=2)) as cluster:
        with pytest.raises(RuntimeError, match=r"nothing was recorded; call run\(\) first"):
            cluster.record  # noqa: B018
        cluster.run(lambda device: device.barrier())
        assert cluster.record.svg("<b>", "two").count("<circle") == 2
        assert "barrier 0" in cluster.record.html()
        assert cluster.record._repr_svg_().startswith("<svg")
