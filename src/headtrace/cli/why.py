"""``headtrace why``: a sentence that says why the model answers as it does, its steps, and what was measured.

Of one prompt, or of the prompts of a run that kept mechanisms.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.output import Output, say
from headtrace.cli.progress import progress_bar
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.runs import Run

FORMS = [".html", ".json", ".md", ".svg"]


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
            help="A prompt of as many tokens to compare with; repeat it for several (default: auto, natural changes "
            "of one word that flip the answer)."
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(help="How many changed prompts are run to find counterfactuals.", min=1)
    ] = 120,
    seed: Annotated[int, typer.Option(help="Seed of replacements and of random controls.")] = 0,
    measure: Annotated[
        bool, typer.Option(help="Remove each step in the running model and see what the answer does.")
    ] = True,
    bos: options.Bos = None,
    by: Annotated[
        str | None,
        typer.Option("--by", help="Of a run: compare groups of prompts by this label, like order."),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(help="Of a run: compare the families of this folder (headtrace families RUN --out)."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Write it: page.html, m.json (headtrace.load_mechanism reads it), m.md or m.svg; of a run, steps.json "
            "or steps.md."
        ),
    ] = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    The prompt is compared with natural changes of it that flip the answer. What changed the answer is shared exactly
    among all components; heads that do the same become a step with a name; each step is removed in the running model.
    The lines of the ledger add up to the whole difference.

    Of a run (headtrace run --mechanisms): which steps its prompts share, how often, their mean flow with a 95 %
    interval; with --by or --families, which steps groups share and where they differ.

    Examples:

      headtrace why smollm2-135m -p "When Mary and John went to the store, John gave a drink to"

      headtrace why smollm2-135m -p "The keys to the cabinet" --answer " are" --wrong " is" --out why.html

      headtrace why builtin -p "When Mary and John went to the store, John gave a drink to" --json

      headtrace why runs/ioi --by order --out steps.json
    """
    run = _run_at(model)
    if run is not None and not prompt.given:
        _why_run(run, model, by, families, json, out)
        return
    if by is not None or families is not None:
        raise InputError("--by and --families compare prompts of a run: headtrace why RUN --by LABEL.")
    output = Output(json, out, FORMS)
    given = prompt.read()
    loaded = place.load(model)
    from headtrace.mechanism import why as find
    from headtrace.mechanism.mechanism import save_as

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
    output.finish(found.to_dict, lambda: say(found.summary()), save=lambda path: save_as(found, path))


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
    from headtrace.mechanism.mechanism import save_as

    _, _, which = place.partition("#")
    if which:
        if by is not None or families is not None:
            raise InputError(f"{place} is one prompt: leave out --by and --families, or the #{which}.")
        output = Output(as_json, out, FORMS)
        one = run.mechanism(which)
        output.finish(one.to_dict, lambda: say(one.summary()), save=lambda path: save_as(one, path))
        return
    if by is not None and families is not None:
        raise InputError("Give --by LABEL or --families FOLDER, not both.")
    output = Output(as_json, out, [".json", ".md"])
    found = shared_steps(run, by if families is None else load_families(families).labels)
    output.finish(found.to_dict, lambda: say(found.summary()), save=found.save)
