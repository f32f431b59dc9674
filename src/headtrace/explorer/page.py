"""Pages of circuits and networks: one HTML file each that holds everything and loads nothing.

    circuit.to_html("c.html")
    headtrace.explorer.write_page([first, second], "both.html")

Text from circuits is only ever shown as text.

All pages with a script are made by ``document``. Style and script are named by their hashes in a content security
policy that allows nothing else. Data reaches the page as escaped JSON. The modules of a script are inlined without a
bundler: each becomes a function that is called once and returns what it exports, so names stay private to their module
as they are on disk. Only the forms used here are understood: ``import { a, b } from "./x.js";`` and ``export`` before a
function, class or const; anything else is an error.

A merged network is not a circuit: in sentences with two word orders a role may come both before and after another, so
the circuit page, which draws positions in a row, cannot show it. Its page has no script: the drawing is an embedded
image, and names of roles and models are only ever text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import to_json
from headtrace.circuits.summary import edges_table, question, size
from headtrace.errors import HeadtraceError, InputError
from headtrace.tables import html_table
from headtrace.validation import plain
from headtrace.vocabulary import visible
from headtrace.writing import write_text

if TYPE_CHECKING:
    from headtrace.mechanism import Mechanism
    from headtrace.runs.network import Network


def write_page(
    circuits: Circuit | Sequence[Circuit],
    path: str | Path,
    compare: bool = False,
    mechanism: Mechanism | None = None,
) -> Path:
    """Write the page of one or several circuits; with ``compare``, two of them side by side at once; with the
    ``mechanism`` of the circuit, the page opens on it."""
    return write_text(path, page(circuits, compare, mechanism))


def page(
    circuits: Circuit | Sequence[Circuit], compare: bool = False, mechanism: Mechanism | None = None
) -> str:
    """The page as text. That of a single difference circuit opens on its mechanism."""
    several = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not several:
        raise InputError("A page needs at least one circuit; none was given.")
    data: dict[str, Any] = {"circuits": [page_data(circuit) for circuit in several], "compare": compare}
    if mechanism is None and len(several) == 1 and several[0].difference is not None and several[0].edges:
        mechanism = several[0].mechanism()
    if mechanism is not None:
        data["mechanism"] = mechanism_data(mechanism)
    title = question(several[0]) if len(several) == 1 else f"{len(several)} circuits"
    style = part("theme.css") + part("style.css")
    return document(part("template.html"), title=title, style=style, script=_script(), data=data)


def mechanism_data(mechanism: Mechanism, width: int = 1120) -> dict[str, Any]:
    """A mechanism for its view: what its file says, in words and as a drawing that is at most so many pixels wide."""
    from headtrace.mechanism.drawing import natural_width

    return {
        "verdict": mechanism.verdict,
        "tokens": {
            place: visible(mechanism.circuit.prompt.tokens[place])
            for step in mechanism.steps
            for head in step.heads
            for place in (head.dest, *(place for place, _, _ in head.looks))
        },
        "sentence": mechanism.sentence,
        "origin": mechanism.origin,
        "clauses": [plain(clause) for clause in mechanism.clauses],
        "steps": [plain(step) | {"doubt": step.doubt_text} for step in mechanism.steps],
        "ledger": [plain(line) for line in mechanism.ledger],
        "test": None if mechanism.test is None else plain(mechanism.test),
        "measured_with": mechanism.measured_with,
        "whole": mechanism.whole,
        "notes": list(mechanism.notes),
        "svg": mechanism.to_svg(min(width, natural_width(mechanism))),
        "advice": [] if mechanism.steps else _commands(mechanism.circuit),
    }


def _commands(circuit: Circuit) -> list[dict[str, str]]:
    """Where there is nothing to draw: commands that may find something, with what each does."""
    prompt = circuit.prompt.text
    given = (
        ["-p", prompt] if prompt is not None else ["--tokens", ",".join(map(str, circuit.prompt.token_ids))]
    )
    name, root = circuit.model.name, circuit.root
    answers = [
        part
        for option, tokens in (("--answer", "answer_tokens"), ("--wrong", "wrong_tokens"))
        for token in getattr(root, tokens, None) or ()
        for part in (option, token)
    ]
    alone = ["headtrace", "trace", name, *given, *answers, "--paths", "complete"]
    return [
        {
            "does": "compare with natural changes of one word",
            "command": shlex.join(["headtrace", "why", name, *given]),
        },
        {"does": "see which words matter", "command": shlex.join(["headtrace", "matters", name, *given])},
        {"does": "trace this run alone, what is moved included", "command": shlex.join(alone)},
    ]


@cache
def _script() -> str:
    return inline_modules(scripts("page"), "main.js", "start")


def page_data(circuit: Circuit) -> dict[str, Any]:
    """A circuit file's data, with what the page would have to compute: the influence of each edge, names, words."""
    data = to_json(circuit)
    flows = circuit.flows()
    for edge, row in zip(circuit.edges, data["edges"], strict=True):
        row["flow"] = flows[edge]
    for node, row in zip(circuit.nodes, data["nodes"], strict=True):
        row["name"] = node.name
    return data | {
        "question": question(circuit, _quoted),
        "title": (circuit.prompt.text or " ".join(circuit.prompt.tokens))[:200],
        "size": size(circuit),
        "heads": len(circuit.heads()),
        "root_measure": circuit.root.measure,
        "unexplained": list(circuit.unexplained),
        "advice": [] if circuit.edges else circuit.root.advice(),
        "commands": [] if circuit.edges else _commands(circuit),
    }


