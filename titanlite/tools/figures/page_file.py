"""Self-contained HTML pages, each of a file .html with its .css and .js (page/)."""

import json
from html import escape
from pathlib import Path
from string import Template

FOLDER = Path(__file__).with_name("page")


def make_page(name: Path, title: str, data: object, **texts: object) -> str:
    """The page NAME.html with its style and script, which reads `data`, and further `texts`.

    It loads nothing. Raises ValueError for data that JSON cannot hold, such as NaN.
    """
    template, style, script = (
        name.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".html", ".css", ".js")
    )
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Template(template).substitute(
        texts,
        title=escape(title),
        style=style,
        # No "</script>" or "<!--" of a name ends the script.
        data=written.replace("<", "\\u003c"),
        script=script,
    )
