"""``headtrace trace`` and ``headtrace explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headtrace.cli import options
from headtrace.cli.options import console
from headtrace.errors import InputError
from headtrace.lines import prompt_and_answers, read_lines

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.tracing import Tracer

MethodName = Annotated[str, typer.Option(help="acc++, acc, svt, or one that a package adds.")]
TauNumber = Annotated[
    float | None,
    typer.Option(help="Attention that counts as attending (default: min(1, 2.5 / visible keys))."),
]


def register(app: typer.Typer) -> None:
    app.command("trace")(trace)
    app.command("explain")(explain)


def trace(
    model: options.ModelName,
    prompt: options.PromptText = None,
    tokens: options.TokenIds = None,
    prompts: Annotated[
        str | None, typer.Option(help="JSONL with text (or tokens), answer, wrong: one per line.")
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(
            help="The answer, such as ' Mary'. Several are alternatives; a single one may be several tokens."
        ),
    ] = None,
    wrong: Annotated[
        list[str] | None, typer.Option(help="The wrong answer to compare with. Repeatable.")
    ] = None,
    answer_id: Annotated[list[int] | None, typer.Option(help="The answer as a token id.")] = None,
    wrong_id: Annotated[list[int] | None, typer.Option(help="The wrong answer as a token id.")] = None,
    root: Annotated[
        str | None,
        typer.Option(help="linear, probability or heads (default: linear if there is a wrong answer)."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Explain the k likeliest answers together.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Explain the likeliest answers up to this probability.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Start from these heads at the last token: L9H9,L10H0.")
    ] = None,
    method: MethodName = "acc++",
    tau: TauNumber = None,
    max_firings: Annotated[
        int, typer.Option(help="Expand at most this many firings per prompt (0: no limit).")
    ] = 200,
    min_influence: Annotated[
        float, typer.Option(help="Do not expand firings with less influence than this.")
    ] = 0.0,
    ig_steps: Annotated[
        int | None, typer.Option(help="For acc++: intervals of the integrated gradients (default: 64).")
    ] = None,
    svt_channels: Annotated[
        str | None, typer.Option(help="For svt: signal (default), or all (the control without SVD).")
    ] = None,
    bos: options.Bos = None,
    out: Annotated[
        str | None, typer.Option(help="Circuit file (.json), or .parquet for many prompts.")
    ] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
) -> None:
    """Trace a prompt (or many) to its circuit: which signals cause the heads to attend where they do.

    Examples:

      headtrace trace smollm2-135m -p "When Mary and John went to the store, John gave a drink to"
      --answer " Mary" --wrong " John" --out circuit.json

      headtrace trace path/to/model --tokens 5,17,42 --answer-id 7 --wrong-id 9

      headtrace trace smollm2-135m --prompts prompts.jsonl --out circuits.parquet
    """
    if sum(x is not None for x in (prompt, tokens, prompts)) != 1:
        raise InputError("Give one of: -p TEXT, --tokens 1,2,3 or --prompts FILE.jsonl.")
    loaded = options.load_model(model, revision, dtype, device)
    from headtrace.tracing import Tracer

    chosen = {"tau": tau, "ig_steps": ig_steps, "channels": svt_channels}
    tracer = Tracer(
        loaded,
        method=method,
        max_firings=max_firings or None,
        min_influence=min_influence,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    how: dict[str, Any] = {"root": root, "top_k": top_k, "top_p": top_p, "bos": bos}
    how["heads"] = None if heads is None else heads.split(",")
    how["answer"] = _one_or_many(answer, answer_id, "answer")
    how["wrong"] = _one_or_many(wrong, wrong_id, "wrong")
    if prompts is not None:
        _save_many(_trace_file(tracer, prompts, how), out)
        return
    with console.status("Tracing"):
        circuit = tracer.trace(options.read_prompt(prompt, tokens), **how)
    show(circuit)
    if out is not None:
        circuit.save(out)
        console.print(f"Wrote {out}")


def _one_or_many(texts: list[str] | None, ids: list[int] | None, what: str) -> list[str | int] | None:
    if texts and ids:
        raise InputError(f"Give the {what} as text or as a token id, not both.")
    return [*(texts or []), *(ids or [])] or None


def show(circuit: Circuit) -> None:
    """What the tracer found, in a few lines; unexplained firings are listed."""
    options.show_tokens(circuit.prompt.tokens)
    if circuit.reason:
        console.print(f"[yellow]Empty circuit:[/] {options.token_text(circuit.reason)}.")
        return
    console.print(circuit.summary(), markup=False, highlight=False)
    if circuit.unexplained:
        console.print(f"[yellow]Unexplained firings:[/] {', '.join(circuit.unexplained)}")


def _trace_file(tracer: Tracer, path: str, how: dict[str, Any]) -> list[Circuit]:
    """Circuits of all prompts of a file; a line's own answers come before those of the command line."""
    lines = read_lines(path, lambda record, where: tracer.ask(prompt_and_answers(record, where), **how))
    if lines.skipped:
        console.print(f"[yellow]{options.token_text(lines.report())}[/]", highlight=False)
    with options.progress_bar("Tracing", len(lines)) as advance:
        return tracer.trace_batch(lines.values, progress=advance)


def _save_many(circuits: list[Circuit], out: str | None) -> None:
    full = [c for c in circuits if not c.reason]
    console.print(f"{len(circuits)} prompts: {len(full)} circuits, {len(circuits) - len(full)} empty.")
    for number, circuit in enumerate(circuits):
        if circuit.reason:
            console.print(f"  prompt {number}: empty: {options.token_text(circuit.reason)}")
    if out is None:
        return
    if out.endswith(".parquet"):
        from headtrace.circuits import write_parquet

        write_parquet(circuits, out)
        console.print(f"Wrote {out}")
        return
    folder = Path(out)
    for number, circuit in enumerate(circuits):
        circuit.save(folder / f"circuit-{number:05d}.json")
    console.print(f"Wrote {len(circuits)} circuit files to {out}")


def explain(
    model: options.ModelName,
    firing: Annotated[str, typer.Option(help="Layer and head : destination : source, like L9H6:14:3.")],
    prompt: options.PromptText = None,
    tokens: options.TokenIds = None,
    method: MethodName = "acc++",
    tau: TauNumber = None,
    bos: options.Bos = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the explanation as JSON.")] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
) -> None:
    """Why does this head attend here? The signals that cause one firing, side by side.

    Example:

      headtrace explain smollm2-135m -p "When Mary and John went to the store, John gave a drink to" --firing L20H0:13:9
    """
    given = options.read_prompt(prompt, tokens)
    loaded = options.load_model(model, revision, dtype, device)
    from headtrace.tracing import Tracer

    chosen: dict[str, Any] = {} if tau is None else {"tau": tau}
    why = Tracer(loaded, method=method, **chosen).explain(given, firing, bos=bos)
    options.show_tokens(why.tokens)
    console.print(str(why), markup=False, highlight=False)
    if json_file is not None:
        options.write_json(json_file, why.to_dict())
