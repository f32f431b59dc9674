"""``headtrace show``, ``view``, ``export`` and ``import``: circuits to look at, and those of other tools."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headtrace.cli import options
from headtrace.cli.output import (
    FORMATS,
    check_output,
    console,
    destination,
    emit,
    is_stream,
    note,
    printable,
    say,
)
from headtrace.errors import InputError
from headtrace.writing import STANDARD_OUTPUT, check_writable

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from headtrace.circuits import Circuit, Edge, Node


_COLOURS = {"query": "cyan", "key": "yellow", "value": "green", "input": "magenta"}


def show(
    circuit: options.CircuitSource,
    depth: int = typer.Option(12, min=1, help="How many steps deep the tree goes."),
    leaves: int = typer.Option(4, min=0, help="How many leaves (MLPs, embeddings) to list per side."),
    min_weight: float = typer.Option(0.0, help="Leave out weaker edges."),
    json: options.Json = False,
) -> None:
    """
    For a complete circuit, it also shows what each firing moves (value), what each MLP reads (input), and the hidden
    units that --neurons listed. Contributions are in the unit of the root.

    Under an edge are the words that `headtrace interpret` found for it, with the verdict of their test and its
    p-value.

    A node that occurs again is not expanded a second time. For a folder or a Parquet file, every circuit is shown.

    Examples:

      headtrace show c.json
      headtrace show c.json --depth 2 --min-weight 0.05
      headtrace show many.parquet#3
    """
    from headtrace.circuits import named_circuits
    from headtrace.circuits.files import to_json
    from headtrace.circuits.summary import opening

    found = [(name, each.prune(min_weight=min_weight)) for name, each in named_circuits(circuit)]

    def content() -> dict[str, object]:
        if len(found) == 1:
            return to_json(found[0][1])
        return {"circuits": [{"source": name, "circuit": to_json(each)} for name, each in found]}

    def show_all() -> None:
        for number, (name, each) in enumerate(found):
            if len(found) > 1:
                console.print(("\n" if number else "") + name, style="bold", markup=False, highlight=False)
            say(opening(each))
            if each.edges:
                console.print(tree(each, depth, leaves))

    emit(content, as_json=json, show=show_all)


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
    if opposing(circuit, edge):
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


# -- headtrace view and export -----------------------------------------------------------------------------------


def view(
    circuits: list[str] = typer.Argument(
        metavar="CIRCUIT ...",
        help="Circuit files, Parquet files (or one circuit: many.parquet#3), folders of them, runs (or DIR#ID).",
    ),
    out: str | None = typer.Option(
        None, "--out", help="Where to write the page (- for standard output); by default beside the first."
    ),
    open_page: bool = typer.Option(True, "--open/--no-open", help="Open the page in a browser."),
    json: options.Json = False,
) -> None:
    """
    Several circuits share a page with a switch; two are shown side by side.

    Examples:

      headtrace view c.json
      headtrace view mary.json john.json --out both.html --no-open
      headtrace view many.parquet#3
    """
    import webbrowser

    from headtrace.circuits import read_circuits
    from headtrace.explorer import write_page

    check_output(json, out)
    page = out or _beside(circuits[0])
    check_writable(page)
    if Path(page).suffix.lower() not in (".html", ".htm") and not is_stream(page):
        raise InputError(f"--out {page!r}: a page is HTML, so end its name in .html.")
    loaded = [circuit for source in circuits for circuit in read_circuits(source)]
    path = write_page(loaded, page, compare=len(loaded) == 2)
    emit({"out": page, "circuits": len(loaded)}, as_json=json, show=lambda: None)
    if page != STANDARD_OUTPUT and path.is_file():
        size = path.stat().st_size / 1000
        note(f"Wrote {path} ({size:.0f} kB). Open it in any browser; it needs no network.")
        if open_page and not json:
            webbrowser.open(path.resolve().as_uri())


def _beside(source: str) -> str:
    """A page named after a circuit: ``c.html`` for ``c.json``, ``many-3.html`` for ``many.parquet#3``."""
    if source == "-":
        raise InputError("A circuit from standard input has no name for its page: give --out PAGE.html.")
    if os.path.isdir(source):
        return str(Path(source) / "circuits.html")
    path, number = source, ""
    if not os.path.lexists(source) and "#" in source:
        path, _, number = source.rpartition("#")
    try:
        return str(Path(path).with_suffix("")) + (f"-{number}" if number else "") + ".html"
    except ValueError:
        raise InputError(f"{source!r} has no name for its page: give --out PAGE.html.") from None


