"""``headtrace merge``: the circuits of many prompts as one network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.destinations import is_stream
from headtrace.cli.options import console
from headtrace.errors import InputError
from headtrace.writing import STANDARD_OUTPUT, ends_like_a_folder, write_text

if TYPE_CHECKING:
    from headtrace.runs.network import Network
    from headtrace.runs.references import ReferenceAgreement

FILES = ("network.json", "network.graphml", "network.png", "network.svg", "network.html")
"""What goes into a folder."""
ENDINGS = (".json", ".graphml", ".png", ".svg", ".pdf", ".html")
SHOWN = 20


def register(app: typer.Typer) -> None:
    app.command("merge")(merge)


def merge(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run, a Parquet file of circuits, or a folder of circuit files."
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option(help="What places are: roles or positions (default: roles where there are some)."),
    ] = None,
    channels: Annotated[
        bool, typer.Option("--channels", help="Count an edge for each channel it uses by itself.")
    ] = False,
    min_frequency: Annotated[
        float | None,
        typer.Option(
            help="Keep edges found in at least this share of prompts (default: all; 65/256 for a trace network, "
            "170/256 for a skeleton).",
            min=0,
            max=1,
        ),
    ] = None,
    min_weight: Annotated[
        float, typer.Option(help="Keep query and key edges of at least this mean weight.", min=0)
    ] = 0.0,
    trace_network: Annotated[
        bool,
        typer.Option(
            "--trace-network", help="Heads, and the tokens they attend between, as in the 2024 paper."
        ),
    ] = False,
    skeleton: Annotated[
        bool, typer.Option("--skeleton", help="The trace network's most frequent edges.")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A published circuit to compare with: gpt2-ioi, pythia-160m-ioi, your JSON.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help=f"A file by its ending ({', '.join(ENDINGS)}; - for JSON on standard output), or a folder for all.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Merge the circuits of many prompts into one network of components at roles, with how often each edge was found.

    With a reference: precision, recall and F1 of its heads and edges at every threshold of frequency and weight.

    Examples:

      headtrace merge runs/ioi --out structure

      headtrace merge many.parquet --by positions --min-frequency 0.5 --out network.html

      headtrace merge runs/ioi --skeleton --out skeleton.svg

      headtrace merge runs/gpt2 --trace-network --reference gpt2-ioi --json
    """
    from headtrace.runs.merging import DRAWN, SKELETON
    from headtrace.runs.references import agreement, load_reference

    options.check_output(json, out)
    _check(by, channels, trace_network or skeleton, out)
    published = None if reference is None else load_reference(reference)
    whole = _network(run, by, channels, trace_network or skeleton)
    if min_frequency is None:
        min_frequency = SKELETON if skeleton else DRAWN if trace_network else 0.0
    network = whole.prune(min_frequency, min_weight)
    # Of the whole network: the thresholds of the sweep are cuts of their own.
    found = None if published is None else agreement(whole, published)
    if out is not None:
        _write(network, found, out)
    content = _content(network, found)
    options.emit(content, as_json=json, show=lambda: _show(network, found), out=out)


def _check(by: str | None, channels: bool, trace: bool, out: str | None) -> None:
    """What can be known before anything is read."""
    if by not in (None, "roles", "positions"):
        raise InputError(f"--by {by}: choose roles or positions.")
    if channels and trace:
        raise InputError(
            "A trace network has no channels: give --channels, or --trace-network or --skeleton."
        )
    if out is None:
        return
    if _is_folder(out):
        options.check_folder_writable(out)
    elif is_stream(out) or Path(out).suffix.lower() in ENDINGS:
        options.check_writable(out)
    else:
        raise InputError(
            f"--out {out!r}: a network is written as {', '.join(ENDINGS)}. End it so, or give a folder for all of them."
        )


def _is_folder(out: str) -> bool:
    return not is_stream(out) and (Path(out).is_dir() or ends_like_a_folder(out) or not Path(out).suffix)