def _quoted(answer: str) -> str:
    """An answer in a heading: without its outer space unless it is nothing else, in proper quotation marks."""
    return f"\u201c{visible(answer)}\u201d"


def frame(circuit: Circuit, height: int = 640) -> str:
    """The page as an inline frame for a notebook, with a plain table for readers that drop frames."""
    return (
        f'<iframe srcdoc="{escape(page(circuit))}" sandbox="allow-scripts allow-downloads" title="Circuit" '
        f'width="100%" height="{height}" style="border: 0"></iframe>'
        f"<details><summary>Strongest edges as a table</summary>{edges_table(circuit)}</details>"
    )


_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def document(template: str, *, title: str, style: str, script: str, data: Any) -> str:
    """A template, in which ``{{name}}`` is replaced, with its style, script and data."""
    values = {
        "policy": _POLICY.format(script=content_hash(script), style=content_hash(style)),
        "title": escape(f"{inert(title)[:200]} - headtrace"),
        "style": style,
        "script": script,
        "data": json_for_script(data),
    }
    # In one pass, so that no value is searched for names.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values.get(found[1], found[0]), template)


@cache
def part(name: str, folder: str = "page") -> str:
    """A file that pages are made of."""
    return (files("headtrace.explorer") / folder / name).read_text(encoding="utf-8")


@cache
def scripts(folder: str) -> dict[str, str]:
    """The JavaScript modules of a folder, by name."""
    names = (item.name for item in (files("headtrace.explorer") / folder).iterdir())
    return {name: part(name, folder) for name in sorted(names) if name.endswith(".js")}


def content_hash(text: str) -> str:
    """By which a content security policy names a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202f\u2060-\u206f\ufeff\ud800-\udfff]"
)


def inert(text: str) -> str:
    r"""Text in which control characters, direction marks and unpaired surrogates are written out.

    >>> print(inert("a\u202eb"))
    a\u202eb
    """
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def json_for_script(data: Any) -> str:
    r"""JSON that cannot end the script element that contains it, nor break a line where JavaScript sees one.

    >>> print(json_for_script({"token": "</script>"}))
    {"token":"\u003c/script\u003e"}
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# -- modules ---------------------------------------------------------------------------------------------------

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
_LEFT_OVER = re.compile(r"^(?:import|export)\b.*$|\bimport\(", re.MULTILINE)


def inline_modules(modules: Mapping[str, str], entry: str, start: str) -> str:
    """One script that calls ``start`` of the module ``entry``; each module comes after those it imports."""
    blocks: dict[str, str] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise HeadtraceError(f"page modules import each other in a circle: {' -> '.join([*path, name])}")
        if name not in modules:
            raise HeadtraceError(f"page module {path[-1]} imports {name}, which does not exist")
        if name not in blocks:
            for _, needed in _IMPORT.findall(modules[name]):
                add(needed, (*path, name))
            blocks[name] = _block(name, modules[name])

    add(entry, ())
    return "\n".join(["", *blocks.values(), f"window.headtrace = {_variable(entry)}.{start}();", ""])


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _block(name: str, text: str) -> str:
    exports = _EXPORT.findall(text)
    body = _IMPORT.sub(lambda found: f"const {{ {found[1]} }} = {_variable(found[2])};", text)
    body = _EXPORT.sub("", body)
    left = _LEFT_OVER.search(body)
    if left:
        raise HeadtraceError(f"page module {name}: cannot inline {left[0]!r}")
    if "</script" in body.lower() or "<!--" in body:
        raise HeadtraceError(f"page module {name} would end the script element it is put into")
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();"


ROWS = 500
"""Edges in the table; the rest is in the network file."""
DRAWN = 40
"""Edges in the drawing."""

_CAPTION = (
    "Most frequent first. Frequency is the share of prompts; weight is attention for queries and keys, and in the unit "
    "of the root elsewhere."
)
_NETWORK_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
body { color: #222; background: #fff }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 0.15rem 0.9rem 0.15rem 0; border-bottom: 1px solid #ddd; white-space: nowrap }
.wide { overflow-x: auto }
"""

_NETWORK_POLICY = (
    "default-src 'none'; style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"
)

_NETWORK_PAGE = """<!doctype html>
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
    return _NETWORK_PAGE.format(
        policy=_NETWORK_POLICY.format(style=content_hash(_NETWORK_STYLE)),
        style=_NETWORK_STYLE,
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
