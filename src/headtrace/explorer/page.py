"""The circuit page: one HTML file that holds everything and asks for nothing.

    circuit.to_html("c.html")
    headtrace.explorer.write_page([first, second], "both.html")

The modules in ``page/`` are put into one inline script; style and script are named by their hashes in a
content security policy that allows nothing else. Text from circuits reaches the page as escaped JSON and is
only ever shown as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import to_json
from headtrace.circuits.summary import html_table, question, size
from headtrace.errors import InputError
from headtrace.explorer.modules import inline_modules
from headtrace.writing import write_text

_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def write_page(circuits: Circuit | Sequence[Circuit], path: str | Path, compare: bool = False) -> Path:
    """Write the page of one or several circuits; with ``compare``, two of them side by side at once."""
    return write_text(path, page(circuits, compare))


def page(circuits: Circuit | Sequence[Circuit], compare: bool = False) -> str:
    """The page as text."""
    several = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not several:
        raise InputError("A page needs at least one circuit; none was given.")
    data = {"circuits": [page_data(circuit) for circuit in several], "compare": compare}
    title = question(several[0]) if len(several) == 1 else f"{len(several)} circuits"
    style = part("theme.css") + part("style.css")
    return document(part("template.html"), title=title, style=style, script=_script(), data=data)


def document(template: str, *, title: str, style: str, script: str, data: Any) -> str:
    """A template with its style, script and data: it runs nothing else, and loads nothing."""
    return _fill(
        template,
        policy=_POLICY.format(script=content_hash(script), style=content_hash(style)),
        title=escape(f"{inert(title)[:200]} - headtrace"),
        style=style,
        script=script,
        data=json_for_script(data),
    )


def page_data(circuit: Circuit) -> dict[str, Any]:
    """A circuit file's data, with what the page would have to compute: the influence of each edge, names, words."""
    data = to_json(circuit)
    flows = circuit.flows()
    for edge, plain in zip(circuit.edges, data["edges"], strict=True):
        plain["flow"] = flows[edge]
    for node, plain in zip(circuit.nodes, data["nodes"], strict=True):
        plain["name"] = node.name
    return data | {
        "question": question(circuit, _spoken),
        "title": (circuit.prompt.text or " ".join(circuit.prompt.tokens))[:200],
        "size": size(circuit),
        "heads": len(circuit.heads()),
        "root_measure": circuit.root.measure,
        "unexplained": list(circuit.unexplained),
        "advice": [] if circuit.edges else circuit.root.advice(),
    }


_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202f\u2060-\u206f\ufeff\ud800-\udfff]"
)


def inert(text: str) -> str:
    r"""Text in which control characters, direction marks and halves of pairs are written out.

    >>> print(inert("a\u202eb"))
    a\u202eb
    """
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _spoken(answer: str) -> str:
    """An answer in a heading: without its outer space unless it is nothing else, in proper quotation marks."""
    return f"\u201c{answer.strip() or answer.replace(' ', '␣')}\u201d"


def json_for_script(data: Any) -> str:
    r"""JSON that cannot end the script element it stands in, nor break a line where JavaScript sees one.

    >>> print(json_for_script({"token": "</script>"}))
    {"token":"\u003c/script\u003e"}
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def frame(circuit: Circuit, height: int = 640) -> str:
    """The page as an inline frame for a notebook, with a plain table for readers that drop frames."""
    return (
        f'<iframe srcdoc="{escape(page(circuit))}" sandbox="allow-scripts allow-downloads" title="Circuit" '
        f'width="100%" height="{height}" style="border: 0"></iframe>'
        f"<details><summary>Strongest edges as a table</summary>{html_table(circuit)}</details>"
    )


@cache
def part(name: str, folder: str = "page") -> str:
    """A file that pages are made of."""
    return (files("headtrace.explorer") / folder / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    folder = files("headtrace.explorer") / "page"
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".js"))
    return inline_modules({name: part(name) for name in names}, "main.js", "start")


def content_hash(text: str) -> str:
    """By which a content security policy names a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _fill(template: str, **values: str) -> str:
    """Put values in place of ``{{name}}``, in one pass, so that no value is searched for names."""
    parts: list[str] = []
    for piece in template.split("{{"):
        name, closed, tail = piece.partition("}}")
        parts.append(values[name] + tail if closed and name in values else piece)
    return "".join(parts)