def _network(run: str, by: Any, channels: bool, trace: bool) -> Network:
    from headtrace.runs.merging import merge, trace_network

    with options.notes.status("Merging circuits"):
        if trace:
            return trace_network(run, min_frequency=0.0, by=by)
        return merge(run, by=by, channels=channels)


# -- writing -----------------------------------------------------------------------------------------------------


def _write(network: Network, found: ReferenceAgreement | None, out: str) -> None:
    if not _is_folder(out):
        _writer(network, Path(out).suffix.lower())(out)
        if out != STANDARD_OUTPUT:
            options.note(f"Wrote {out}")
        return
    for name in FILES:
        _writer(network, Path(name).suffix)(str(Path(out) / name))
    if found is not None:
        options.write_json(str(Path(out) / "agreement.json"), _agreement(found))
    options.note(f"Wrote {out}: {', '.join(FILES)}")


def _writer(network: Network, ending: str) -> Callable[[str], object]:
    from headtrace.runs.network import dumps

    match ending:
        case ".graphml":
            return network.save
        case ".html":
            return network.to_html
        case ".png" | ".svg" | ".pdf":
            return network.plot
        case _:  # also a stream, which has no ending
            return lambda path: write_text(path, dumps(network))


# -- telling -----------------------------------------------------------------------------------------------------


def _content(network: Network, found: ReferenceAgreement | None) -> dict[str, Any]:
    content = {
        "model": None if network.model is None else network.model.name,
        "form": network.form,
        "by": network.by,
        "prompts": network.prompts,
        "without": network.without,
        "places": network.places,
        "nodes": len(network.nodes),
        "edges": len(network.edges),
        "heads": [f"L{layer}H{head}" for layer, head in network.heads()],
        "top": network.frame().head(SHOWN).to_dicts(),
    }
    return content | ({} if found is None else {"agreement": _agreement(found)})


def _agreement(found: ReferenceAgreement) -> dict[str, Any]:
    return {
        "reference": found.reference.name,
        "source": found.reference.source,
        "model": found.reference.model.name,
        "best": found.best(),
        "groups": found.groups().to_dicts(),
        "sweep": found.table.to_dicts(),
    }


def _show(network: Network, found: ReferenceAgreement | None) -> None:
    from headtrace.explorer.network import about

    console.print(about(network), markup=False, highlight=False, soft_wrap=True)
    if not network.edges:
        console.print("No edge is left: try a lower --min-frequency or --min-weight.", markup=False)
        return
    console.print(_edges(network))
    if found is not None:
        _show_agreement(found)


def _edges(network: Network) -> Table:
    some = min(SHOWN, len(network.edges))
    table = Table(
        title=f"The {some} most frequent edges",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("source", "into", "target"):
        table.add_column(name, no_wrap=True)
    for name in ("prompts", "share", "weight"):
        table.add_column(name, justify="right", no_wrap=True)
    for edge in network.top(SHOWN):
        side = edge.side if edge.channel is None else f"{edge.side}, channel {edge.channel}"
        words = side if edge.kind == "communication" else f"{edge.kind} ({side})"
        source, target = (options.token_text(network.node(end).name) for end in (edge.source, edge.target))
        table.add_row(source, words, target, str(edge.count), f"{edge.frequency:.0%}", f"{edge.weight:.3g}")
    return table


def _show_agreement(found: ReferenceAgreement) -> None:
    reference = found.reference
    lines = [f"Against {reference.name} ({reference.model.name}): {reference.source or 'no source is given'}"]
    if found.network.model is not None:
        lines.append(f"This network is of {found.network.model.name}.")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    table = Table(title="By frequency", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns = ("threshold", "heads", "heads_precision", "heads_recall", "heads_f1")
    columns += ("edges", "edges_precision", "edges_recall", "edges_f1") if reference.edges else ()
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for row in found.table.iter_rows(named=True):
        if row["by"] == "frequency" and row["heads"]:
            cells = (row[name] for name in columns)
            table.add_row(*("" if cell is None else options.readable(cell) for cell in cells))
    console.print(table)
