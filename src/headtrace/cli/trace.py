"""``headtrace trace`` and ``headtrace explain``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headtrace.cli import options, tracing_options
from headtrace.cli.destinations import Destination, destination
from headtrace.cli.options import console, notes, printable
from headtrace.errors import InputError
from headtrace.lines import Lines
from headtrace.request import ResolvedRequest, TraceRequest, read_requests

if TYPE_CHECKING:
    from headtrace.circuits import Circuit
    from headtrace.tracing import Tracer
    from headtrace.tracing.causes import Explanation


def register(app: typer.Typer) -> None:
    app.command("trace")(trace)
    app.command("explain")(explain)


def trace(
    model: options.ModelName,
    prompt: options.PromptText = None,
    prompt_file: options.PromptFile = None,
    tokens: options.TokenIds = None,
    chat: options.Chat = False,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSONL with text (or tokens, messages), answer, wrong, counterfactual: one per line."
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="A bad line of --prompts is an error (default: skipped, and told)."),
    ] = False,
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
    root: tracing_options.RootName = None,
    top_k: tracing_options.TopK = None,
    top_p: Annotated[
        float | None, typer.Option(help="Explain the likeliest answers up to this probability.")
    ] = None,
    heads: tracing_options.HeadNames = None,
    paths: tracing_options.PathsName = "attention",
    counterfactual: Annotated[
        str | None,
        typer.Option(help="With content: a prompt of as many tokens; followed is what is new against it."),
    ] = None,
    neurons: Annotated[
        int,
        typer.Option(
            help="With content or complete: list so many hidden units of each MLP, strongest first."
        ),
    ] = 0,
    method: tracing_options.MethodName = "acc++",
    tau: tracing_options.TauNumber = None,
    max_firings: tracing_options.MaxFirings = 200,
    min_influence: tracing_options.MinInfluence = None,
    ig_steps: tracing_options.IgSteps = None,
    svt_channels: tracing_options.SvtChannels = None,
    patterns: tracing_options.PatternsName = "auto",
    bos: options.Bos = None,
    out: Annotated[
        str | None,
        typer.Option(help="What its end says: .json, .parquet, .html (a page), .graphml, .dot, or a folder."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file even by an empty circuit.")
    ] = False,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Trace a prompt (or many) to its circuit: which signals cause the heads to attend where they do.

    Examples:

      headtrace trace smollm2-135m -p "When Mary and John went to the store, John gave a drink to"
      --answer " Mary" --wrong " John" --out circuit.json

      headtrace trace builtin -p "When Mary and John went to the store, John gave a drink to"
      --answer " Mary" --wrong " John" --paths complete --out complete.html

      headtrace trace path/to/model --tokens 5,17,42 --answer-id 7 --wrong-id 9

      headtrace trace smollm2-135m --prompts prompts.jsonl --out circuits.parquet

      headtrace trace smollm2-135m --prompt-file question.txt --chat --answer "Paris" --json
    """
    if sum(x is not None for x in (prompt, prompt_file, tokens, prompts)) != 1:
        raise InputError("Give one of: -p TEXT, --prompt-file FILE, --tokens 1,2,3 or --prompts FILE.jsonl.")
    tracing_options.check_paths(paths)
    if neurons < 0 or (neurons and paths == "attention"):
        raise InputError(
            f"--neurons {neurons} with --paths {paths}: expected 0 or more, and --paths content or complete, which say "
            "what MLPs contribute."
        )
    if counterfactual is not None and prompts is not None:
        raise InputError(
            "--counterfactual is for a single prompt: give each line of --prompts its own field 'counterfactual'."
        )
    options.check_output(json, out)
    where = None if out is None else destination(out, many=prompts is not None)
    if where is not None:
        where.check()
    how: dict[str, Any] = {"root": root, "top_k": top_k, "top_p": top_p, "bos": bos}
    how["heads"] = None if heads is None else heads.split(",")
    how["answer"] = _one_or_many(answer, answer_id, "answer")
    how["wrong"] = _one_or_many(wrong, wrong_id, "wrong")
    how |= {"paths": paths, "counterfactual": counterfactual, "neurons": neurons}
    items = None if prompts is None else read_requests(prompts, strict=strict, chat=chat, **how)
    given = None if prompts is not None else options.read_prompt(prompt, tokens, prompt_file, chat)
    loaded = options.load_model(model, revision, dtype, device, device_map)
    from headtrace.tracing import Tracer

    chosen = {"tau": tau, "ig_steps": ig_steps, "channels": svt_channels}
    tracer = Tracer(
        loaded,
        method=method,
        max_firings=max_firings or None,
        min_influence=min_influence,
        patterns=patterns,  # type: ignore[arg-type]
        **{name: value for name, value in chosen.items() if value is not None},
    )
    if items is not None:
        circuits = _trace_many(tracer, items, strict)
        _finish_many(circuits, where, force, json)
        return
    assert given is not None
    with options.progress_bar("Tracing firings") as progress:
        circuit = tracer.trace(given, **how, progress=progress)
    from headtrace.circuits.files import to_json

    options.emit(to_json(circuit) if json else {}, as_json=json, out=out, show=lambda: show(circuit))
    _write(where, [circuit], force)


