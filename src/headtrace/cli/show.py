"""``headtrace show``: a circuit as a tree in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from headtrace.circuits import Circuit, Edge, Node

_COLOURS = {"query": "cyan", "key": "yellow", "value": "green", "input": "magenta"}


def register(app: typer.Typer) -> None:
    app.command("show", help=show.__doc__)(show)


def show(
    file: Path = typer.Argument(..., metavar="FILE", help="A circuit file."),
    depth: int = typer.Option(12, "--depth", min=1, help="How many steps deep the tree goes."),
    leaves: int = typer.Option(
        4, "--leaves", min=0, help="How many leaves (MLPs, embeddings) to list per side."
    ),
    min_weight: float = typer.Option(0.0, "--min-weight", help="Leave out weaker edges."),
) -> None:
    """Print a circuit as a tree: the root, its seeds, and under each firing the causes of its query and key.

    Whatever occurs again is not unfolded a second time.

    Examples:

        headtrace show c.json

        headtrace show c.json --depth 2 --min-weight 0.05
    """
    from rich.console import Console

    from headtrace.circuits import load_circuit

    circuit = load_circuit(file).prune(min_weight=min_weight)
    console = Console()
    console.print(circuit.summary().split("\n\n")[0], markup=False, highlight=False, soft_wrap=True)
    if circuit.edges:
        console.print(tree(circuit, depth, leaves))


def tree(circuit: Circuit, depth: int = 12, leaves: int = 4) -> Tree:
    """The circuit as a rich tree. No token text is read as markup."""
    from rich.text import Text
    from rich.tree import Tree

    from headtrace.circuits.summary import place

    root = circuit.root_node
    assert root is not None
    top = Tree(Text(place(circuit, root), style="bold"), guide_style="dim")
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

    from headtrace.circuits.summary import channel_text, place

    text = Text(place(circuit, source).replace("\n", "\\n"), style="bold" if source.kind == "head" else "")
    details = [f"{edge.weight:.4f}", channel_text(edge)]
    if source.attention is not None:
        details.insert(1, f"attention {source.attention:.3f}")
    if source.kind == "head" and not source.explained:
        details.append("unexplained")
    text.append("  " + "  ".join(part for part in details if part) + note, style="dim not bold")
    return text
