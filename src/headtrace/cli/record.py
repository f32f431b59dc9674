"""``headtrace record``: one forward pass, its answers, its heads and its exactness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.options import console, notes

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.models.identities import IdentityReport


def register(app: typer.Typer) -> None:
    app.command("record")(record)


def record(
    model: options.ModelName,
    prompt: options.PromptText = None,
    prompt_file: options.PromptFile = None,
    tokens: options.TokenIds = None,
    chat: options.Chat = False,
    bos: options.Bos = None,
    out: Annotated[str | None, typer.Option(help="Folder to save the recording in.")] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Record one forward pass as components, and check that they sum exactly.

    Shows the model's top answers, each head's strongest firing and the identity errors.

    Examples:

      headtrace record smollm2-135m -p "When Mary and John went to the store, John gave a drink to"

      headtrace record path/to/model --tokens 5,17,42 --out recording/

      headtrace record smollm2-135m --chat -p "Who wrote Hamlet?" --json
    """
    given = options.read_prompt(prompt, tokens, prompt_file, chat)
    if out is not None:
        options.check_folder_writable(out)
    loaded = options.load_model(model, revision, dtype, device, device_map)
    with notes.status("Recording"):
        recording = loaded.record(given, bos=bos)
        report = recording.check()
    options.emit(_content(recording, report), as_json=json, show=lambda: _show(recording, report))
    if out is not None:
        recording.save(out)
        options.note(f"Saved to {out}")


def _content(recording: Recording, report: IdentityReport) -> dict[str, object]:
    answers = recording.top_answers(min(5, recording.model.d_vocab))
    firings = recording.strongest_firings() if recording.lengths[0] > 1 else []
    return {
        "model": recording.model.name,
        "token_ids": recording.token_ids[0].tolist(),
        "tokens": recording.tokens(),
        "answers": [{"token": text, "id": token, "probability": p} for text, token, p in answers],
        "firings": [{"firing": str(firing), "attention": attention} for firing, attention in firings],
        "identities": report,
    }


def _show(recording: Recording, report: IdentityReport) -> None:
    options.show_tokens(recording.tokens())
    show_answers(recording)
    show_firings(recording)
    what = "Rounding parts" if report.rounding else "Identities"
    console.print(
        f"{what} (largest relative error, allowed {report.tolerance:.0e}):  residual [b]{report.residual:.1e}[/]  "
        f"attention logits [b]{report.attention:.1e}[/]  output logits [b]{report.output:.1e}[/]",
        highlight=False,
    )


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
    table = Table(box=box.SIMPLE, padding=0)
    table.add_column("layer", justify="right")
    for head in range(n_heads):
        table.add_column(f"H{head}", justify="right", no_wrap=True)
    for layer in range(recording.model.n_layers):
        row = firings[layer * n_heads : (layer + 1) * n_heads]
        table.add_row(f"L{layer}", *(_cell(f.dest, f.src, a) for f, a in row))
    options.show_table("Each head's strongest firing past the first token: dest->src, attention", table)


def _cell(dest: int, src: int, attention: float) -> str:
    style = "bold green" if attention > 0.5 else "dim" if attention < 0.2 else ""
    text = f"{dest}->{src}\n{attention:.2f}"
    return f"[{style}]{text}[/]" if style else text
