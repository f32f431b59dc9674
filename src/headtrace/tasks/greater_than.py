"""Greater-than: a span of years cannot end before it began.

"The war lasted from the year 1732 to the year 17" must go on with a number above 32 (Hanna et al. 2023).
Right and wrong are sets of tokens here. A vocabulary that writes two digits as one token (GPT-2, the
built-in model) has 33..99 on one side and 00..32 on the other; one that writes single digits (Llama, SmolLM2)
decides at the tens digit, and the digit that could go either way (3) belongs to neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from headtrace.prompts import Encoded, decoded, encode, following, is_unknown
from headtrace.tasks.build import Cell, Draft, assemble, fill, place_roles, take
from headtrace.tasks.counterfactuals import unfill
from headtrace.tasks.examples import Example, Exclusion, TaskSet
from headtrace.tasks.words import EVENTS, Draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = (
    "The {event} lasted from the year {year} to the year {century}",
    "The {event} began in {year} and ended in {century}",
    "The {event} went on from {year} until {century}",
)
CENTURIES = ("15", "16", "17", "18")
YEARS = tuple(f"{number:02d}" for number in range(100))
STARTS = YEARS[2:98]


def sentence(form: int, event: str, century: str, start: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The prompt, and where the century (XX) and the tens digit (YY) of the first year are.

    >>> sentence(0, "war", "17", "32")[0]
    'The war lasted from the year 1732 to the year 17'
    """
    text, spans = fill(FORMS[form], {"event": event, "year": century + start, "century": century})
    first = spans["year"][0]
    return text, {"XX": (first, first + 2), "YY": (first + 2, first + 3)}


def load(tokenizer: PreTrainedTokenizerBase, n_per_cell: int, seed: int) -> TaskSet:
    """``n_per_cell`` prompts of each form and century, with first years drawn evenly from 02 to 97."""
    cells = [
        Cell(f"form {form + 1}, century {century}", _drafts(form, century, seed))
        for form in range(len(FORMS))
        for century in CENTURIES
    ]
    examples, excluded = take(tokenizer, "greater-than", cells, n_per_cell, _build)
    return TaskSet("greater-than", tuple(examples), tuple(excluded), seed=seed)


def another_start(example: Example, draw: Draw) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The first year is 01, as in the paper, so that nearly every year is later (``start``); else an early one."""
    form, slots = _slots(example)
    century = slots["century"]
    for start in ("01", *draw.shuffled(YEARS[2:20])):
        if slots["year"] != century + start:
            yield sentence(form, slots["event"], century, start)


def another_century(example: Example, draw: Draw) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The same years of another century (``century``)."""
    form, slots = _slots(example)
    for century in draw.shuffled([each for each in CENTURIES if each != slots["century"]]):
        yield sentence(form, slots["event"], century, slots["year"][2:])


def _slots(example: Example) -> tuple[int, dict[str, str]]:
    form = int(example.labels["form"]) - 1
    return form, unfill(FORMS[form], example.text)


def _drafts(form: int, century: str, seed: int) -> Iterator[Draft]:
    everything = [(event, start) for event in EVENTS for start in STARTS]
    numbers = count()
    for event, start in Draw("greater-than", seed, form, century).shuffled(everything):
        text, spans = sentence(form, event, century, start)
        later = [year for year in YEARS if year > start]
        yield Draft(
            id=f"greater-than/{form + 1}/{century}/{seed}/{next(numbers)}",
            text=text,
            answers=tuple(later),
            wrongs=tuple(year for year in YEARS if year <= start),
            spans=spans,
            labels={"form": str(form + 1), "century": century},
        )


def _build(tokenizer: PreTrainedTokenizerBase, drafts: Sequence[Draft]) -> Iterator[Example | Exclusion]:
    prompts = encode(tokenizer, [draft.text for draft in drafts])
    longer = iter(encode(tokenizer, [draft.text + year for draft in drafts for year in YEARS]))
    for draft, prompt in zip(drafts, prompts, strict=True):
        by_year = {year: next(longer) for year in YEARS}
        yield _build_one(tokenizer, draft, prompt, by_year)


def _build_one(
    tokenizer: PreTrainedTokenizerBase, draft: Draft, prompt: Encoded, by_year: dict[str, Encoded]
) -> Example | Exclusion:
    roles = place_roles(tokenizer, prompt, draft.spans)
    if isinstance(roles, str):
        return Exclusion(draft.id, roles)
    # Which years begin with each token that can follow the prompt.
    years: dict[int, list[str]] = {}
    for year, longer in by_year.items():
        tokens = following(prompt, longer)
        if tokens is not None and not is_unknown(tokenizer, tokens[0]):
            years.setdefault(tokens[0], []).append(year)
    later = set(draft.answers)
    answers = tuple(token for token, each in years.items() if later.issuperset(each))
    wrongs = tuple(token for token, each in years.items() if later.isdisjoint(each))
    if not answers or not wrongs:
        side = "later" if not answers else "earlier"
        return Exclusion(draft.id, f"no token of this vocabulary says that the year is {side}")
    # The nearest years stand for their side: 33 against 32.
    wrongs = wrongs[::-1]
    nearest = replace(
        draft, answers=(decoded(tokenizer, answers[:1]),), wrongs=(decoded(tokenizer, wrongs[:1]),)
    )
    return assemble(nearest, prompt, roles, answers, wrongs)
