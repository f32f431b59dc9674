"""``headtrace show``: a circuit as a tree in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.export import CircuitSource
from headtrace.cli.options import console, printable

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from headtrace.circuits import Circuit, Edge, Node

_COLOURS = {"query": "cyan", "key": "yellow", "value": "green", "input": "magenta"}


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    circuit: CircuitSource,
    depth: Annotated[int, typer.Option(min=1, help="How many steps deep the tree goes.")] = 12,
    leaves: Annotated[
        int, typer.Option(min=0, help="How many leaves (MLPs, embeddings) to list per side.")
    ] = 4,
    min_weight: Annotated[float, typer.Option(help="Leave out weaker edges.")] = 0.0,
    json: options.Json = False,
) -> None:
    """Print a circuit as a tree: the root, its seeds, and under each firing the causes of its query and key.

    Complete circuits show what each firing moves (value) and what each MLP reads (input), too, with contributions in
    the unit of the root, and the hidden units that --neurons asked for.

    Words that `headtrace interpret` put on an edge stand under it, with the verdict of their test and its p-value.

    Whatever occurs again is not unfolded a second time. Of many circuits (a folder, a Parquet file) each is shown.

    Examples:

      headtrace show c.json

      headtrace show c.json --depth 2 --min-weight 0.05

      headtrace show many.parquet#3
    """
    from headtrace.circuits import named_circuits

    found = [(name, each.prune(min_weight=min_weight)) for name, each in named_circuits(circuit)]
    options.emit(_content(found) if json else {}, as_json=json, show=lambda: _show_all(found, depth, leaves))


def _content(found: list[tuple[str, Circuit]]) -> dict[str, object]:
    """One circuit as its file has it; many as a list."""
    from headtrace.circuits.files import to_json

    if len(found) == 1:
        return to_json(found[0][1])
    return {"circuits": [{"source": name, "circuit": to_json(circuit)} for name, circuit in found]}


def _show_all(found: list[tuple[str, Circuit]], depth: int, leaves: int) -> None:
    from headtrace.circuits.summary import opening

    for number, (name, circuit) in enumerate(found):
        if len(found) > 1:
            console.print(("\n" if number else "") + name, style="bold", markup=False, highlight=False)
        text = printable(opening(circuit), lines=True)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if circuit.edges:
            console.print(tree(circuit, depth, leaves))


def tree(circuit: Circuit, depth: int = 12, leaves: int = 4) -> Tree:
    """The circuit as a rich tree. No token text is read as markup."""
    from rich.text import Text
    from rich.tree import Tree

    from headtrace.circuits.summary import place

    root = circuit.root_node
    assert root is not None
    top = Tree(Text(printable(place(circuit, root)), style="bold"), guide_style="dim")
    _grow(circuit, top, root, depth, leaves, seen=set())
    return top


def _grow(circuit: Circuit, branch: Tree, node: Node, depth: int, leaves: int, seen: set[int]) -> None:
    from rich.text import Text

    from headtrace.circuits.summary import FROM_THE_ROOT

    causes = circuit.edges_into(node)
    for side in FROM_THE_ROOT:
        edges = sorted((e for e in causes if e.side == side), key=lambda e: (-e.weight, e.source))
        if not edges:
            continue
        stem = branch if side == "root" else branch.add(Text(side, style=_COLOURS[side]))
        shown = 0
        for edge in edges:
            source = circuit.node(edge.source)
            if source.kind == "head" or circuit.edges_into(source):
                _grow_from(circuit, stem, edge, source, depth, leaves, seen)
                continue
            shown += 1
            if shown <= leaves:
                stem.add(_edge_text(circuit, edge, source, ""))
        if shown > leaves:
            stem.add(Text(f"and {shown - leaves} more leaves", style="dim"))


def _grow_from(
    circuit: Circuit, stem: Tree, edge: Edge, source: Node, depth: int, leaves: int, seen: set[int]
) -> None:
    """A source with what is under it, unless that was shown before or lies too deep."""
    causes, again = circuit.edges_into(source), source.id in seen
    deeper = bool(causes) and not again and depth > 1
    note = "  (above)" if again else "  ..." if causes and not deeper else ""
    twig = stem.add(_edge_text(circuit, edge, source, note))
    if deeper:
        seen.add(source.id)
        _grow(circuit, twig, source, depth - 1, leaves, seen)


def _edge_text(circuit: Circuit, edge: Edge, source: Node, note: str) -> Text:
    from rich.text import Text

    from headtrace.circuits.summary import amount, channel_text, opposing, place, words_text

    text = Text(printable(place(circuit, source)), style="bold" if source.kind == "head" else "")
    details = [f"{amount(edge):.4f}", channel_text(edge)]
    if source.attention is not None:
        details.insert(1, f"attention {source.attention:.3f}")
    if source.kind == "head" and not source.explained:
        details.append("unexplained")
    if opposing(edge):
        details.append("opposing")
    if edge.left is not None:
        details.append(f"{edge.left:.0%} left without its input")
    if source.neurons and not note:
        details.append("units " + ", ".join(f"{n.unit} ({n.contribution:+.3f})" for n in source.neurons))
    text.append("  " + "  ".join(part for part in details if part) + note, style="dim not bold")
    if edge.description is not None:
        doubtful = edge.evidence is not None and not edge.evidence.supported
        style = "italic dim not bold" if doubtful else "italic not bold"
        text.append("\n" + printable(words_text(edge)), style=style)
    return text
