"""How results look in a notebook: a sentence, a small table, a chart. All text is escaped.

>>> table([("attention", 0.51234567)], ("what", "before"))
'<table><thead><tr><th>what</th><th>before</th></tr></thead><tbody><tr><td>attention</td><td>0.5123</td></tr></tbody></table>'
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure


def paragraph(text: str, *, bold: str = "") -> str:
    """A sentence, with something in bold before it."""
    return f"<p>{f'<b>{escape(bold)}</b> ' if bold else ''}{escape(text)}</p>"


def table(rows: Iterable[Sequence[Any]], titles: Sequence[str]) -> str:
    """A table of a few rows."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(_cell(c))}</td>' for c in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def frame(data: pl.DataFrame) -> str:
    """A table of polars."""
    return table(data.rows(), data.columns)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def chart(figure: Figure) -> str:
    """A figure as an image inside the page."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=90)
    return f'<img alt="chart" src="data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}">'
