"""``headtrace trace`` and ``headtrace explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import (
    Output,
    check_output,
    console,
    destination,
    emit,
    note,
    notes,
    say,
    show_tokens,
    token_text,
)
from headtrace.cli.request_options import (
    ExplainOptions,
    PromptsFile,
    RequestOptions,
    Strict,
    exit_by_share,
    report_skipped,
    skipped_of,
)
from headtrace.errors import InputError
from headtrace.request import TraceRequest, read_requests

if TYPE_CHECKING:
    from headtrace.circuits import Circuit


def trace(
    *,
    model: options.ModelName,
    prompt: options.PromptOptions,
    prompts: PromptsFile = None,
    strict: Strict = False,
    request: RequestOptions,
    out: str | None = typer.Option(
        None,
        help="Write the circuit; the extension decides: .json, .parquet, .html (a page), .graphml, .dot, or a folder.",
    ),
    force: bool = typer.Option(
        False, "--force", help="Replace an existing file even if the new circuit is empty."
    ),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Examples:

      headtrace trace smollm2-135m -p "When Mary and John went to the store, John gave a drink to"
          --answer " Mary" --wrong " John" --out circuit.json
      headtrace trace builtin -p "When Mary and John went to the store, John gave a drink to"
          --answer " Mary" --wrong " John" --paths complete --out complete.html
      headtrace trace path/to/model --tokens 5,17,42 --answer-id 7 --wrong-id 9
      headtrace trace smollm2-135m --prompts prompts.jsonl --out circuits.parquet
      headtrace trace smollm2-135m --prompt-file question.txt --chat --answer "Paris" --json
    """
    if prompt.given + (prompts is not None) != 1:
        raise InputError("Give one of: -p TEXT, --prompt-file FILE, --tokens 1,2,3 or --prompts FILE.jsonl.")
    check_output(json, out)
    where = None if out is None else destination(out, many=prompts is not None)
    if where is not None:
        where.check()
    lines = one = given = resolved = None
    if prompts is None:
        given = prompt.read()
        one = TraceRequest.create(given, **request.options)
    else:
        lines = read_requests(prompts, strict=strict, chat=prompt.chat, **request.options)
    tracer = request.tracer(place.load(model))
    if one is not None:
        with progress_bar("Tracing firings") as progress:
            circuits = [tracer.trace(given, **request.options, progress=progress)]
    else:
        assert lines is not None
        resolved = lines.then(lambda each, _: tracer.request(each).resolve(tracer.model), strict=strict)
        report_skipped(resolved)
        with progress_bar("Tracing prompts", len(resolved)) as progress:
            circuits = tracer.trace_resolved(resolved.values, progress)

    def content() -> dict[str, object]:
        from headtrace.circuits.files import to_json

        found = [to_json(circuit) for circuit in circuits]
        if resolved is None:
            return found[0]
        return {
            "circuits": found,
            "lines": [line for line, _ in resolved],
            "skipped": resolved.skipped_rows,
        }

    def show() -> None:
        if one is not None:
            _show_circuit(circuits[0])
            return
        empty = [(number, circuit) for number, circuit in enumerate(circuits) if circuit.reason]
        console.print(f"{len(circuits)} prompts: {len(circuits) - len(empty)} circuits, {len(empty)} empty.")
        for number, circuit in empty:
            line = resolved.entries[number][0] if resolved is not None else number
            say(f"  line {line}: empty: {circuit.reason}")

    emit(content, as_json=json, out=out, show=show)
    written = "" if where is None else where.write(circuits, force=force)
    if written:
        note(written)
    if resolved is not None:
        exit_by_share(*skipped_of([resolved]))


def _show_circuit(circuit: Circuit) -> None:
    show_tokens(circuit.prompt.tokens)
    if circuit.reason:
        console.print(f"[yellow]Empty circuit:[/] {token_text(circuit.reason)}.", highlight=False)
    else:
        say(circuit.summary())


def explain(
    *,
    model: options.ModelName,
    firing: str = typer.Option(
        help="Head, destination and source, by position or word: L9H6:14:3, L9H6:to:John, L9H6:to:John#2 (the second "
        "John). A head alone (L9H6) means its strongest attention."
    ),
    rather_than: str | None = typer.Option(
        None,
        "--rather-than",
        metavar="TOKEN",
        help="Explain why the head prefers the source to this one (a word or position).",
    ),
    pairs: int = typer.Option(
        0, help="Also list this many of the largest pairs of a query component and a key component.", min=0
    ),
    prompt: options.PromptOptions,
    request: ExplainOptions,
    png: options.Figure = None,
    out: options.NumbersFile = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Examples:

      headtrace explain smollm2-135m -p "When Mary and John went to the store, John gave a drink to" --firing L20H0:13:9
      headtrace explain builtin -p "When Mary and John went to" --firing L1H0:5:2 --json
      headtrace explain smollm2-135m -p "Then Mary and Tom met and Tom gave a drink to" --firing L23H0:to:Mary
          --rather-than Tom#2 --pairs 10
      headtrace explain builtin -p "When Mary and John went to" --firing L2H0 --png why.png
    """
    output = Output(json, out, [".json", ".tex"], figures=[png])
    given = prompt.read()
    tracer = request.tracer(place.load(model))
    with notes.status("Tracing the firing"):
        why = tracer.explain(given, firing, rather_than=rather_than, **request.options)
        met = why.pairs(pairs) if pairs else None

    def show() -> None:
        show_tokens(why.tokens)
        say(str(why))
        if met is not None:
            say(str(met))

    def content() -> dict[str, Any]:
        return why.to_dict() | ({} if met is None else {"pairs": met.to_dict()})

    table = why.frame if met is None else met.frame
    output.finish(content, show, table=table, plots=[why.plot if met is None else met.plot])
