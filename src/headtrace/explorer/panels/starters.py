"""Prompts to begin with: of each task, an example that the model answers rightly.

Up to twenty examples of a task run in one batch, and the one whose right answer is likeliest is kept, in the cache too:
the next server of this model has it without running anything.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> found = starter(session, "ioi")
>>> found.right, found.probability > 0.5
(True, True)
"""

from __future__ import annotations

from contextlib import suppress

from pydantic import ValidationError

from headtrace.cache import cache_folder
from headtrace.errors import InputError
from headtrace.explorer.panels.prompts import ExampleView, examples
from headtrace.explorer.panels.session import Session
from headtrace.writing import write_text

CHECKED = 20
"""Examples of a task that are tried."""


class StarterView(ExampleView):
    """An example of a task, and how the model answers it."""

    task: str
    probability: float
    """Of the task's answer."""
    right: bool
    """Whether that is what the model answers; of some tasks a model gets no example right."""


def starter(session: Session, name: str) -> StarterView:
    """The example of a task that the model answers rightly with the highest probability."""
    model = session.models[0]
    if model.tokenizer is None:
        raise InputError(
            f"{model.name!r} was loaded without a tokenizer: it cannot read the examples of a task."
        )
    path = cache_folder("starters") / f"{model.weights_sha256}-{model.computation_sha256}-{name}.json"
    with suppress(OSError, ValidationError):
        return StarterView.model_validate_json(path.read_bytes())
    tried: list[tuple[ExampleView, int]] = []
    for example in examples(session, name, CHECKED):
        with suppress(InputError):  # an answer that this model spells in another way
            tried.append((example, model.token_id(example.answer, prompt=example.text)))
    if not tried:
        raise InputError(f"No example of {name!r} has an answer of one token in {model.name!r}.")
    probabilities = model.end_logits([example.text for example, _ in tried]).softmax(-1)
    found = [
        StarterView(
            **example.model_dump(),
            task=name,
            probability=float(row[answer]),
            right=int(row.argmax()) == answer,
        )
        for (example, answer), row in zip(tried, probabilities, strict=True)
    ]
    best = max(found, key=lambda each: (each.right, each.probability))
    with suppress(OSError):
        write_text(path, best.model_dump_json())
    return best
