"""``headtrace atlas``: what every head and channel of a model attends to over a corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.engine_options import EngineName, RayAddress, Workers, check_engine, going_on
from headtrace.cli.options import console

if TYPE_CHECKING:
    from headtrace.interpret.atlas import Atlas

Corpus = Annotated[
    str,
    typer.Option(
        help="A text file, JSONL or Parquet (text), hub:owner/name, sampled:N (drawn from the model), task:NAME."
    ),
]


def register(app: typer.Typer) -> None:
    app.command("atlas")(atlas)


def atlas(
    model: options.ModelName,
    corpus: Corpus,
    out: Annotated[str, typer.Option(help="Folder for tables and pages; an interrupted atlas is resumed.")],
    channels: Annotated[
        str, typer.Option(help="top:8 for the strongest channels of every head, or some: L9H6:3,L9H6:7.")
    ] = "top:8",
    tokens: Annotated[
        int | None, typer.Option(help="Read so many tokens of the corpus (default: all).", min=1)
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a chunk (default 128).", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)] = 0,
    sinks: Annotated[
        bool, typer.Option("--sinks", help="Keep pairs whose source is the first token, too.")
    ] = False,
    engine: EngineName = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    revision: options.Revision = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """What every head and channel attends to over a corpus: tables, and pages that open in a browser.

    Writes heads.parquet, channels.parquet, pairs.parquet, atlas.json and the pages index.html and heads/*.html.

    Examples:

      headtrace atlas smollm2-135m --corpus book.txt --tokens 50000 --out atlas

      headtrace atlas builtin --corpus sampled:2000 --channels top:4 --out atlas

      headtrace atlas smollm2-135m --corpus texts.jsonl --workers 8 --out atlas
    """
    from headtrace.explorer import write_atlas_pages
    from headtrace.interpret.atlas import atlas as make

    check_engine(engine)
    options.check_folder_writable(out)
    loaded = options.load_model(model, revision, dtype, device, device_map)
    how: dict[str, Any] = {
        "channels": channels,
        "tokens": tokens,
        "length": length,
        "seed": seed,
        "sinks": sinks,
    }
    how |= {"engine": engine, "workers": workers, "ray_address": ray_address}
    with options.progress_bar("Chunks", resumes=True) as progress:
        try:
            found = make(loaded, corpus, out, **how, progress=progress)
        except KeyboardInterrupt:
            raise going_on() from None
    index = write_atlas_pages(found)
    options.note(f"Wrote {out}: heads.parquet, channels.parquet, pairs.parquet, {index.name}")
    content = {
        **found.about,
        "out": out,
        "heads": found.heads.height,
        "channels": found.channels.height,
        "pairs": found.n_pairs,
        "highest": {name: found.find(name, 3)["head"].to_list() for name in _SHOWN},
    }
    options.emit(content, as_json=json, show=lambda: _show(found))


_SHOWN = ("sink", "previous", "duplicate", "induction", "entropy", "top_share")


def _show(found: Atlas) -> None:
    console.print(repr(found), markup=False, highlight=False, soft_wrap=True)
    table = Table(
        title="The heads that do it most", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("measure", no_wrap=True)
    table.add_column("heads", no_wrap=True)
    for name in _SHOWN:
        rows = found.find(name, 4).iter_rows(named=True)
        cells = [f"{row['head']} {row[name]:.2f}" for row in rows if row[name] is not None]
        table.add_row(name.replace("_", " "), "  ".join(cells))
    console.print(table)
