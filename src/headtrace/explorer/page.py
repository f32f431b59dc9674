"""The circuit page: one HTML file that holds everything and loads nothing (`headtrace.explorer.document`).

    circuit.to_html("c.html")
    headtrace.explorer.write_page([first, second], "both.html")

Text from circuits is only ever shown as text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.circuits.circuit import Circuit
from headtrace.circuits.files import to_json
from headtrace.circuits.summary import html_table, question, size
from headtrace.errors import InputError
from headtrace.explorer.document import document, inline_modules, part, scripts
from headtrace.validation import plain
from headtrace.writing import write_text

if TYPE_CHECKING:
    from headtrace.mechanism import Mechanism


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
    """A mechanism for its view: what its file says, in words and as a drawing that is so many pixels wide."""
    return {
        "sentence": mechanism.sentence,
        "origin": mechanism.origin,
        "clauses": [plain(clause) for clause in mechanism.clauses],
        "steps": [plain(step) for step in mechanism.steps],
        "ledger": [plain(line) for line in mechanism.ledger],
        "test": None if mechanism.test is None else plain(mechanism.test),
        "whole": mechanism.whole,
        "chosen": list(mechanism.chosen),
        "svg": mechanism.to_svg(width),
        "advice": [] if mechanism.steps else _advice(mechanism.circuit),
    }


def _advice(circuit: Circuit) -> list[dict[str, str]]:
    """Where a mechanism has no steps: commands that may find some, with what each does."""
    prompt = circuit.prompt.text
    given = (
        ["-p", prompt] if prompt is not None else ["--tokens", ",".join(map(str, circuit.prompt.token_ids))]
    )
    name = circuit.model.name
    return [
        {
            "does": "compare with natural changes of one word",
            "command": shlex.join(["headtrace", "why", name, *given]),
        },
        {"does": "see which words matter", "command": shlex.join(["headtrace", "matters", name, *given])},
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
    }


def _quoted(answer: str) -> str:
    """An answer in a heading: without its outer space unless it is nothing else, in proper quotation marks."""
    return f"\u201c{answer.strip() or answer.replace(' ', '␣')}\u201d"


def frame(circuit: Circuit, height: int = 640) -> str:
    """The page as an inline frame for a notebook, with a plain table for readers that drop frames."""
    return (
        f'<iframe srcdoc="{escape(page(circuit))}" sandbox="allow-scripts allow-downloads" title="Circuit" '
        f'width="100%" height="{height}" style="border: 0"></iframe>'
        f"<details><summary>Strongest edges as a table</summary>{html_table(circuit)}</details>"
    )
