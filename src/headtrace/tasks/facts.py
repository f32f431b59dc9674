"""Factual recall: capitals, languages and continents of countries.

The wrong answer is the right answer of another country in the same relation, so only knowing the fact helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING

from headtrace.tasks.build import Cell, Draft, fill, split_words, take
from headtrace.tasks.counterfactuals import unfill
from headtrace.tasks.examples import Example, TaskSet
from headtrace.tasks.words import CAPITALS, CONTINENTS, LANGUAGES, Draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RELATIONS: dict[str, Mapping[str, str]] = {
    "capital": CAPITALS,
    "language": LANGUAGES,
    "continent": CONTINENTS,
}
FORMS = {
    "capital": (
        "The capital of {subject} is",
        "Everyone in {subject} knows that its capital is",
    ),
    "language": (
        "The main language of {subject} is",
        "Most people in {subject} speak",
    ),
    "continent": (
        "The country of {subject} is a part of",
        "On a map of the world, {subject} lies in",
    ),
}


def sentence(relation: str, form: int, subject: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The prompt, and where the subject is (a subject of several tokens is known by its last one).

    >>> sentence("capital", 0, "France")
    ('The capital of France is', {'subject': (15, 21)})
    """
    return fill(FORMS[relation][form], {"subject": subject})


def load(tokenizer: PreTrainedTokenizerBase, n_per_cell: int, seed: int) -> TaskSet:
    """``n_per_cell`` prompts of each relation and form."""
    everything = sorted({answer for facts in RELATIONS.values() for answer in facts.values()})
    usable, excluded = split_words(tokenizer, everything, "answer")
    cells = [
        Cell(f"relation {relation}, form {form + 1}", _drafts(relation, form, seed, usable))
        for relation in RELATIONS
        for form in range(len(FORMS[relation]))
    ]
    examples, more = take(tokenizer, "facts", cells, n_per_cell)
    return TaskSet("facts", tuple(examples), (*excluded, *more), seed=seed)


def another_subject(example: Example, draw: Draw) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Another subject of the same relation, for which another answer is right (``subject``)."""
    relation, form = example.labels["relation"], int(example.labels["form"]) - 1
    facts = RELATIONS[relation]
    subject = unfill(FORMS[relation][form], example.text)["subject"]
    for other in draw.shuffled([each for each in facts if facts[each] != facts[subject]]):
        yield sentence(relation, form, other)


def _drafts(relation: str, form: int, seed: int, usable: frozenset[str]) -> Iterator[Draft]:
    facts = {subject: answer for subject, answer in RELATIONS[relation].items() if answer in usable}
    draw = Draw("facts", seed, relation, form)
    numbers = count()
    for subject in draw.shuffled(tuple(facts)):
        others = sorted({answer for answer in facts.values() if answer != facts[subject]})
        if not others:
            return
        text, spans = sentence(relation, form, subject)
        yield Draft(
            id=f"facts/{relation}/{form + 1}/{seed}/{next(numbers)}",
            text=text,
            answers=(f" {facts[subject]}",),
            wrongs=(f" {draw.pick(others)}",),
            spans=spans,
            labels={"relation": relation, "form": str(form + 1)},
        )
