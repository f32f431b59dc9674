"""``headtrace atlas`` and ``headtrace interpret``: what heads attend to over a corpus, what signals mean in words."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import Output, note, say, show_table, warn
from headtrace.errors import InputError

if TYPE_CHECKING:
    import polars as pl

    from headtrace.interpret import Interpretation
    from headtrace.interpret.answer_files import BatchQuestions
    from headtrace.interpret.atlas import Atlas

OPENAI = "openai"
MEASURES = ("sink", "previous", "duplicate", "induction", "copying", "entropy", "top_share")
"""Measures of heads for which the highest heads are listed."""


def atlas(
    *,
    model: options.ModelName,
    corpus: str = typer.Option(
        help="A text file, JSONL or Parquet with text, hub:owner/name, task:NAME, or sampled:N (from the model)."
    ),
    out: str = typer.Option(
        help="Folder for tables and pages; an interrupted atlas is resumed there. With x.tex, the folder is x, and "
        "x.tex the table of heads in LaTeX."
    ),
    channels: str = typer.Option(
        "top:8", help="top:8 for the eight strongest channels of every head, or a list: L9H6:3,L9H6:7."
    ),
    tokens: int | None = typer.Option(
        None, help="Read this many tokens of the corpus (default: all).", min=1
    ),
    length: int | None = typer.Option(None, help="Tokens per chunk (default: 128).", min=1),
    seed: int = typer.Option(0, help="Seed of the random samples.", min=0),
    sinks: bool = typer.Option(False, "--sinks", help="Also keep pairs whose source is the first token."),
    engine: options.EngineOptions,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Writes heads.parquet, channels.parquet, pairs.parquet, atlas.json and the pages index.html and heads/*.html.

    Examples:

      headtrace atlas smollm2-135m --corpus book.txt --tokens 50000 --out atlas
      headtrace atlas builtin --corpus sampled:2000 --channels top:4 --out atlas
      headtrace atlas smollm2-135m --corpus texts.jsonl --workers 8 --out atlas
    """
    from headtrace.explorer import write_atlas_pages
    from headtrace.interpret.atlas import atlas as make

    how: dict[str, Any] = {
        "channels": channels,
        "tokens": tokens,
        "length": length,
        "seed": seed,
        "sinks": sinks,
    }
    how |= engine.check()
    output = Output(json, out, [".tex"], folder=True)
    folder = out.removesuffix(output.ending)
    loaded = place.load(model)
    with progress_bar("Chunks", resumes=True) as progress:
        try:
            found = make(loaded, corpus, folder, **how, progress=progress)
        except KeyboardInterrupt:
            raise options.interrupted() from None

    def content() -> dict[str, Any]:
        counts = {"heads": found.heads.height, "channels": found.channels.height, "pairs": found.n_pairs}
        highest = {name: found.find(name, 3)["head"].to_list() for name in MEASURES}
        return {**found.about, "out": folder, **counts, "highest": highest}

    output.finish(
        content,
        lambda: _show_atlas(found),
        save=lambda _: write_atlas_pages(found),
        table=lambda: found.heads.select("head", *MEASURES, "roles"),
        files="heads.parquet, channels.parquet, pairs.parquet, index.html",
    )


def _show_atlas(found: Atlas) -> None:
    def highest(name: str) -> str:
        rows = found.find(name, 4).iter_rows(named=True)
        return "  ".join(f"{row['head']} {row[name]:.2f}" for row in rows if row[name] is not None)

    say(repr(found))
    columns = {"measure": lambda name: name.replace("_", " "), "heads": highest}
    show_table(MEASURES, columns, title="The heads that do it most", left=2)
    named = [f"{row['head']}: {row['roles']}" for row in found.heads.iter_rows(named=True) if row["roles"]]
    say(f"{len(named)} of {found.heads.height} heads have roles with names (column roles of heads.parquet)")


# -- headtrace interpret -----------------------------------------------------------------------------------------


