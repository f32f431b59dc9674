"""``headtrace decompose`` and ``headtrace emerge``: attention scores as sums over the channels of their head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import Output, console, notes, show_table, show_tokens, token_text
from headtrace.errors import InputError

if TYPE_CHECKING:
    import polars as pl

    from headtrace.channels import Decomposition
    from headtrace.channels.emergence import Emergence
    from headtrace.models import Model
    from headtrace.vocabulary import Prompt


def decompose(
    *,
    model: options.ModelName,
    prompt: options.PromptOptions,
    firing: str | None = typer.Option(
        None, help="Head, destination and source, by position or word: L9H6:14:3 or L9H6:to:John."
    ),
    top: int = typer.Option(15, help="How many channels, or firings, to show.", min=1),
    bias: str = typer.Option(
        "offset",
        help="How to treat biases: offset, or homogeneous (as in the 2024 paper; not with rotary positions).",
    ),
    png: options.Figure = None,
    out: options.NumbersFile = None,
    bos: options.Bos = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Without --firing, it lists the strongest attention of the prompt (one source per head, leaving out the first
    token), with its sparseness and n_recon (the smallest number of channels that add up to the score relative to
    other keys).

    Examples:

      headtrace decompose smollm2-135m -p "When Mary and John went to the store, John gave it to"
      headtrace decompose smollm2-135m -p "When Mary ..." --firing L9H6:13:1 --png why.png
      headtrace decompose builtin -p "When Mary and John went to" --json
    """
    if bias not in ("offset", "homogeneous"):
        raise InputError(f"--bias {bias!r} is not known: write offset or homogeneous.")
    if firing is None and png is not None:
        raise InputError("--png draws one firing: name it with --firing, like --firing L9H6:14:3.")
    output = Output(json, out, [".json", ".tex"], figures=[png])
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

    def table() -> pl.DataFrame:
        import polars as pl

        if firing is not None:
            return found[0].frame()
        names = ("attention", "relative", "sparseness", "n_recon")
        rows = [{"firing": str(why.firing)} | {name: getattr(why, name) for name in names} for why in found]
        return pl.DataFrame(rows)

    output.finish(content, show, table=table, plots=[found[0].plot])


def _show_firings(found: list[Decomposition]) -> None:
    columns = {
        "firing": "{0.firing}",
        "from": lambda why: repr(why.tokens[why.firing.dest]),
        "to": lambda why: repr(why.tokens[why.firing.src]),
        "attention": "{0.attention:.2f}",
        "relative": "{0.relative:.2f}",
        "sparse-\nness": "{0.sparseness:.3f}",
        "n_recon": "{0.n_recon}",
        "signal\nset": lambda why: f"{len(why.signal_set)}/{why.rank}",
    }
    show_table(found, columns, title="Strongest firings, one per head", left=3)


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
    if why.note is not None:
        console.print(why.note, highlight=False)
    columns = {
        "channel": "{0.name}",
        "singular value": "{0.singular_value:.3f}",
        "logit term": "{0.term:+.3f}",
        "relative term": "{0.relative_term:+.3f}",
        "signal set": lambda row: "yes" if row.in_signal_set else "",
    }
    show_table(why.top(top), columns, left=0)


# -- headtrace emerge --------------------------------------------------------------------------------------------


def emerge(
    *,
    checkpoints: list[str] = typer.Argument(
        help="Checkpoint folders in order, or one model with --revisions."
    ),
    revisions: str | None = typer.Option(
        None, help="Revisions of one hub model, in order: step1,step1000,step143000."
    ),
    firings: str | None = typer.Option(
        None, help='A JSONL file with one firing per line: {"text": "When Mary ...", "firing": "L9H6:14:3"}.'
    ),
    prompt: list[str] | None = typer.Option(
        None, "--prompt", "-p", help="Follow the strongest attention on this prompt. Repeatable."
    ),
    tokens: list[str] | None = typer.Option(None, "--tokens", help="As --prompt, but token ids: 1,2,3."),
    top: int = typer.Option(20, help="How many heads to follow without --firings.", min=1),
    rotations: int = typer.Option(100, help="Random rotations per firing.", min=1),
    png: str | None = typer.Option(None, help="Draw sparseness and n_recon over training into this file."),
    bars: str | None = typer.Option(
        None, help="Draw the terms of four firings, early and late in training, into this file."
    ),
    out: options.NumbersFile = None,
    chat: options.Chat = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """
    Prints sparseness and n_recon (the smallest number of channels that add up to the score), as means over heads with
    95% intervals. It does so in the singular basis and, as controls, in rotated bases that give the same logit and in
    heads with the same singular values but rotated singular vectors. Without --firings, it follows the strongest
    attention of the last checkpoint.

    Examples:

      headtrace emerge run/step0 run/step100 run/step1000 -p "When Mary and John went to" --png emerge.png
      headtrace emerge pythia-160m --revisions step1,step1000,step143000 --firings firings.jsonl
    """
    output = Output(json, out, [".json", ".tex"], figures=[png, bars])
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
        last = options.load_model(*places[-1][1:], dtype, device, device_map)
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
        table=found.summary,
        plots=[found.plot, lambda path: plot_early_and_late(found, path=path)],
    )


def _checkpoints(checkpoints: list[str], revisions: str | None) -> list[tuple[str, str, str | None]]:
    """The label, model and revision of each."""
    if revisions is not None:
        if len(checkpoints) != 1:
            raise InputError(f"--revisions needs one model, but {len(checkpoints)} are given.")
        names = revisions.replace(",", " ").split()
        if not names:
            raise InputError("--revisions is empty. Write names with commas, like step1,step1000.")
        return [(name, checkpoints[0], name) for name in names]
    if len(checkpoints) < 2:
        raise InputError(
            f"One checkpoint ({checkpoints[0]!r}) shows no emergence: give several folders, or --revisions."
        )
    labels = [Path(folder).name for folder in checkpoints]
    if len(set(labels)) < len(labels):
        labels = checkpoints
    return [(label, folder, None) for label, folder in zip(labels, checkpoints, strict=True)]


def _show_emergence(found: Emergence) -> None:
    import polars as pl

    summary = found.summary()
    heads = found.frame.select("layer", "head").n_unique()

    def cell(measure: str, basis: str, digits: int, *, interval: bool = False) -> Callable[[str], str]:
        def text(checkpoint: str) -> str:
            row = summary.row(
                by_predicate=(pl.col("checkpoint") == checkpoint)
                & (pl.col("measure") == measure)
                & (pl.col("basis") == basis),
                named=True,
            )
            if row["mean"] is None:
                return "-"
            wide = f" ±{row['high'] - row['mean']:.{digits}f}" if interval and row["high"] is not None else ""
            return f"{row['mean']:.{digits}f}{wide}"

        return text

    columns = {
        "checkpoint": str,
        "attention": lambda here: f"{found.frame.filter(checkpoint=here)['attention'].mean():.2f}",
        "sparseness": cell("sparseness", "true", 3, interval=True),
        "rotated\nbasis": cell("sparseness", "basis", 3),
        "rotated\nU, V": cell("sparseness", "spectrum", 3),
        "n_recon": cell("n_recon", "true", 1, interval=True),
        "n_recon,\nrotated basis": cell("n_recon", "basis", 1),
    }
    title = f"{len(found.cases)} firings of {heads} heads: means over heads (95% interval)"
    show_table(found.checkpoints, columns, title=title)
