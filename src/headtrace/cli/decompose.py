"""``headtrace decompose``: an attention score as a sum over the channels of its head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.options import console, notes
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.channels import Decomposition
    from headtrace.channels.svd import Bias
    from headtrace.models import Recording


def register(app: typer.Typer) -> None:
    app.command("decompose")(decompose)


def decompose(
    model: options.ModelName,
    prompt: options.PromptText = None,
    prompt_file: options.PromptFile = None,
    tokens: options.TokenIds = None,
    chat: options.Chat = False,
    firing: Annotated[
        str | None, typer.Option(help="Layer and head, destination, source: L9H6:14:3. Without it: a table.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many channels, or firings, to show.", min=1)] = 15,
    bias: Annotated[
        str, typer.Option(help="offset, or homogeneous (the 2024 form, for models without rotary positions).")
    ] = "offset",
    png: Annotated[
        str | None, typer.Option(help="Draw the terms into this file (.png, .pdf or .svg).")
    ] = None,
    out: options.NumbersFile = None,
    bos: options.Bos = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Decompose the attention score of a firing into the channels of its head.

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
    options.check_output(json, out)
    options.check_figure(png)
    options.check_numbers(out)
    given = options.read_prompt(prompt, tokens, prompt_file, chat)
    loaded = options.load_model(model, revision, dtype, device, device_map)
    with notes.status("Decomposing"):
        recording = loaded.record(given, bos=bos)
        rows = _strongest(recording, top, bias) if firing is None else [_one(recording, firing, bias)]
    content = {"firings": [why.to_dict() for why in rows]} if firing is None else rows[0].to_dict()
    options.emit(content, as_json=json, out=out, show=lambda: _show(recording, rows, firing, top))
    if png is not None:
        rows[0].plot(png)
        options.note(f"Wrote {png}")
    if out is not None:
        options.write_json(out, content)


def _one(recording: Recording, firing: str, bias: Bias) -> Decomposition:
    from headtrace.channels import decompose as decompose_firing

    return decompose_firing(recording, firing, bias=bias)


def _show(recording: Recording, rows: list[Decomposition], firing: str | None, top: int) -> None:
    options.show_tokens(recording.tokens())
    if firing is None:
        _show_table(rows)
    else:
        _show_firing(rows[0], top)


def _strongest(recording: Recording, top: int, bias: Bias) -> list[Decomposition]:
    """Each head's strongest firing past the first token, the strongest heads first, decomposed together."""
    import torch

    from headtrace.channels.terms import decomposition_of, terms_of

    firings = [f for f, _ in sorted(recording.strongest_firings(), key=lambda pair: -pair[1])[:top]]
    places = torch.tensor(
        [[f.layer, 0, f.head, f.dest, f.src] for f in firings], device=recording.token_ids.device
    )
    terms = terms_of(recording, places, bias=bias)
    return [decomposition_of(recording, terms, row) for row in range(len(terms))]


def _show_table(rows: list[Decomposition]) -> None:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("firing", "from", "to", "attention", "relative", "sparse-\nness", "n_recon", "signal\nset"):
        left = name in ("firing", "from", "to")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "firing")
    for why in rows:
        f = why.firing
        table.add_row(
            str(f),
            options.token_text(repr(why.tokens[f.dest])),
            options.token_text(repr(why.tokens[f.src])),
            f"{why.attention:.2f}",
            f"{why.relative:.2f}",
            f"{why.sparseness:.3f}",
            str(why.n_recon),
            f"{len(why.signal_set)}/{why.rank}",
        )
    options.show_table("Strongest firings, one per head", table)


def _show_firing(why: Decomposition, top: int) -> None:
    from headtrace.channels.sparsity import CONTROLS

    f = why.firing
    dest, src = (options.token_text(repr(why.tokens[i])) for i in (f.dest, f.src))
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
    table = Table(box=box.SIMPLE)
    for name in ("channel", "singular value", "logit term", "relative term", "signal set"):
        table.add_column(name, justify="right")
    for row in why.top(top):
        table.add_row(
            str(row.channel),
            f"{row.singular_value:.3f}",
            f"{row.term:+.3f}",
            f"{row.relative_term:+.3f}",
            "yes" if row.in_signal_set else "",
        )
    console.print(table)