def interpret(
    *,
    circuit: options.CircuitSource,
    corpus: list[str] = typer.Option(
        help="Text to look in: a text, JSONL or Parquet file, hub:owner/name, task:NAME, or sampled:N (from the "
        "model). Words are found in the first corpus and tested in two. Give the option twice; otherwise the model "
        "writes the second one itself."
    ),
    out: str = typer.Option(
        help="Folder for interpretation.json, descriptions.parquet and the circuit with words. With x.tex, the folder "
        "is x, and x.tex the table of descriptions in LaTeX."
    ),
    explainer: str = typer.Option(
        "lexical", help="What finds the words: lexical, vocabulary or openai (an endpoint)."
    ),
    judge: str = typer.Option("lexical", help="What judges them: lexical or openai (an endpoint)."),
    limit: int | None = typer.Option(None, min=1, help="Explain the N strongest signals only."),
    budget: int | None = typer.Option(
        None, min=1, metavar="TOKENS", help="Tokens that may be spent at an endpoint."
    ),
    base_url: str | None = typer.Option(
        None, metavar="URL", help="An OpenAI-compatible endpoint, like http://localhost:8000/v1."
    ),
    model_name: str | None = typer.Option(None, help="The model to ask there."),
    concurrency: int | None = typer.Option(
        None, min=1, help="Requests under way at a time (default: 8; a slow server: 1)."
    ),
    timeout: float | None = typer.Option(
        None, metavar="SECONDS", help="How long to wait for an answer (default: 120)."
    ),
    batch: int | None = typer.Option(
        None, min=1, help="Pairs per question to a judge (default: 10; a small model: 1 or 2)."
    ),
    weigh: bool = typer.Option(
        False,
        "--weigh",
        help="Ask the judge about one pair at a time, and compare how probable its yes is with that for random pairs: "
        "for a small model that says yes to everything. The server must give logprobs.",
    ),
    around: int | None = typer.Option(
        None,
        min=0,
        help="Tokens shown on each side of the two tokens of an example (default: 8; 0: the two tokens alone).",
    ),
    batch_out: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Do not send questions. Write those that have no answer yet into this batch file (JSONL), and stop.",
    ),
    batch_in: list[str] = typer.Option(
        [], metavar="FILE", help="First read the results of a batch; repeat it for a file of errors."
    ),
    show: int = typer.Option(10, min=0, help="How many descriptions to list."),
    seed: int = typer.Option(
        0, min=0, help="Seed for the split into examples and held-out pairs, for samples and controls."
    ),
    models: options.CircuitModels,
    engine: options.EngineOptions,
    json: options.Json = False,
) -> None:
    """
    An endpoint's API key is read from OPENAI_API_KEY; a server on this machine needs none. If interrupted, the same
    command resumes.

    Examples:

      headtrace interpret circuit.json --corpus text.txt --out words
      headtrace interpret circuit.json --corpus novel.txt --corpus manual.txt --out words
      headtrace interpret runs/ioi --corpus text.jsonl --limit 300 --out words --json
      headtrace interpret circuit.json --corpus sampled:20000 --explainer openai --judge openai
          --base-url http://localhost:8000/v1 --model-name smollm2 --budget 200000 --out words
      headtrace interpret circuit.json --corpus text.txt --judge openai --model-name gpt-4o
          --batch-in results.jsonl --batch-out ask.jsonl --out words
    """
    from headtrace.circuits import named_circuits
    from headtrace.interpret.answer_files import BatchWritten, read_batch_results
    from headtrace.interpret.interpretation import batch_questions, count_signals, estimate, scan, two_corpora
    from headtrace.interpret.interpretation import interpret as put_into_words

    processes = engine.check()
    corpora = two_corpora(corpus)
    output = Output(json, out, [".tex"], folder=True)
    folder = out.removesuffix(output.ending)
    endpoint = {
        "base_url": base_url,
        "model_name": model_name,
        "concurrency": concurrency,
        "timeout": timeout,
        "batch": batch,
        "weigh": weigh or None,
        "around": around,
    }
    if (batch_out is not None or batch_in) and OPENAI not in (explainer, judge):
        raise InputError("--batch-out, --batch-in: only --explainer openai or --judge openai asks questions.")
    writes = batch_questions(batch_out, Path(folder))
    explains, judges = _explainer_and_judge(explainer, judge, endpoint, writes)
    circuits = [each for _, each in named_circuits(circuit)]
    n_signals = count_signals(circuits, limit)
    _note_cost(n_signals, estimate(n_signals, explains, judges), budget)
    if batch_in:
        report = read_batch_results(batch_in, folder)
        (note if report.complete and not report.failed else warn)(f"{', '.join(batch_in)}: {report}")
    if len(corpus) == 1:
        note(
            f"The second corpus is {corpora[1]}: text that the model makes up. Give --corpus twice for another."
        )
    loaded = models.of(circuits[0])
    with progress_bar("Scan and words") as progress:
        try:
            found = put_into_words(
                circuits,
                loaded,
                corpora,
                explainer=explains,
                judge=judges,
                out=folder,
                limit=limit,
                budget=budget,
                batch_out=batch_out,
                seed=seed,
                scanning=partial(scan, **processes),
                progress=progress,
            )
        except BatchWritten as written:
            waiting = {"batch_file": str(written.file), "questions": written.questions}
            output.finish(lambda: waiting, lambda: say(str(written)), save=lambda _: None, files="scans")
            return
    if found.failures["signals"] or found.failures["pairs"]:
        warn("Some questions were not answered: give the same command again to ask them once more.")
    files = "interpretation.json, descriptions.parquet and the circuits with words"
    output.finish(
        found.to_dict,
        lambda: _show_words(found, show),
        save=lambda _: None,
        table=lambda: _words_table(found),
        files=files,
    )


