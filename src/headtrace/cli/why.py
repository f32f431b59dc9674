"""Questions about one prompt: ``headtrace why``, ``matters`` and ``expect`` (a circuit's claims as a test)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import Output, check_output, emit, note, notes, say, show_tokens
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.mechanism import Mechanism
    from headtrace.runs import Run


FORMS = [".html", ".json", ".md", ".svg", ".tex"]


def why(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="An alias, hub name, local folder, GGUF file, or 'builtin'; or a run with mechanisms (or one prompt "
            "of it: DIR#ID).",
        ),
    ],
    prompt: options.PromptOptions,
    answer: options.OwnAnswer = None,
    wrong: options.OwnRival = None,
    counterfactual: Annotated[
        list[str] | None,
        typer.Option(
            help="A prompt of the same length in tokens, to compare with; repeat it for several (default: auto, "
            "natural changes of one word that flip the answer)."
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(help="How many changed prompts are run to find counterfactuals.", min=1)
    ] = 120,
    seed: Annotated[
        int, typer.Option(help="Seed for the words that are exchanged, and for random controls.")
    ] = 0,
    measure: Annotated[
        bool, typer.Option(help="Remove each step in the running model and see what the answer does.")
    ] = True,
    atlas: Annotated[
        str | None,
        typer.Option(
            help="Say what the heads of the steps do over the corpus of this atlas (headtrace atlas MODEL --out DIR)."
        ),
    ] = None,
    bos: options.Bos = None,
    by: Annotated[
        str | None,
        typer.Option("--by", help="With a run: compare groups of prompts by this label, such as order."),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(
            help="With a run: compare the families in this folder (made by headtrace families RUN --out)."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Write the result: page.html, m.json (headtrace.load_mechanism reads it), m.md, m.svg or "
            "m.tex (a LaTeX table of the steps); for a run, steps.json, steps.md or steps.tex."
        ),
    ] = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    headtrace looks for natural changes of the prompt that flip the answer, and compares the prompt with these. The
    difference is divided exactly among all components. Heads that do the same thing become one step with a name. Each
    step is then removed in the running model. The lines of the ledger add up to the whole difference.

    For a run made with `headtrace run --mechanisms`, it prints which steps the prompts share, how often, and their
    mean flow (their share of the difference) with a 95 % interval. With --by or --families, it also prints the steps
    in which groups differ.

    Examples:

      headtrace why smollm2-135m -p "When Mary and John went to the store, John gave a drink to"

      headtrace why smollm2-135m -p "The keys to the cabinet" --answer " are" --wrong " is" --out why.html

      headtrace why builtin -p "When Mary and John went to the store, John gave a drink to" --json

      headtrace why runs/ioi --by order --out steps.json
    """
    run = _run_at(model)
    if run is not None and not prompt.given:
        if atlas is not None:
            raise InputError(
                "--atlas is about the heads of one prompt's mechanism: give MODEL and -p PROMPT."
            )
        _why_run(run, model, by, families, json, out)
        return
    if by is not None or families is not None:
        raise InputError("--by and --families compare prompts of a run: headtrace why RUN --by LABEL.")
    if not prompt.given and "/" in model and not os.path.isdir(model):
        raise InputError(
            f"There is no run at {model!r}, and a model needs a prompt: headtrace why MODEL -p 'When Mary ...'."
        )
    output = Output(json, out, FORMS)
    given = prompt.read()
    loaded = place.load(model)
    from headtrace.mechanism import why as find

    roles = {}
    if atlas is not None:
        from headtrace.interpret import open_atlas

        roles = open_atlas(atlas, loaded).roles()
    with progress_bar("Finding out why") as progress:
        found = find(
            loaded,
            given,
            answer,
            wrong,
            counterfactual="auto" if not counterfactual or counterfactual == ["auto"] else counterfactual,
            budget=budget,
            seed=seed,
            measure=measure,
            bos=bos,
            progress=progress,
        )
    found = found.with_roles(roles) if roles else found
    _finish(output, found)


def _finish(output: Output, found: Mechanism) -> None:
    """Print and write the mechanism of one prompt."""
    from headtrace.mechanism.mechanism import save_as

    output.finish(
        found.to_dict,
        lambda: say(found.summary()),
        save=lambda path: save_as(found, path),
        table=lambda: found.frame().select("text", "heads", "flow", "before", "without", "random"),
    )


def _run_at(place: str) -> Run | None:
    """The run at a place (``DIR`` or ``DIR#ID``), if there is one."""
    from headtrace.families.files import run_at

    folder, _, _ = place.partition("#")
    if "://" not in folder and not os.path.isdir(folder):
        return None
    return run_at(folder)


