"""The page of a network: its drawing, and its edges as a table, in one HTML file that loads nothing.

A merged network is not a circuit: in sentences with two word orders a role may come both before and after another, so
the circuit page, which draws positions in a row, cannot show it. This page has no script; the drawing is an embedded
image, and names of roles and models are only ever text.
"""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.explorer.document import content_hash, inert
from headtrace.tables import html_table
from headtrace.writing import write_text

if TYPE_CHECKING:
    from headtrace.runs.network import Network

ROWS = 500
"""Edges in the table; the rest is in the network file."""
DRAWN = 40
"""Edges in the drawing."""

_CAPTION = (
    "Most frequent first. Frequency is the share of prompts; weight is attention for queries and keys, and in the unit "
    "of the root elsewhere."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
body { color: #222; background: #fff }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 0.15rem 0.9rem 0.15rem 0; border-bottom: 1px solid #ddd; white-space: nowrap }
.wide { overflow-x: auto }
"""

_POLICY = "default-src 'none'; style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - headtrace</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{about}</p>
<p><img alt="{alt}" src="data:image/svg+xml;base64,{image}"></p>
<h2>Edges</h2>
<p>{caption}</p>
<div class="wide">{edges}</div>
</body>
</html>
"""


def write_network_page(network: Network, path: str | Path) -> Path:
    """Write the page of a network."""
    return write_text(path, network_page(network))


def network_page(network: Network) -> str:
    """The page as text."""
    from headtrace.figures.style import svg

    model = "an unknown model" if network.model is None else network.model.name
    what = "Trace network" if network.form == "trace" else "Network"
    title = escape(inert(f"{what} of {model}"))
    image = svg(network.plot(k=DRAWN))
    left = len(network.edges) - ROWS
    caption = _CAPTION + (f" {left:,} more are in the network file." if left > 0 else "")
    return _PAGE.format(
        policy=_POLICY.format(style=content_hash(_STYLE)),
        style=_STYLE,
        title=title,
        about=escape(inert(about(network))),
        alt=f"{title}, the most frequent edges drawn by layer and role; the table below has them as text.",
        image=base64.b64encode(image).decode(),
        caption=caption,
        edges=_table(network),
    )


def about(network: Network) -> str:
    """What the network is made of, in a sentence or two."""
    cuts = [
        f"{word} below {value:g}"
        for word, value in (
            ("frequency", network.min_frequency),
            ("weight", network.min_weight),
            ("count", network.min_count),
            ("measured effect", network.min_effect),
        )
        if value
    ]
    without = f" ({network.without:,} more have none)" if network.without else ""
    cut = f" Left out: edges of {', or '.join(cuts)}." if cuts else ""
    return (
        f"Circuits of {network.prompts:,} prompts{without}, merged by {network.by}: {len(network.nodes):,} nodes, "
        f"{len(network.edges):,} edges.{cut}"
    )


def _table(network: Network) -> str:
    titles = ["source", "into", "target", "prompts", "frequency", "weight", "contribution"]
    if network.channels:
        titles.insert(2, "channel")
    rows: list[list[str]] = []
    for edge in network.top(ROWS):
        side = edge.side if edge.kind == "communication" else f"{edge.kind} ({edge.side})"
        row = [network.node(edge.source).name, side, network.node(edge.target).name, f"{edge.count:,}"]
        row += [f"{edge.frequency:.3f}", f"{edge.weight:.4g}"]
        row.append("" if edge.contribution is None else f"{edge.contribution:.4g}")
        if network.channels:
            row.insert(2, "" if edge.channel is None else str(edge.channel))
        rows.append(row)
    return html_table(titles, rows)
