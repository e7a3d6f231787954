"""Tables of text, as commands print them."""

from collections.abc import Collection, Sequence


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[str] = (),
    width: int | None = None,
) -> str:
    """A text table; columns are right-aligned, those named in `left` left-aligned.

    With a `width`, columns that do not fit follow below (see `beside`).
    """
    columns = []
    for name, *cells in zip(header, *rows, strict=True):
        widest, align = max(map(len, (name, *cells))), "<" if name in left else ">"
        columns.append([f"{cell:{align}{widest}}" for cell in (name, "-" * widest, *cells)])
    return "\n".join(beside(columns, width))


def beside(columns: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The lines of columns, whose cells are padded; those that do not fit into `width` follow.

    Each block of lines begins with the first column.
    """
    blocks = [[columns[0]]]
    for column in columns[1:]:
        used = sum(2 + len(other[0]) for other in blocks[-1]) + len(column[0])
        if width and used > width and len(blocks[-1]) > 1:
            blocks.append([columns[0]])
        blocks[-1].append(column)
    rows = ["  ".join(row).rstrip() for block in blocks for row in ("", *zip(*block, strict=True))]
    return rows[1:]
