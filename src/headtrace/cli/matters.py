"""``headtrace matters``: what matters in a prompt, measured."""

from __future__ import annotations

from typing import Annotated

import typer

from headtrace.cli import options
from headtrace.cli.output import Output, say, show_tokens
from headtrace.cli.progress import progress_bar


def matters(
    *,
    model: options.ModelName,
    prompt: options.PromptOptions,
    answer: options.OwnAnswer = None,
    wrong: options.OwnRival = None,
    budget: Annotated[int, typer.Option(help="How many changed prompts are run.", min=1)] = 120,
    seed: Annotated[int, typer.Option(help="Seed of the replacements that are drawn.")] = 0,
    bos: options.Bos = None,
    out: Annotated[str | None, typer.Option(help="Folder for importance.json and importance.png.")] = None,
    png: options.Figure = None,
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Each word is exchanged for words of the prompt, for neighbours in the embedding and for what the model finds likely
    there, all of the same shape, and the model runs on every changed prompt. Per word the mean loss of the metric and
    its range; then the smallest changes that flip the answer, the most natural first.

    Examples:

      headtrace matters smollm2-135m -p "The keys to the cabinet" --answer " are" --wrong " is"

      headtrace matters builtin -p "When Mary and John went to the store, John gave a drink to" --png bars.png

      headtrace matters smollm2-135m -p "The capital of Norway is" --budget 60 --json
    """
    output = Output(json, out, figures=[png])
    given = prompt.read()
    loaded = place.load(model)
    from headtrace.causal import importance

    with progress_bar("Changed prompts") as progress:
        found = importance(loaded, given, answer, wrong, budget=budget, seed=seed, bos=bos, progress=progress)

    def show() -> None:
        show_tokens(found.tokens)
        say(found.summary())

    files = "importance.json, importance.png"
    output.finish(found.to_dict, show, plots=[found.plot], save=found.save, files=files)