def _explainer_and_judge(
    explainer: str, judge: str, endpoint: dict[str, Any], batch: BatchQuestions | None
) -> tuple[Any, Any]:
    """Both by name, with the options of the endpoint; one that cannot be used is an error at once."""
    from headtrace.interpret import make_explainer, make_judge
    from headtrace.interpret.explainers import RunContext

    given = {name: value for name, value in endpoint.items() if value is not None}
    if given and OPENAI not in (explainer, judge):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{flags}: only --explainer openai or --judge openai asks an endpoint.")
    of_judge = {"batch", "weigh"} & set(given)
    if of_judge and judge != OPENAI:
        flags = ", ".join(f"--{name}" for name in sorted(of_judge))
        raise InputError(f"{flags}: only --judge openai asks about pairs.")
    to_judge = given if judge == OPENAI else {}
    to_explainer = {name: value for name, value in given.items() if name not in of_judge}
    explains = make_explainer(explainer, **(to_explainer if explainer == OPENAI else {}))
    judges = make_judge(judge, **to_judge)
    explains.prepare(RunContext(batch=batch))
    judges.prepare(RunContext(batch=batch))
    return explains, judges


def _note_cost(n_signals: int, estimate: Any, budget: int | None) -> None:
    """What it will cost, before it starts."""
    requests = f"{estimate.requests} requests, about {estimate.tokens} tokens, " if estimate.requests else ""
    spent = "" if budget is None or budget >= estimate.tokens else f"; the budget of {budget} will not do"
    note(
        f"Explaining and judging {n_signals} signals: {requests}about {max(1, round(estimate.seconds))} s after the "
        f"scan{' (three seconds per request)' if estimate.requests else ''}{spent}"
    )


def _words_table(found: Interpretation) -> pl.DataFrame:
    """What a paper needs of the table: the signal, its words and its verdict."""
    import polars as pl

    signal = pl.format("L{}H{}:{}", "layer", "head", "channels").alias("signal")
    return found.table.select(signal, "side", "description", "supported", "auroc", "second_auroc", "q_value")


def _show_words(found: Interpretation, count: int) -> None:
    say(found.summary())
    described = [(each, each.description) for each in found.signals if each.description is not None]
    for each, description in sorted(described, key=lambda pair: pair[0].p_value)[:count]:
        mark = "supported  " if each.supported else "unsupported"
        aurocs = " and ".join(f"{counts.auroc or 0:.2f}" for counts in (each.counts, each.in_second))
        say(f"{mark}  AUROC {aurocs}  {each.signal.name}: {description.text}")
