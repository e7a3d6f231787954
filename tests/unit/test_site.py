"""The documentation as a site: no warning, no dead link, nothing loaded from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import CHROMIUM, open_page

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs: make site"
    ),
]


class Tags(HTMLParser):
    """The ids of a page, its links, and the addresses that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if tag == "a":
            self.links.append(found.get("href", ""))
        elif found.get("rel") != "canonical":
            self.loads += [found[name] for name in ("src", "href", "srcset") if name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert (run.returncode, run.stderr) == (0, "")
    return folder


def test_every_link_and_anchor_exists_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Tags(path) for path in site.rglob("*.html")}
    assert len(pages) > 70
    for path, tags in pages.items():
        if path.name == "404.html":
            continue
        for address in tags.links + tags.loads:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                assert address in tags.links, f"{path}: loads {address}"
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.exists(), f"{path}: {address}"
            if url.fragment and target in pages:
                assert unquote(url.fragment) in pages[target].ids, f"{path}: {address}"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text()), path


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_search_works_from_the_disk(site: Path) -> None:
    with open_page(site / "fsdp.html") as page:
        page.run("document.querySelector('.md-search__input').focus()")
        page.call("Input.insertText", text="reduce-scatter")
        until = time.monotonic() + 60
        while page.run("document.querySelectorAll('.md-search-result__item').length") < 3:
            assert time.monotonic() < until, page.errors
            time.sleep(0.1)
        assert page.errors == []
