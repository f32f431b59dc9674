"""``headtrace merge``: the circuits of many prompts as one network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headtrace.cli import options
from headtrace.cli.output import (
    Output,
    notes,
    say,
    show_table,
    write_json,
)
from headtrace.errors import InputError
from headtrace.writing import (
    write_text,
)

if TYPE_CHECKING:
    import polars as pl

    from headtrace.runs.frames import Source
    from headtrace.runs.network import Network, NetworkEdge
    from headtrace.runs.references import ReferenceAgreement

FILES = ("network.json", "network.graphml", "network.png", "network.svg", "network.html")
"""What goes into a folder."""
ENDINGS = (".json", ".graphml", ".png", ".svg", ".pdf", ".html", ".tex")
SHOWN = 20


def merge(
    run: str = typer.Argument(
        metavar="RUN", help="A run, a Parquet file of circuits, or a folder of circuit files."
    ),
    by: str | None = typer.Option(
        None,
        help="Align prompts by roles or by positions (default: roles if the prompts have them). label:NAME makes one "
        "network for each value of a label.",
    ),
    roles: str | None = typer.Option(
        None,
        metavar="RUN",
        help="For a file of circuits: the run that they were exported from, whose roles they take.",
    ),
    channels: bool = typer.Option(False, "--channels", help="Count each channel of an edge separately."),
    min_frequency: float | None = typer.Option(
        None,
        help="Keep edges found in at least this share of prompts (default: all; 65/256 for a trace network, "
        "170/256 for a skeleton).",
        min=0,
        max=1,
    ),
    min_weight: float = typer.Option(
        0.0, help="Keep query and key edges with at least this mean weight.", min=0
    ),
    min_effect: float = typer.Option(
        0.0,
        help="Keep query and key edges whose ablation moved the metric by at least this in the mean, as measured by "
        "headtrace verify --update.",
        min=0,
    ),
    trace_network: bool = typer.Option(
        False,
        "--trace-network",
        help="Make a network of heads and of the tokens they attend from and to, as in Franco and Crovella (2024).",
    ),
    skeleton: bool = typer.Option(
        False, "--skeleton", help="Keep only the most frequent edges of the trace network."
    ),
    reference: str | None = typer.Option(
        None,
        metavar="NAME|FILE",
        help="A published circuit to compare with: gpt2-ioi, gpt2-greater-than, gpt2-pronoun, pythia-160m-ioi, or your "
        "own JSON file.",
    ),
    out: str | None = typer.Option(
        None,
        metavar="FILE|FOLDER",
        help=f"A file ({', '.join(ENDINGS)}; - for JSON on standard output), or a folder for all formats.",
    ),
    json: options.Json = False,
) -> None:
    """
    A role is what a token is in its prompt, such as the indirect object; roles align prompts of different lengths.
    --reference adds precision, recall and F1 of heads and edges at every threshold of frequency and weight.

    Examples:

      headtrace merge runs/ioi --out structure
      headtrace merge runs/ioi --by label:order --out by-order
      headtrace merge many.parquet --by positions --min-frequency 0.5 --out network.html
      headtrace merge runs/ioi --skeleton --out skeleton.svg
      headtrace export runs/ioi --out many.parquet && headtrace verify many.parquet --update
      headtrace merge many.parquet --roles runs/ioi --min-effect 0.05 --out strong.html
      headtrace merge runs/gpt2 --trace-network --reference gpt2-ioi --json
    """
    from headtrace.runs.frames import frames_of
    from headtrace.runs.merging import DRAWN, SKELETON
    from headtrace.runs.merging import merge as merge_circuits
    from headtrace.runs.merging import trace_network as trace_network_of
    from headtrace.runs.references import agreement, load_reference

    label = by.removeprefix("label:") if by is not None and by.startswith("label:") else None
    output = Output(json, out, ENDINGS if label is None else (), folder=True)
    heads_only = trace_network or skeleton
    if label is None and by not in (None, "roles", "positions"):
        raise InputError(f"--by {by}: choose roles, positions or label:NAME.")
    if channels and heads_only:
        raise InputError(
            "A trace network has no channels: give --channels, or --trace-network or --skeleton."
        )
    published = None if reference is None else load_reference(reference)
    kind: Any = None if label is not None else by
    if min_frequency is None:
        min_frequency = SKELETON if skeleton else DRAWN if trace_network else 0.0

    def merged(source: Source) -> tuple[Network, ReferenceAgreement | None]:
        if heads_only:
            whole = trace_network_of(source, min_frequency=0.0, by=kind)
        else:
            whole = merge_circuits(source, by=kind, channels=channels)
        # The agreement is of the whole network: the thresholds of its sweep are cuts of their own.
        found = None if published is None else agreement(whole, published)
        return whole.prune(min_frequency, min_weight, min_effect=min_effect), found

    with notes.status("Merging circuits"):
        source = _with_roles(run, roles)
        parts: dict[str, Source] = {"": source} if label is None else {**frames_of(source).by_label(label)}
        networks = {value: merged(source) for value, source in parts.items()}
    if label is None:
        network, found = networks[""]
        output.finish(
            lambda: _content(network, found),
            lambda: _show(network, found),
            save=lambda path: _save(network, found, path, output.ending),
            # The sweep against the reference, or else the edges.
            table=lambda: _edge_frame(network) if found is None else found.table,
            files=", ".join(FILES),
        )
        return

    def show() -> None:
        for value, each in networks.items():
            say(f"{label} {value}:")
            _show(*each)

    def save(path: str) -> None:
        for number, each in enumerate(networks.values()):
            _save(*each, os.path.join(path, folders[number]), "")

    # A value may hold anything that a folder's name may not.
    folders = [
        f"{number}-{''.join(letter if letter.isalnum() else '-' for letter in value)[:40]}"
        for number, value in enumerate(networks)
    ]
    output.finish(
        lambda: {"label": label, "networks": {value: _content(*each) for value, each in networks.items()}},
        show,
        save=save,
        files=", ".join(f"{folder}/" for folder in folders),
    )


def _with_roles(source: str, roles: str | None) -> Source:
    """The source; circuits of a file with the roles of the run that they came from."""
    from headtrace.runs.frames import frames_of, open_source, roles_of_run

    if roles is None:
        return source
    circuits: Any = open_source(source)
    if not isinstance(circuits, list):
        raise InputError(f"{source!r} is a run and has its own roles: leave out --roles.")
    return frames_of(circuits, roles_of_run(roles))


def _save(network: Network, found: ReferenceAgreement | None, out: str, ending: str) -> None:
    """One file, or all of them into a folder."""
    from headtrace.runs.network import dumps

    plain = {
        ".graphml": network.save,
        ".html": network.to_html,
        ".json": lambda path: write_text(path, dumps(network)),
    }
    if ending:
        plain.get(ending, network.plot)(out)
        return
    for name in FILES:
        plain.get(Path(name).suffix, network.plot)(os.path.join(out, name))
    if found is not None:
        write_json(os.path.join(out, "agreement.json"), _agreement(found))


def _edge_frame(network: Network) -> pl.DataFrame:
    """Edges by falling frequency: between which components at which places, on which side, how often, how strong."""
    import polars as pl

    named = {node.id: str(node) for node in network.nodes}
    rows = [
        (named[edge.source], named[edge.target], edge.side, edge.frequency, edge.weight)
        for edge in network.top(len(network.edges))
    ]
    return pl.DataFrame(rows, schema=["source", "target", "side", "frequency", "weight"], orient="row")


# -- writing -----------------------------------------------------------------------------------------------------


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
    from headtrace.explorer.page import about

    say(about(network))
    if not network.edges:
        say("No edge is left: try a lower --min-frequency, --min-weight or --min-effect.")
        return

    def words(edge: NetworkEdge) -> str:
        side = edge.side if edge.channel is None else f"{edge.side}, channel {edge.channel}"
        return side if edge.kind == "communication" else f"{edge.kind} ({side})"

    columns = {
        "source": lambda edge: network.node(edge.source).name,
        "into": words,
        "target": lambda edge: network.node(edge.target).name,
        "prompts": "{0.count}",
        "share": "{0.frequency:.0%}",
        "weight": "{0.weight:.3g}",
    }
    rows = network.top(SHOWN)
    show_table(rows, columns, title=f"The {len(rows)} most frequent edges", left=3)
    if found is not None:
        _show_agreement(found)


def _show_agreement(found: ReferenceAgreement) -> None:
    reference = found.reference
    say(f"Against {reference.name} ({reference.model.name}): {reference.source or 'no source is given'}")
    if found.network.model is not None:
        say(f"This network is of {found.network.model.name}.")
    names = ("threshold", "heads", "heads_precision", "heads_recall", "heads_f1")
    names += ("edges", "edges_precision", "edges_recall", "edges_f1") if reference.edges else ()
    rows = [row for row in found.table.to_dicts() if row["by"] == "frequency" and row["heads"]]
    columns = {name.replace("_", " "): f"{{{name}:.4g}}" for name in names}
    show_table(rows, columns, title="By frequency", left=0)
