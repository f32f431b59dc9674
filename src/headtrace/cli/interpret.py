"""``headtrace interpret``: what the signals of circuits look for, in words, and whether the words are right."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from headtrace.cli import options
from headtrace.cli.engine_options import EngineName, RayAddress, Workers, check_engine
from headtrace.cli.export import CircuitSource
from headtrace.cli.options import console, printable
from headtrace.cli.verify import ModelChoice, ModelsOf

if TYPE_CHECKING:
    from headtrace.interpret import Interpretation

OPENAI = "openai"


def register(app: typer.Typer) -> None:
    app.command("interpret")(interpret)


def interpret(
    circuit: CircuitSource,
    corpus: Annotated[
        str, typer.Option(help="Text to look in: a text, JSONL or Parquet file, or sampled:N tokens.")
    ],
    out: Annotated[
        str,
        typer.Option(help="Folder for interpretation.json, descriptions.parquet and the circuit with words."),
    ],
    explainer: Annotated[
        str, typer.Option(help="Who finds the words: lexical, vocabulary or openai.")
    ] = "lexical",
    judge: Annotated[str, typer.Option(help="Who judges them: lexical or openai.")] = "lexical",
    limit: Annotated[int | None, typer.Option(min=1, help="Explain the N strongest signals only.")] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens that may be spent at an endpoint.")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible endpoint, like http://localhost:8000/v1."),
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model to ask there.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at a time (default: 8; a slow server: 1).")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long to wait for an answer (default: 120).")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Pairs per question to a judge (default: 10; a small model: 1 or 2)."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="How many descriptions to list.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of halves, samples and controls.")] = 0,
    model: ModelChoice = None,
    engine: EngineName = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Put the signals of circuits into words, and test the words blind on pairs that the explainer did not see.

    The key of an endpoint is taken from OPENAI_API_KEY; one on this machine needs none. A run that was cut short goes
    on when the same command is given again.

    Examples:

      headtrace interpret circuit.json --corpus text.txt --out words

      headtrace interpret runs/ioi --corpus text.jsonl --limit 300 --out words --json

      headtrace interpret circuit.json --corpus sampled:20000 --explainer openai --judge openai
      --base-url http://localhost:8000/v1 --model-name smollm2 --budget 200000 --out words
    """
    from headtrace.circuits import named_circuits
    from headtrace.interpret.interpretation import count_signals, estimate, scan
    from headtrace.interpret.interpretation import interpret as put_into_words

    check_engine(engine)
    options.check_folder_writable(out)
    asking = {
        "base_url": base_url,
        "model_name": model_name,
        "concurrency": concurrency,
        "timeout": timeout,
        "batch": batch,
    }
    explains, judges = _explainer_and_judge(explainer, judge, asking)
    circuits = [each for _, each in named_circuits(circuit)]
    n_signals = count_signals(circuits, limit)
    _tell_estimate(n_signals, estimate(n_signals, explains, judges), budget)
    loaded = ModelsOf(model, dtype, device, device_map)(circuits[0])
    with options.progress_bar("Scan and words") as progress:
        found = put_into_words(
            circuits,
            loaded,
            corpus,
            explainer=explains,
            judge=judges,
            out=out,
            limit=limit,
            budget=budget,
            seed=seed,
            scanning=partial(scan, engine=cast(Any, engine), workers=workers, ray_address=ray_address),
            progress=progress,
        )
    options.note(f"Wrote {out}: interpretation.json, descriptions.parquet and the circuits with words")
    if found.failures["signals"] or found.failures["pairs"]:
        options.warn("Some questions were not answered: give the same command again to ask them once more.")
    options.emit(found.to_dict(), as_json=json, show=lambda: _show(found, show))


def _explainer_and_judge(explainer: str, judge: str, asking: dict[str, Any]) -> tuple[Any, Any]:
    """Both by name; how to ask goes to those who ask. An endpoint that cannot be asked is an error at once."""
    from headtrace.errors import InputError
    from headtrace.interpret import make_explainer, make_judge
    from headtrace.interpret.explainers import RunContext

    given = {name: value for name, value in asking.items() if value is not None}
    if given and OPENAI not in (explainer, judge):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{flags}: only --explainer openai or --judge openai asks an endpoint.")
    if "batch" in given and judge != OPENAI:
        raise InputError("--batch: only --judge openai asks about pairs.")
    to_judge = given if judge == OPENAI else {}
    to_explainer = {name: value for name, value in given.items() if name != "batch"}
    explains = make_explainer(explainer, **(to_explainer if explainer == OPENAI else {}))
    judges = make_judge(judge, **to_judge)
    explains.prepare(RunContext())
    judges.prepare(RunContext())
    return explains, judges


def _tell_estimate(n_signals: int, estimate: Any, budget: int | None) -> None:
    """What it will cost, before it starts."""
    asked = f"{estimate.requests} requests, about {estimate.tokens} tokens, " if estimate.requests else ""
    spent = "" if budget is None or budget >= estimate.tokens else f"; the budget of {budget} will not do"
    options.note(
        f"Explaining and judging {n_signals} signals: {asked}about {max(1, round(estimate.seconds))} s after the "
        f"scan{' (three seconds per request)' if estimate.requests else ''}{spent}"
    )


def _show(found: Interpretation, count: int) -> None:
    console.print(printable(found.summary(), lines=True), markup=False, highlight=False, soft_wrap=True)
    with_words = [each for each in found.signals if each.description is not None]
    for each in sorted(with_words, key=lambda each: each.p_value)[:count]:
        mark = "supported  " if each.supported else "unsupported"
        text = f"{mark}  p = {each.p_value:.1g}  {each.signal.name}: {each.description.text}"  # type: ignore[union-attr]
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
