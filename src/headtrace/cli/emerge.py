"""``headtrace emerge``: how sparse attention emerges over the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.channels.emergence import Emergence
    from headtrace.models import Model
    from headtrace.vocabulary import Prompt


def register(app: typer.Typer) -> None:
    app.command("emerge")(emerge)


def emerge(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Checkpoint folders in order, or one model with --revisions.")
    ],
    revisions: Annotated[
        str | None, typer.Option(help="Revisions of one hub model, in order: step1,step1000,step143000.")
    ] = None,
    firings: Annotated[
        str | None,
        typer.Option(help='JSONL of firings: {"text": "When Mary ...", "firing": "L9H6:14:3"} per line.'),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Follow the strongest firings on these prompts."),
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option("--tokens", help="As --prompt, but token ids: 1,2,3.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many heads to follow without --firings.", min=1)] = 20,
    rotations: Annotated[int, typer.Option(help="Random rotations per firing.", min=1)] = 100,
    png: Annotated[str | None, typer.Option(help="Draw sparseness and n_recon over training.")] = None,
    bars: Annotated[str | None, typer.Option(help="Draw the terms of four firings, early and late.")] = None,
    out: options.NumbersFile = None,
    chat: options.Chat = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Follow the same heads and token pairs through training: sparseness and n_recon per checkpoint.

    Means over heads with 95% intervals, in the singular basis, in rotated bases of the same logit, and in
    rotated heads of the same spectrum. Without --firings, the strongest firings of the last checkpoint are
    followed.

    Examples:

      headtrace emerge run/step0 run/step100 run/step1000 -p "When Mary and John went to" --png emerge.png

      headtrace emerge pythia-160m --revisions step1,step1000,step143000 --firings firings.jsonl
    """
    options.check_output(json, out)
    for figure in (png, bars):
        options.check_figure(figure)
    options.check_numbers(out)
    places = _checkpoints(checkpoints, revisions)
    given: list[Prompt] = [options.read_prompt(text, None, None, chat) for text in prompt or []]
    given += [options.parse_ids(ids) for ids in tokens or []]
    if (firings is None) == (not given):
        raise InputError(
            "Say what to follow: a file with --firings, or prompts with -p (or --tokens) to take the "
            "strongest firings of."
        )
    from headtrace.channels.emergence import emergence, read_cases, strongest_cases

    if firings is not None:
        cases = read_cases(firings)
    else:
        last = options.load_model(places[-1].model, places[-1].revision, dtype, device, device_map)
        cases = strongest_cases(last, given, top)
    found = emergence(_load_each(places, dtype, device, device_map), cases, rotations=rotations)
    content = {"summary": found.summary().to_dicts(), "firings": found.frame.to_dicts()}
    options.emit(content, as_json=json, out=out, show=lambda: _show(found))
    if png is not None:
        found.plot(png)
        options.note(f"Wrote {png}")
    if bars is not None:
        from headtrace.figures.channels import plot_early_and_late

        plot_early_and_late(found, path=bars)
        options.note(f"Wrote {bars}")
    if out is not None:
        options.write_json(out, content)


class Checkpoint(NamedTuple):
    label: str
    model: str
    revision: str | None


def _checkpoints(checkpoints: list[str], revisions: str | None) -> list[Checkpoint]:
    if revisions is not None:
        if len(checkpoints) != 1:
            raise InputError(f"--revisions needs one model, but {len(checkpoints)} are given.")
        names = [name for name in revisions.replace(",", " ").split() if name]
        if not names:
            raise InputError("--revisions is empty. Write names with commas, like step1,step1000.")
        return [Checkpoint(name, checkpoints[0], name) for name in names]
    if len(checkpoints) < 2:
        raise InputError(
            f"One checkpoint ({checkpoints[0]!r}) shows no emergence: give several folders, or --revisions."
        )
    labels = [Path(folder).name for folder in checkpoints]
    if len(set(labels)) < len(labels):
        labels = checkpoints
    return [Checkpoint(label, folder, None) for label, folder in zip(labels, checkpoints, strict=True)]


def _load_each(
    places: list[Checkpoint], dtype: str, device: str, device_map: str | None
) -> Iterator[tuple[str, Model]]:
    """Load one checkpoint after another, so that only one is in memory."""
    from headtrace.models import load

    with options.progress_bar("Checkpoints", len(places)) as progress:
        for number, (label, name, revision) in enumerate(places):
            progress(number, len(places))
            yield (
                label,
                load(name, revision=revision, dtype=dtype, **options.device_kwargs(device, device_map)),
            )


def _show(found: Emergence) -> None:
    import polars as pl

    summary = found.summary()
    heads = found.frame.select("layer", "head").n_unique()
    title = f"{len(found.cases)} firings of {heads} heads: means over heads (95% interval)"
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("checkpoint")
    for name in ("attention", "sparseness", "rotated\nbasis", "rotated\nU, V", "n_recon", "rotated\nbasis"):
        table.add_column(name, justify="right")
    for checkpoint in found.checkpoints:
        here = summary.filter(pl.col("checkpoint") == checkpoint)
        rows = {(r["measure"], r["basis"]): r for r in here.to_dicts()}
        attention = found.frame.filter(pl.col("checkpoint") == checkpoint)["attention"].mean()
        table.add_row(
            options.token_text(checkpoint),
            f"{attention:.2f}",
            _interval(rows["sparseness", "true"], 3),
            _number(rows["sparseness", "basis"]["mean"], 3),
            _number(rows["sparseness", "spectrum"]["mean"], 3),
            _interval(rows["n_recon", "true"], 1),
            _number(rows["n_recon", "basis"]["mean"], 1),
        )
    options.show_table(title, table)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(row: dict[str, float | None], digits: int) -> str:
    if row["mean"] is None or row["low"] is None or row["high"] is None:
        return _number(row["mean"], digits)
    return f"{row['mean']:.{digits}f} ±{row['high'] - row['mean']:.{digits}f}"
