"""The documentation as a site: no warning, no dead link, nothing loaded from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import CHROMIUM, open_page

HAS_MKDOCS = importlib.util.find_spec("mkdocs") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_MKDOCS, reason="needs the extra docs; make site installs it"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    env, root = os.environ | {"NO_MKDOCS_2_WARNING": "1"}, Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return folder


def test_every_link_and_anchor_exists_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    ids = {path: set(re.findall(r'\sid="?([^"\s>]+)', text)) for path, text in pages.items()}
    assert len(pages) > 70
    for path, text in pages.items():
        assert not re.search(r"<a\b[^>]*>[\w/]+\.md</a>", text), path
        for tag, address in re.findall(r'<(\w+)\b[^>]*?\s(?:href|src)="?([^"\s>]*)', text):
            url = urlsplit(address)
            if url.scheme or url.netloc:
                assert tag == "a", f"{path}: loads {address}"
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.exists(), f"{path}: {address}"
            if url.fragment and target in ids:
                assert unquote(url.fragment) in ids[target], f"{path}: {address}"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text()), path


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_search_works_from_the_disk(site: Path) -> None:
    with open_page(site / "fsdp.html") as page:
        page.run("document.querySelector('.md-search__input').focus()")
        page.call("Input.insertText", text="reduce-scatter")
        # The page has read its index once a key finds something.
        look = """new Promise(found => { const look = () => {
            if (document.querySelectorAll('.md-search-result__item').length > 2) return found();
            document.querySelector('.md-search__input').dispatchEvent(new KeyboardEvent('keyup'));
            setTimeout(look, 100); }; look(); })"""
        page.call("Runtime.evaluate", expression=look, awaitPromise=True)
        assert page.errors == []
