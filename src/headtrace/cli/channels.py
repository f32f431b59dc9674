"""``headtrace decompose`` and ``headtrace emerge``: attention scores as sums over the channels of their head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headtrace.cli import options
from headtrace.cli.output import Output, console, notes, number, show_table, show_tokens, token_text
from headtrace.cli.progress import progress_bar
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.channels import Decomposition
    from headtrace.channels.emergence import Emergence
    from headtrace.models import Model
    from headtrace.vocabulary import Prompt


def decompose(
    *,
    model: options.ModelName,
    prompt: options.PromptOptions,
    firing: Annotated[
        str | None, typer.Option(help="Layer and head, destination, source: L9H6:14:3. Without it: a table.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many channels, or firings, to show.", min=1)] = 15,
    bias: Annotated[
        str, typer.Option(help="offset, or homogeneous (the 2024 form, for models without rotary positions).")
    ] = "offset",
    png: options.Figure = None,
    out: options.NumbersFile = None,
    bos: options.Bos = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Without --firing, lists the strongest firings of the prompt (past the first token, one per head)
    with their sparseness and n_recon.

    Examples:

      headtrace decompose smollm2-135m -p "When Mary and John went to the store, John gave it to"

      headtrace decompose smollm2-135m -p "When Mary ..." --firing L9H6:13:1 --png why.png

      headtrace decompose builtin -p "When Mary and John went to" --json
    """
    if bias not in ("offset", "homogeneous"):
        raise InputError(f"--bias {bias!r} is not known: write offset or homogeneous.")
    if firing is None and png is not None:
        raise InputError("--png draws one firing: name it with --firing, like --firing L9H6:14:3.")
    output = Output(json, numbers=out, figures=[png])
    given = prompt.read()
    loaded = place.load(model)
    from headtrace.channels.terms import decompose as decompose_firing
    from headtrace.channels.terms import decompose_strongest

    with notes.status("Decomposing"):
        recording = loaded.record(given, bos=bos)
        if firing is None:
            found = decompose_strongest(recording, top, bias=bias)
        else:
            found = [decompose_firing(recording, firing, bias=bias)]

    def content() -> dict[str, Any]:
        return found[0].to_dict() if firing is not None else {"firings": [why.to_dict() for why in found]}

    def show() -> None:
        show_tokens(recording.tokens())
        if firing is None:
            _show_firings(found)
        else:
            _show_firing(found[0], top)

    output.finish(content, show, plots=[lambda path: found[0].plot(path)])


def _show_firings(found: list[Decomposition]) -> None:
    names = ("firing", "from", "to", "attention", "relative", "sparse-\nness", "n_recon", "signal\nset")
    rows = [
        (
            str(why.firing),
            token_text(repr(why.tokens[why.firing.dest])),
            token_text(repr(why.tokens[why.firing.src])),
            f"{why.attention:.2f}",
            f"{why.relative:.2f}",
            f"{why.sparseness:.3f}",
            str(why.n_recon),
            f"{len(why.signal_set)}/{why.rank}",
        )
        for why in found
    ]
    show_table(names, rows, title="Strongest firings, one per head", left=3)


def _show_firing(why: Decomposition, top: int) -> None:
    from headtrace.channels.sparsity import CONTROLS

    f = why.firing
    dest, src = (token_text(repr(why.tokens[i])) for i in (f.dest, f.src))
    console.print(
        f"[b]{f}[/]  {dest} attends to {src}, "
        f"attention [b]{why.attention:.3f}[/]\n"
        f"logit [b]{why.logit:.3f}[/], relative attention [b]{why.relative:.3f}[/]  "
        f"sparseness [b]{why.sparseness:.3f}[/] (least {1 / max(1, why.rank):.3f})  "
        f"n_recon [b]{why.n_recon}[/]  signal set {len(why.signal_set)} of {why.rank}",
        highlight=False,
    )
    basis, spectrum = (float(why.rotated(100, control).sparseness.mean()) for control in CONTROLS)
    console.print(
        f"100 random rotations: sparseness [b]{basis:.3f}[/] in rotated bases of the same logit, "
        f"[b]{spectrum:.3f}[/] in rotated heads of the same spectrum",
        highlight=False,
    )
    if why.rank < len(why.terms):
        console.print(
            f"This head has rank {why.rank} of {len(why.terms)}: {why.remainder:.3f} of the logit lies "
            "outside its channels.",
            highlight=False,
        )
    names = ("channel", "singular value", "logit term", "relative term", "signal set")
    rows = [
        (
            str(row.channel),
            f"{row.singular_value:.3f}",
            f"{row.term:+.3f}",
            f"{row.relative_term:+.3f}",
            "yes" if row.in_signal_set else "",
        )
        for row in why.top(top)
    ]
    show_table(names, rows, left=0)


