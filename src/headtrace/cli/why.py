"""``headtrace why``: a sentence that says why the model answers as it does, its steps, and what was measured."""

from __future__ import annotations

from typing import Annotated

import typer

from headtrace.cli import options
from headtrace.cli.output import Output, say
from headtrace.cli.progress import progress_bar


def why(
    *,
    model: options.ModelName,
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
    out: Annotated[
        str | None,
        typer.Option(help="Write it: page.html, m.json (headtrace.load_mechanism reads it), m.md or m.svg."),
    ] = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    The prompt is compared with natural changes of it that flip the answer. What changed the answer is shared exactly
    among all components; heads that do the same become a step with a name; each step is removed in the running model.
    The lines of the ledger add up to the whole difference.

    Examples:

      headtrace why smollm2-135m -p "When Mary and John went to the store, John gave a drink to"

      headtrace why smollm2-135m -p "The keys to the cabinet" --answer " are" --wrong " is" --out why.html

      headtrace why builtin -p "When Mary and John went to the store, John gave a drink to" --json
    """
    output = Output(json, out, [".html", ".json", ".md", ".svg"])
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
