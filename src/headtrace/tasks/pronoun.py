"""Gendered pronoun: a name tells which pronoun follows.

"So Mary is a very good teacher, isn't" goes on with "she", not "he". Half of the names of every form are
women's, half are men's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from headtrace.tasks.build import Cell, Draft, fill, split_words, take
from headtrace.tasks.counterfactuals import refill
from headtrace.tasks.examples import Example, TaskSet
from headtrace.tasks.words import FEMALE_NAMES, JOBS, MALE_NAMES, Draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = (
    "So {name} is a very good {job}, isn't",
    "So {name} was once a famous {job}, wasn't",
    "We all know that {name} works as a {job}, doesn't",
    "Everyone likes {name} the {job} because",
)
PRONOUNS = {"female": " she", "male": " he"}
NAMES = {"female": FEMALE_NAMES, "male": MALE_NAMES}


def sentence(form: int, name: str, job: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The prompt, and where the name is.

    >>> sentence(0, "Mary", "teacher")
    ("So Mary is a very good teacher, isn't", {'name': (3, 7)})
    """
    text, spans = fill(FORMS[form], {"name": name, "job": job})
    return text, {"name": spans["name"]}


def load(tokenizer: PreTrainedTokenizerBase, n_per_cell: int, seed: int) -> TaskSet:
    """``n_per_cell`` prompts of each form and gender."""
    usable, excluded = split_words(tokenizer, (*FEMALE_NAMES, *MALE_NAMES), "name")
    cells = [
        Cell(f"form {form + 1}, {gender}", _drafts(form, gender, seed, [n for n in names if n in usable]))
        for form in range(len(FORMS))
        for gender, names in NAMES.items()
    ]
    examples, more = take(tokenizer, "pronoun", cells, n_per_cell)
    return TaskSet("pronoun", tuple(examples), (*excluded, *more), seed=seed)


def other_gender(example: Example, draw: Draw) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """A name of the other gender, so that right and wrong change places (``gender``)."""
    form = FORMS[int(example.labels["form"]) - 1]
    other = NAMES["male" if example.labels["gender"] == "female" else "female"]
    for name in draw.shuffled(other):
        text, spans = refill(form, example.text, name=name)
        yield text, {"name": spans["name"]}


def _drafts(form: int, gender: str, seed: int, names: Sequence[str]) -> Iterator[Draft]:
    other = "male" if gender == "female" else "female"
    numbers = count()
    for name, job in Draw("pronoun", seed, form, gender).shuffled([(n, j) for n in names for j in JOBS]):
        text, spans = sentence(form, name, job)
        yield Draft(
            id=f"pronoun/{form + 1}/{gender}/{seed}/{next(numbers)}",
            text=text,
            answers=(PRONOUNS[gender],),
            wrongs=(PRONOUNS[other],),
            spans=spans,
            labels={"form": str(form + 1), "gender": gender},
            one_token=frozenset({"name"}),
        )
