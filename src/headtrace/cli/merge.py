"""``headtrace merge``: the circuits of many prompts as one network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headtrace.cli import options
from headtrace.cli.output import (
    check_output,
    emit,
    is_stream,
    note,
    notes,
    number,
    say,
    show_table,
    token_text,
    write_json,
)
from headtrace.errors import InputError
from headtrace.writing import (
    STANDARD_OUTPUT,
    check_folder_writable,
    check_writable,
    ends_like_a_folder,
    write_text,
)

if TYPE_CHECKING:
    from headtrace.runs.network import Network
    from headtrace.runs.references import ReferenceAgreement

FILES = ("network.json", "network.graphml", "network.png", "network.svg", "network.html")
"""What goes into a folder."""
ENDINGS = (".json", ".graphml", ".png", ".svg", ".pdf", ".html")
SHOWN = 20


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
    """
    With a reference: precision, recall and F1 of its heads and edges at every threshold of frequency and weight.

    Examples:

      headtrace merge runs/ioi --out structure

      headtrace merge many.parquet --by positions --min-frequency 0.5 --out network.html

      headtrace merge runs/ioi --skeleton --out skeleton.svg

      headtrace merge runs/gpt2 --trace-network --reference gpt2-ioi --json
    """
    from headtrace.runs.merging import DRAWN, SKELETON
    from headtrace.runs.merging import merge as merge_circuits
    from headtrace.runs.merging import trace_network as trace_network_of
    from headtrace.runs.references import agreement, load_reference

    check_output(json, out)
    heads_only = trace_network or skeleton
    _check(by, channels, heads_only, out)
    published = None if reference is None else load_reference(reference)
    kind: Any = by
    with notes.status("Merging circuits"):
        if heads_only:
            whole = trace_network_of(run, min_frequency=0.0, by=kind)
        else:
            whole = merge_circuits(run, by=kind, channels=channels)
    if min_frequency is None:
        min_frequency = SKELETON if skeleton else DRAWN if trace_network else 0.0
    network = whole.prune(min_frequency, min_weight)
    # Of the whole network: the thresholds of the sweep are cuts of their own.
    found = None if published is None else agreement(whole, published)
    if out is not None:
        _write(network, found, out)
    emit(lambda: _content(network, found), as_json=json, show=lambda: _show(network, found), out=out)


def _check(by: str | None, channels: bool, trace: bool, out: str | None) -> None:
    """What can be checked before anything is read."""
    if by not in (None, "roles", "positions"):
        raise InputError(f"--by {by}: choose roles or positions.")
    if channels and trace:
        raise InputError(
            "A trace network has no channels: give --channels, or --trace-network or --skeleton."
        )
    if out is None:
        return
    if _is_folder(out):
        check_folder_writable(out)
    elif is_stream(out) or Path(out).suffix.lower() in ENDINGS:
        check_writable(out)
    else:
        raise InputError(
            f"--out {out!r}: a network is written as {', '.join(ENDINGS)}. End it so, or give a folder for all of them."
        )


def _is_folder(out: str) -> bool:
    return not is_stream(out) and (Path(out).is_dir() or ends_like_a_folder(out) or not Path(out).suffix)


# -- writing -----------------------------------------------------------------------------------------------------


def _write(network: Network, found: ReferenceAgreement | None, out: str) -> None:
    if not _is_folder(out):
        _writer(network, Path(out).suffix.lower())(out)
        if out != STANDARD_OUTPUT:
            note(f"Wrote {out}")
        return
    for name in FILES:
        _writer(network, Path(name).suffix)(str(Path(out) / name))
    if found is not None:
        write_json(str(Path(out) / "agreement.json"), _agreement(found))
    note(f"Wrote {out}: {', '.join(FILES)}")


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


# -- printing ----------------------------------------------------------------------------------------------------


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

    say(about(network))
    if not network.edges:
        say("No edge is left: try a lower --min-frequency or --min-weight.")
        return
    rows: list[tuple[str, ...]] = []
    for edge in network.top(SHOWN):
        side = edge.side if edge.channel is None else f"{edge.side}, channel {edge.channel}"
        words = side if edge.kind == "communication" else f"{edge.kind} ({side})"
        source, target = (token_text(network.node(end).name) for end in (edge.source, edge.target))
        rows.append((source, words, target, str(edge.count), f"{edge.frequency:.0%}", f"{edge.weight:.3g}"))
    names = ("source", "into", "target", "prompts", "share", "weight")
    show_table(names, rows, title=f"The {len(rows)} most frequent edges", left=3)
    if found is not None:
        _show_agreement(found)


def _show_agreement(found: ReferenceAgreement) -> None:
    reference = found.reference
    say(f"Against {reference.name} ({reference.model.name}): {reference.source or 'no source is given'}")
    if found.network.model is not None:
        say(f"This network is of {found.network.model.name}.")
    names = ("threshold", "heads", "heads_precision", "heads_recall", "heads_f1")
    names += ("edges", "edges_precision", "edges_recall", "edges_f1") if reference.edges else ()
    rows = [
        [number(row[name], ".4g") for name in names]
        for row in found.table.iter_rows(named=True)
        if row["by"] == "frequency" and row["heads"]
    ]
    show_table([name.replace("_", " ") for name in names], rows, title="By frequency", left=0)
