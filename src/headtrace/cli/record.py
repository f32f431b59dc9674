"""``headtrace record``: one forward pass, its answers, its heads and its exactness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.options import console

if TYPE_CHECKING:
    from headtrace.models import Recording


def register(app: typer.Typer) -> None:
    app.command("record")(record)


def record(
    model: options.ModelName,
    prompt: options.PromptText = None,
    tokens: options.TokenIds = None,
    bos: options.Bos = None,
    out: Annotated[str | None, typer.Option(help="Folder to save the recording in.")] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
) -> None:
    """Record one forward pass as components, and check that they sum exactly.

    Shows the model's top answers, each head's strongest firing and the identity errors.

    Examples:  headtrace record smollm2-135m -p "When Mary and John went to the store, John gave a drink to"

               headtrace record path/to/model --tokens 5,17,42 --out recording/
    """
    given = options.read_prompt(prompt, tokens)
    loaded = options.load_model(model, revision, dtype, device)
    recording = loaded.record(given, bos=bos)
    options.show_tokens(recording.tokens())
    show_answers(recording)
    show_firings(recording)
    report = recording.check()
    console.print(
        f"Identities (largest relative error, allowed {report.tolerance:.0e}):  residual [b]{report.residual:.1e}[/]  "
        f"attention logits [b]{report.attention:.1e}[/]  output logits [b]{report.output:.1e}[/]",
        highlight=False,
    )
    if out is not None:
        recording.save(out)
        console.print(f"Saved to {out}")


def show_answers(recording: Recording) -> None:
    top = recording.top_answers(min(5, recording.model.d_vocab))
    answers = [f"[b]{options.token_text(repr(text))}[/] {p:.1%}" for text, _, p in top]
    console.print("Answers " + "  ".join(answers), highlight=False)


def show_firings(recording: Recording) -> None:
    """A grid of layers and heads: where each head attends most, past the first token."""
    if recording.lengths[0] < 2:
        console.print("A prompt of one token: every head attends to it.")
        return
    firings = recording.strongest_firings()
    n_heads = recording.model.n_heads
    table = Table(
        title="Each head's strongest firing past the first token: dest->src, attention",
        title_justify="left",
        box=box.SIMPLE,
        padding=0,
    )
    table.add_column("layer", justify="right")
    for head in range(n_heads):
        table.add_column(f"H{head}", justify="right", no_wrap=True)
    for layer in range(recording.model.n_layers):
        row = firings[layer * n_heads : (layer + 1) * n_heads]
        table.add_row(f"L{layer}", *(_cell(f.dest, f.src, a) for f, a in row))
    console.print(table)


def _cell(dest: int, src: int, attention: float) -> str:
    style = "bold green" if attention > 0.5 else "dim" if attention < 0.2 else ""
    text = f"{dest}->{src}\n{attention:.2f}"
    return f"[{style}]{text}[/]" if style else text
