"""The drawings of pages are valid SVG, and those in docs/ are up to date."""

import xml.etree.ElementTree as ET
from pathlib import Path

from feature_pictures import PICTURES
from ring_pictures import draw_all, draw_ring

from titanlite.modules.attention import make_layout

FOLDER = Path(__file__).parents[3] / "docs/images/context_parallel"
SVG = "{http://www.w3.org/2000/svg}"


def test_drawings_in_docs_are_current():
    drawings = draw_all()
    assert {path.name for path in FOLDER.iterdir()} == set(drawings)
    drawings |= {f"../features/{name}.svg": draw() for name, draw in PICTURES.items()}
    stale = [name for name, svg in drawings.items() if (FOLDER / name).read_text() != svg]
    assert not stale, "run: make docs"


def test_the_ring_shows_what_is_computed_and_what_travels():
    layout = make_layout("none", 4)
    root = ET.fromstring(draw_ring(layout))
    words = [text.text for text in root.iter(f"{SVG}text")]
    # Of 16 blocks, the 6 above the diagonal are idle; 6 blocks are sent.
    assert words.count("idle") == 6
    assert [words.count(f"keys of {rank}") for rank in range(4)] == [4, 3, 2, 1]
    assert len(list(root.iter(f"{SVG}path"))) == 6
