"""How results look in a notebook (a sentence, a small table, a chart) and in a paper, and sizes for people.

>>> html_table(("what", "before"), [("attention", 0.51234567)])
'<table><thead><tr><th>what</th><th>before</th></tr></thead><tbody><tr><td>attention</td><td>0.5123</td></tr></tbody></table>'
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure


class WithTable:
    """A result whose rows are one table."""

    table: pl.DataFrame

    def frame(self) -> pl.DataFrame:
        """All rows, as the field ``table`` has them."""
        return self.table


def paragraph(text: str, *, bold: str = "") -> str:
    """A sentence, with something in bold before it."""
    return f"<p>{f'<b>{escape(bold)}</b> ' if bold else ''}{escape(text)}</p>"


def frame(data: pl.DataFrame) -> str:
    """A table of polars, in HTML."""
    return html_table(data.columns, data.rows())


def chart(figure: Figure) -> str:
    """A figure as an image inside the page."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=90)
    return f'<img alt="chart" src="data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}">'


def html_table(titles: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> str:
    """An HTML table whose cells are text, whatever they hold: nothing in it is markup.

    >>> html_table(("token",), [("<script>",)])
    '<table><thead><tr><th>token</th></tr></thead><tbody><tr><td>&lt;script&gt;</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in titles)
    body = "".join(f"<tr>{''.join(f'<td>{_inert(_cell(c))}</td>' for c in row)}</tr>" for row in rows)
    caption = f"<p>{_inert(title)}</p>" if title else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _inert(text: str) -> str:
    """Escaped, and without characters that change the direction of what follows or that no page may hold."""
    return escape(
        "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in text)
    )


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def latex_table(table: pl.DataFrame, digits: int = 3) -> str:
    r"""A frame as a LaTeX table (with the rules of booktabs): numbers to the right, nothing in it is markup.

    >>> import polars as pl
    >>> print(latex_table(pl.DataFrame({"head": ["L9H6 & co"], "f_1": [0.5]})))
    \begin{tabular}{lr}
    \toprule
    head & f\_1 \\
    \midrule
    L9H6 \& co & 0.5 \\
    \bottomrule
    \end{tabular}
    >>> print(latex_table(pl.DataFrame({"heads": [["L1H2", "L1H3"]]})).splitlines()[4])
    L1H2, L1H3 \\
    """

    def cell(value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, list):
            return ", ".join(map(cell, cast("list[object]", value)))
        text = f"{value:.{digits}g}" if isinstance(value, float) else str(value)
        # An arrow between two places, as names of nodes have it, is one sign.
        parts = ("".join(_LATEX.get(c, c) for c in part) for part in text.split("->"))
        return r"$\to$".join(parts)

    sides = "".join("r" if kind.is_numeric() else "l" for kind in table.dtypes)
    rows = [" & ".join(map(cell, row)) + r" \\" for row in table.iter_rows()]
    head = " & ".join(map(cell, table.columns)) + r" \\"
    lines = [
        rf"\begin{{tabular}}{{{sides}}}",
        r"\toprule",
        head,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def human(n_bytes: float) -> str:
    """A number of bytes as people say it.

    >>> human(4_200_000_000), human(12)
    ('4.2 GB', '12 B')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit in ("B", "KB") else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"
