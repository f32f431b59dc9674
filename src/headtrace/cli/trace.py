"""``headtrace trace`` and ``headtrace explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track

from headtrace.cli import options
from headtrace.cli.options import console
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.tracing import Tracer

MethodName = Annotated[str, typer.Option(help="acc++, acc or svt.")]
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
        list[str] | None, typer.Option(help="The answer, one token, such as ' Mary'. Repeatable.")
    ] = None,
    wrong: Annotated[
        list[str] | None, typer.Option(help="The wrong answer to compare with. Repeatable.")
    ] = None,
    answer_id: Annotated[list[int] | None, typer.Option(help="The answer as a token id.")] = None,
    wrong_id: Annotated[list[int] | None, typer.Option(help="The wrong answer as a token id.")] = None,
    root: Annotated[
        str | None, typer.Option(help="linear or probability (default: linear if there is a wrong answer).")
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
    svt_channels: Annotated[
        str, typer.Option(help="For svt: signal, or all (the control without SVD).")
    ] = "signal",
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

    tracer = Tracer(
        loaded,
        method=method,  # type: ignore[arg-type]
        tau=tau,
        max_firings=max_firings or None,
        min_influence=min_influence,
        channels=svt_channels,  # type: ignore[arg-type]
    )
    how: dict[str, Any] = {"root": root, "top_k": top_k, "top_p": top_p, "bos": bos}
    answers, wrongs = _one_or_many(answer, answer_id, "answer"), _one_or_many(wrong, wrong_id, "wrong")
    if prompts is not None:
        _save_many(_trace_file(tracer, prompts, answers, wrongs, how), out)
        return
    with console.status("Tracing"):
        start = [] if heads is None else heads.split(",")
        circuit = tracer.trace(options.read_prompt(prompt, tokens), answers, wrongs, heads=start, **how)
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


def _read_lines(path: str) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts file {path!r} cannot be read: {error}.") from None
    items: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not valid JSON ({error.msg}).") from None
        if not isinstance(item, dict) or ("text" in item) == ("tokens" in item):
            raise InputError(
                f"{path}, line {number}: expected an object with 'text' or 'tokens' (and answer, wrong)."
            )
        items.append(item)
    if not items:
        raise InputError(f"The prompts file {path!r} holds no prompts.")
    return items


def _trace_file(
    tracer: Tracer, path: str, answers: Any, wrongs: Any, how: dict[str, Any], at_once: int = 64
) -> list[Circuit]:
    items = _read_lines(path)
    for item in items:
        item.setdefault("answer", answers)
        item.setdefault("wrong", wrongs)
    circuits: list[Circuit] = []
    for start in track(range(0, len(items), at_once), "Tracing", console=console):
        circuits += tracer.trace_batch(items[start : start + at_once], **how)
    return circuits


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

    why = Tracer(loaded, method=method, tau=tau).explain(given, firing, bos=bos)  # type: ignore[arg-type]
    options.show_tokens(why.tokens)
    console.print(str(why), markup=False, highlight=False)
    if json_file is not None:
        options.write_json(json_file, why.to_dict())