def export(
    *,
    circuit: options.CircuitSource,
    out: str = typer.Option(help="File to write (- for standard output), or a folder for many."),
    to: str | None = typer.Option(
        None, help=f"{', '.join(FORMATS)} (default: by the extension of --out; .json is the circuit file)."
    ),
    json: options.Json = False,
) -> None:
    """
    graphml is for Gephi, yEd and Cytoscape; networkx is node-link JSON; neuronpedia is Neuronpedia's attribution
    graph; dot is for Graphviz; parquet is one table of edges.

    Examples:

      headtrace export circuit.json --out circuit.graphml
      headtrace export many.parquet#3 --to neuronpedia --out graph.json
      headtrace export circuits/ --out circuits.parquet
    """
    from headtrace.circuits import read_circuits

    check_output(json, out)
    destination(out, many=False, to=to).check()
    circuits = read_circuits(circuit)
    where = destination(out, many=len(circuits) > 1, to=to)
    written = where.write(circuits, force=True)
    emit({"out": out, "format": where.format, "circuits": len(circuits)}, as_json=json, show=lambda: None)
    if written:
        note(written)


def import_(
    *,
    files: list[str] = typer.Argument(
        metavar="FILE ...", help="GraphML, JSON or a Parquet table of edges, or folders of these."
    ),
    out: str = typer.Option(help="Where to write: .parquet for many, .json for one, or a folder."),
    model: str | None = typer.Option(
        None,
        "--model",
        help="The model's name, if a file does not give it. With a table: only rows of this model.",
    ),
    where: list[str] = typer.Option(
        [], "--where", help="With a table: only rows with this value, such as task=ioi. Repeatable."
    ),
    json: options.Json = False,
) -> None:
    """
    Fields that these files lack (token ids, influence, the hash of the weights) stay empty. merge, families, compare
    and view do not need them. Graphs that `headtrace export` wrote come back as they were.

    Examples:

      headtrace import graphs/ --model gpt2-small --out acc.parquet
      headtrace import circuits-2025.parquet --model gpt2-small --where task=ioi --out ioi.parquet
      headtrace import dallas-austin.json --out dallas.json
    """
    check_output(json, out)
    destination(out, many=False).check()
    chosen = dict(each.split("=", 1) for each in where if "=" in each)
    if len(chosen) != len(where):
        raise InputError("--where takes COLUMN=VALUE, once for each column, such as task=ioi.")
    found = [
        each
        for name in files
        for path in (_inside(Path(name)) if Path(name).is_dir() else [Path(name)])
        for each in _read(path, model, chosen)
    ]
    target = destination(out, many=len(found) > 1)
    written = target.write(found, force=True)
    edges = sum(len(each.edges) for each in found)
    emit({"out": out, "circuits": len(found), "edges": edges}, as_json=json, show=lambda: None)
    circuits = "1 circuit" if len(found) == 1 else f"{len(found)} circuits"
    note(f"{circuits}, {edges} edges. {written}".rstrip())


def _read(path: Path, model: str | None, where: dict[str, str]) -> list[Circuit]:
    from headtrace.circuits import imported

    if path.suffix.lower() == ".parquet":
        return imported(path, where=({} if model is None else {"model": model}) | where)
    return imported(path, model=model, where=where)


def _inside(folder: Path) -> list[Path]:
    """Files of a folder that may hold a graph, in the order of their names."""
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".graphml", ".json"))
    if not found:
        raise InputError(f"The folder {str(folder)!r} holds no GraphML or JSON files.")
    return found
