"""What `mkdocs build` needs to read these pages as GitHub does.

A link to a file that is no page of the site (source, tests, programs) leads to `repo_url` in
mkdocs.yml; without one, it becomes the path as plain text. Lists, tables and headings may follow a
paragraph without a blank line. A picture leads to itself at full size; one that is drawn on white
is marked, for site/style.css. A link whose text is the name of a page's file gets the page's title,
or the heading to which it leads.
"""

import os
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from pymdownx.slugs import slugify

FENCE = re.compile(r"^\s*(```+|~~~+)")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)+)\]\(([^()\s]+)\)")
PICTURE = re.compile(r"^(!\[[^\]]*\])\(([^()\s]+)\)$")
ITEM = re.compile(r"^(?:[-*+]|\d+\.) ")
ON_WHITE = re.compile(r"""<rect[^>]*fill=["'](?:#ffffff|white)""")
FILE_NAME = re.compile(r"\.[a-z]+`?$")
PAGE_NAME = re.compile(r"[\w/]+\.md")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
BRANCH = "main"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The Markdown of a page in the dialect of mkdocs."""
    repository = os.path.dirname(config.config_file_path)
    root = os.path.relpath(config.docs_dir, repository)
    here = posixpath.join(root, posixpath.dirname(page.file.src_uri))
    titles = dict(_titles(config.nav))

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        path = posixpath.normpath(posixpath.join(here, path))
        file = files.get_file_from_path(posixpath.relpath(path, root))
        if file is not None and PAGE_NAME.fullmatch(text):
            return f"[{_title(file, anchor, titles)}]({target})"
        if (file is not None and file.inclusion.is_included()) or not os.path.exists(
            os.path.join(repository, path)
        ):
            return found[0]  # mkdocs checks these
        if config.repo_url:
            kind = "tree" if os.path.isdir(os.path.join(repository, path)) else "blob"
            return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/{BRANCH}/{path})"
        if line.startswith("|"):  # a table's cell stays narrow
            return f"<code title='{path}'>{text.strip('`')}</code>"
        return f"`{path}`" if FILE_NAME.search(text) or text in path else f"{text} (`{path}`)"

    def picture(found: re.Match[str]) -> str:
        path = os.path.join(repository, here, found[2])
        mark = "#on-white" if os.path.exists(path) and _is_on_white(path) else ""
        return f"[{found[1]}({found[2]}{mark})]({found[2]})"

    lines: list[str] = []
    fence = ""
    for line in markdown.splitlines():
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence:
            last = lines[-1] if lines else ""
            begins = line.startswith("#") or any(
                starts(line) and not starts(last) and not last.startswith(" ")
                for starts in (ITEM.match, _is_row)
            )
            if last and begins:
                lines.append("")
            line = PICTURE.sub(picture, LINK.sub(link, line))
        lines.append(line)
    return "\n".join(lines) + "\n"


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """The pages that have a title in the navigation, with it."""
    for part in nav:
        for title, inside in part.items() if isinstance(part, dict) else ():
            if isinstance(inside, str):
                yield inside, title
            else:
                yield from _titles(inside)


def _title(file: Any, anchor: str, titles: dict[str, str]) -> str:
    """The heading of a page at `anchor`, or the page's title."""
    headings = HEADING.findall(file.content_string)
    slug = slugify(case="lower")
    found = [heading for heading in headings if anchor and slug(heading, "-") == anchor]
    return found[0] if found else titles.get(file.src_uri, headings[0])


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _is_on_white(path: str) -> bool:
    """Whether a picture is a drawing on white that has no dark form of its own."""
    if not path.endswith(".svg"):
        return "digits" not in path
    with open(path, encoding="utf-8") as file:
        text = file.read()
    return "prefers-color-scheme" not in text and bool(ON_WHITE.search(text))