# -- headtrace emerge --------------------------------------------------------------------------------------------


def emerge(
    *,
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
    """
    Means over heads with 95% intervals, in the singular basis, in rotated bases of the same logit, and in
    rotated heads of the same spectrum. Without --firings, the strongest firings of the last checkpoint are
    followed.

    Examples:

      headtrace emerge run/step0 run/step100 run/step1000 -p "When Mary and John went to" --png emerge.png

      headtrace emerge pythia-160m --revisions step1,step1000,step143000 --firings firings.jsonl
    """
    output = Output(json, numbers=out, figures=[png, bars])
    places = _checkpoints(checkpoints, revisions)
    given: list[Prompt] = [options.PromptOptions(text, chat=chat).read() for text in prompt or []]
    given += [options.parse_ids(ids) for ids in tokens or []]
    if (firings is None) == (not given):
        raise InputError(
            "Say what to follow: a file with --firings, or prompts with -p (or --tokens) to take the "
            "strongest firings of."
        )
    from headtrace.channels.emergence import emergence, read_cases, strongest_cases
    from headtrace.figures.channels import plot_early_and_late
    from headtrace.models import load

    if firings is not None:
        cases = read_cases(firings)
    else:
        last = options.load_model(places[-1].model, places[-1].revision, dtype, device, device_map)
        cases = strongest_cases(last, given, top)

    def models() -> Iterator[tuple[str, Model]]:
        """One checkpoint after another, so that only one is in memory."""
        where = options.device_kwargs(device, device_map)
        with progress_bar("Checkpoints", len(places)) as progress:
            for place, (label, name, revision) in enumerate(places):
                progress(place, len(places))
                yield label, load(name, revision=revision, dtype=dtype, **where)

    found = emergence(models(), cases, rotations=rotations)
    output.finish(
        lambda: {"summary": found.summary().to_dicts(), "firings": found.frame.to_dicts()},
        lambda: _show_emergence(found),
        plots=[lambda path: found.plot(path), lambda path: plot_early_and_late(found, path=path)],
    )


class _Checkpoint(NamedTuple):
    label: str
    model: str
    revision: str | None


def _checkpoints(checkpoints: list[str], revisions: str | None) -> list[_Checkpoint]:
    if revisions is not None:
        if len(checkpoints) != 1:
            raise InputError(f"--revisions needs one model, but {len(checkpoints)} are given.")
        names = [name for name in revisions.replace(",", " ").split() if name]
        if not names:
            raise InputError("--revisions is empty. Write names with commas, like step1,step1000.")
        return [_Checkpoint(name, checkpoints[0], name) for name in names]
    if len(checkpoints) < 2:
        raise InputError(
            f"One checkpoint ({checkpoints[0]!r}) shows no emergence: give several folders, or --revisions."
        )
    labels = [Path(folder).name for folder in checkpoints]
    if len(set(labels)) < len(labels):
        labels = checkpoints
    return [_Checkpoint(label, folder, None) for label, folder in zip(labels, checkpoints, strict=True)]


def _show_emergence(found: Emergence) -> None:
    import polars as pl

    summary = found.summary()
    heads = found.frame.select("layer", "head").n_unique()
    lines: list[tuple[str, ...]] = []
    for checkpoint in found.checkpoints:
        here = summary.filter(pl.col("checkpoint") == checkpoint)
        rows = {(r["measure"], r["basis"]): r for r in here.to_dicts()}
        attention = found.frame.filter(pl.col("checkpoint") == checkpoint)["attention"].mean()
        lines.append(
            (
                token_text(checkpoint),
                f"{attention:.2f}",
                _interval(rows["sparseness", "true"], 3),
                number(rows["sparseness", "basis"]["mean"], ".3f", "-"),
                number(rows["sparseness", "spectrum"]["mean"], ".3f", "-"),
                _interval(rows["n_recon", "true"], 1),
                number(rows["n_recon", "basis"]["mean"], ".1f", "-"),
            )
        )
    names = (
        "checkpoint",
        "attention",
        "sparseness",
        "rotated\nbasis",
        "rotated\nU, V",
        "n_recon",
        "rotated\nbasis",
    )
    title = f"{len(found.cases)} firings of {heads} heads: means over heads (95% interval)"
    show_table(names, lines, title=title)


def _interval(row: dict[str, float | None], digits: int) -> str:
    mean, high = row["mean"], row["high"]
    text = number(mean, f".{digits}f", "-")
    return text if mean is None or high is None else f"{text} ±{high - mean:.{digits}f}"