def _write(where: Destination | None, circuits: list[Circuit], force: bool) -> None:
    told = "" if where is None else where.write(circuits, force=force)
    if told:
        options.note(told)


def _one_or_many(texts: list[str] | None, ids: list[int] | None, what: str) -> list[str | int] | None:
    if texts and ids:
        raise InputError(f"Give the {what} as text or as a token id, not both.")
    return [*(texts or []), *(ids or [])] or None


def show(circuit: Circuit) -> None:
    """What the tracer found, in a few lines; unexplained firings are listed."""
    options.show_tokens(circuit.prompt.tokens)
    if circuit.reason:
        console.print(f"[yellow]Empty circuit:[/] {options.token_text(circuit.reason)}.", highlight=False)
        return
    console.print(printable(circuit.summary(), lines=True), markup=False, highlight=False, soft_wrap=True)


def _trace_many(tracer: Tracer, items: Lines[TraceRequest], strict: bool) -> list[Circuit]:
    """The circuits of all lines that can be used; the others are reported before anything runs."""

    def resolve(request: TraceRequest, _: str) -> ResolvedRequest:
        return replace(request, **tracer.settings).resolve(tracer.model)

    requests = items.then(resolve, strict=strict)
    for line in requests.report().splitlines():
        options.warn(line)
    with options.progress_bar("Tracing prompts", len(requests)) as progress:
        return tracer.trace_resolved(requests.values, progress)


def _finish_many(circuits: list[Circuit], where: Destination | None, force: bool, as_json: bool) -> None:
    from headtrace.circuits.files import to_json

    content = {"circuits": [to_json(circuit) for circuit in circuits]} if as_json else {}
    out = None if where is None else where.path
    options.emit(content, as_json=as_json, out=out, show=lambda: _show_many(circuits))
    _write(where, circuits, force)


def _show_many(circuits: list[Circuit]) -> None:
    full = [c for c in circuits if not c.reason]
    console.print(f"{len(circuits)} prompts: {len(full)} circuits, {len(circuits) - len(full)} empty.")
    for number, circuit in enumerate(circuits):
        if circuit.reason:
            console.print(f"  prompt {number}: empty: {options.token_text(circuit.reason)}", highlight=False)


def explain(
    model: options.ModelName,
    firing: Annotated[str, typer.Option(help="Layer and head : destination : source, like L9H6:14:3.")],
    prompt: options.PromptText = None,
    prompt_file: options.PromptFile = None,
    tokens: options.TokenIds = None,
    chat: options.Chat = False,
    method: tracing_options.MethodName = "acc++",
    tau: tracing_options.TauNumber = None,
    patterns: tracing_options.PatternsName = "auto",
    bos: options.Bos = None,
    out: options.NumbersFile = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Why does this head attend here? The signals that cause one firing, side by side.

    Examples:

      headtrace explain smollm2-135m -p "When Mary and John went to the store, John gave a drink to" --firing L20H0:13:9

      headtrace explain builtin -p "When Mary and John went to" --firing L1H0:5:2 --json
    """
    options.check_output(json, out)
    options.check_numbers(out)
    given = options.read_prompt(prompt, tokens, prompt_file, chat)
    loaded = options.load_model(model, revision, dtype, device, device_map)
    from headtrace.tracing import Tracer

    chosen: dict[str, Any] = {} if tau is None else {"tau": tau}
    tracer = Tracer(loaded, method=method, patterns=patterns, **chosen)  # type: ignore[arg-type]
    with notes.status("Tracing the firing"):
        why = tracer.explain(given, firing, bos=bos)
    options.emit(why.to_dict(), as_json=json, out=out, show=lambda: _show_explanation(why))
    if out is not None:
        options.write_json(out, why.to_dict())


def _show_explanation(why: Explanation) -> None:
    options.show_tokens(why.tokens)
    console.print(printable(str(why), lines=True), markup=False, highlight=False)
