"""``headtrace families``: which circuits of a run are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.options import console
from headtrace.cli.verify import ModelChoice, ModelsOf

if TYPE_CHECKING:
    from headtrace.families import Families, FamiliesFile

GrainChoice = Annotated[
    str, typer.Option(help="What circuits are compared by: components, edges or edge-channel.")
]


def register(app: typer.Typer) -> None:
    app.command("families")(families)


def families(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run folder, a Parquet file of circuits, a folder of circuit files."
        ),
    ],
    grain: GrainChoice = "edge-channel",
    n: Annotated[
        int | None,
        typer.Option("--n", help="How many families (default: by silhouette, control and stability)."),
    ] = None,
    distance: Annotated[
        float | None, typer.Option(help="Instead of --n: groups whose mean distance is larger stay apart.")
    ] = None,
    k_max: Annotated[int, typer.Option(help="The most families that are looked for.", min=1)] = 10,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Ablate each family's exclusive edges on its own and on others' prompts."
        ),
    ] = False,
    prompts: Annotated[int, typer.Option(help="With --ablate: prompts of each family.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of samples and controls.", min=0)] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for families.json, clusters.png, stability.png, representatives.html (and ablation.png)."
        ),
    ] = None,
    model: ModelChoice = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Group circuits by what they have in common: families, their representatives, what they agree with.

    Without --n the number is the one with the highest silhouette among those that separate better than chance and come
    back in bootstrap samples; where none does, there is one family.

    Examples:

      headtrace families runs/ioi --out families

      headtrace families circuits.parquet --grain edges --n 2 --json

      headtrace families runs/ioi --ablate --prompts 50 --out families
    """
    from headtrace.families.population import check_grain
    from headtrace.families.result import find_families

    asked = check_grain(grain)
    if out is not None:
        options.check_folder_writable(out)
    found = find_families(run, asked, n=n, distance=distance, k_max=k_max, seed=seed)
    if ablate:
        first = found.population.circuit(found.population.ids[0])
        loaded = ModelsOf(model, dtype, device, device_map)(first)
        with options.progress_bar("Prompts") as progress:
            ablated = found.ablate_exclusive(loaded, prompts=prompts, seed=seed, progress=progress)
        found = found.with_ablation(ablated)
    content = found.file
    if out is not None:
        found.save(out)
        files = "families.json, clusters.png, stability.png, representatives.html" + (
            ", ablation.png" if ablate else ""
        )
        options.note(f"Wrote {out}: {files}")
    options.emit(content.to_dict(), as_json=json, show=lambda: _show(found, content))


def _show(found: Families, content: FamiliesFile) -> None:
    """How many there are and why, then one line per family, agreement and stability."""
    from rich import box
    from rich.table import Table

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(f"{len(found.family)} circuits by {found.grain}: {found.choice}")
    if found.population.left_out:
        say(
            f"{len(found.population.left_out)} prompts left out: they failed, or their circuits have no edges."
        )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("family", "circuits", "exclusive edges", "stability", "members"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("representative", no_wrap=True)
    stable = {row["family"]: row for row in (content.more or {})["stability"]["families"]}
    for row in found.table().to_dicts():
        again = stable.get(row["family"])
        numbers = ("", "") if again is None else (f"{again['edges']:.2f}", f"{again['members']:.2f}")
        cells = (str(row["family"]), str(row["circuits"]), str(row["exclusive"]), *numbers)
        table.add_row(*cells, options.token_text(row["representative"]))
    console.print(table)
    for name, agreed in content.agreement.items():
        say(f"{name}: ARI {agreed['ari']:.3f}, NMI {agreed['nmi']:.3f}, p {agreed['p']:.3g}")
    if found.ablated is not None:
        for row in found.ablated.contrasts().to_dicts():
            low, high = row["difference_low"], row["difference_high"]
            interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
            what = f"{found.ablated.metric} on own prompts minus others': {row['difference']:+.3f}{interval}"
            say(f"{row['edges']} exclusive edges of family {row['edges_of']} ablated, {what}")