def _why_run(
    run: Run, place: str, by: str | None, families: str | None, as_json: bool, out: str | None
) -> None:
    """The mechanism of a run's prompts, or of one of them."""
    from headtrace.families import load_families, shared_steps

    _, _, which = place.partition("#")
    if which:
        if by is not None or families is not None:
            raise InputError(f"{place} is one prompt: leave out --by and --families, or the #{which}.")
        output = Output(as_json, out, FORMS)
        one = run.mechanism(which)
        _finish(output, one)
        return
    if by is not None and families is not None:
        raise InputError("Give --by LABEL or --families FOLDER, not both.")
    output = Output(as_json, out, [".json", ".md", ".tex"])
    found = shared_steps(run, by if families is None else load_families(families).labels)
    output.finish(found.to_dict, lambda: say(found.summary()), save=found.save)


def matters(
    *,
    model: options.ModelName,
    prompt: options.PromptOptions,
    answer: options.OwnAnswer = None,
    wrong: options.OwnRival = None,
    budget: Annotated[int, typer.Option(help="How many changed prompts are run.", min=1)] = 120,
    seed: Annotated[int, typer.Option(help="Seed of the replacements that are drawn.")] = 0,
    bos: options.Bos = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for importance.json and importance.png; or a .tex file for the table of words."
        ),
    ] = None,
    png: options.Figure = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Each word is replaced by other words of the prompt, by its neighbours in the embedding and by words that the model
    finds likely there, all with the same number of tokens and the same capitals and spaces. The model runs on every
    changed prompt. The command prints how much of the metric is lost when each word is replaced (mean and range), and
    the smallest changes that flip the answer, the most natural first.

    Examples:

      headtrace matters smollm2-135m -p "The keys to the cabinet" --answer " are" --wrong " is"

      headtrace matters builtin -p "When Mary and John went to the store, John gave a drink to" --png bars.png

      headtrace matters smollm2-135m -p "The capital of Norway is" --budget 60 --json
    """
    output = Output(json, out, [".tex"], folder=True, figures=[png])
    given = prompt.read()
    loaded = place.load(model)
    from headtrace.causal import importance

    with progress_bar("Changed prompts") as progress:
        found = importance(loaded, given, answer, wrong, budget=budget, seed=seed, bos=bos, progress=progress)

    def show() -> None:
        show_tokens(found.tokens)
        say(found.summary())

    files = "importance.json, importance.png"
    output.finish(found.to_dict, show, plots=[found.plot], save=found.save, table=found.frame, files=files)


def expect(
    *,
    claims: str = typer.Argument(
        metavar="CLAIMS", help="A file of claims; or a circuit file, to make claims from it (--out)."
    ),
    model: str | None = typer.Option(
        None,
        "--model",
        help="The model to test: a name or a folder. With a circuit file, default: its own model.",
    ),
    kept: float = typer.Option(
        0.5, help="With a circuit file: the share of each value that another model must reach."
    ),
    most: int = typer.Option(10, help="With a circuit file: at most this many claims of each kind.", min=1),
    out: str | None = typer.Option(None, help="With a circuit file: the file of claims (.json) to write."),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Claims say what a model is expected to do: this head attends here, it carries at least so much of the answer, it
    attends because of this component. Each is PASS or FAIL. Claims go from the lowest layer up, so the first that
    fails shows where models begin to differ. Exit code: 0 if all hold, 1 if one does not, 2 if the input cannot be
    used.

    Examples:

      headtrace trace builtin -p "When Mary and John went to the store, John gave a drink to" --answer " Mary"
          --wrong " John" --out circuit.json
      headtrace expect circuit.json --out claims.json
      headtrace expect claims.json --model ./finetuned
    """
    check_output(json, out)
    from headtrace.causal.expectations import expect as put_to
    from headtrace.causal.expectations import make_claims, read_claims, save_claims
    from headtrace.circuits import load_circuit

    if out is not None:
        circuit = load_circuit(claims)
        own = place.load(model or circuit.model.name)
        with notes.status("Measuring the claims"):
            made = make_claims(circuit, own, kept=kept, most=most)
        save_claims(made, out)
        emit({"claims": len(made), "out": out}, as_json=json, show=lambda: say(f"{len(made)} claims"))
        note(f"Wrote {out}")
        return
    if model is None:
        raise InputError(
            f"Say which model to test {Path(claims).name!r} on: --model NAME_OR_FOLDER. To make claims from a circuit, "
            "give --out claims.json."
        )
    given = read_claims(claims)
    loaded = place.load(model)
    with notes.status("Testing the claims"):
        found = put_to(given, loaded)
    emit(found.to_dict(), as_json=json, show=lambda: say(str(found)))
    raise typer.Exit(0 if found.passed else 1)
