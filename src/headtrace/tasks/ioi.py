"""Indirect object identification: who gets the drink?

Two names are mentioned, one of them (the subject S) again; the sentence breaks off where the other (the
indirect object IO) must follow. The structure is that of the published set (Wang et al. 2022): fifteen
sentence forms, each with the names in the order IO-S-S ("ABBA") or S-IO-S ("BABA"), and a place and an
object as further slots.

Two controls pair up with the standard set example by example (same ``id``):

- ``flipped``: IO and S are exchanged everywhere, so the right answer becomes the wrong one;
- ``random-names``: the second mention of S is a third name, so nothing tells which of the two is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from headtrace.errors import InputError
from headtrace.tasks.build import Cell, Draft, fill, split_words, take
from headtrace.tasks.counterfactuals import TRIES, refill, unfill
from headtrace.tasks.examples import Example, TaskSet
from headtrace.tasks.words import NAMES, OBJECTS, PLACES, Draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# {first} and {second} are the two names as they are introduced, {S2} is the name that comes again.
FORMS = (
    "When {first} and {second} went to the {place}, {S2} gave a {object} to",
    "After {first} and {second} came back from the {place}, {S2} handed a {object} to",
    "While {first} and {second} were busy at the {place}, {S2} passed a {object} to",
    "While {first} and {second} were walking to the {place}, {S2} gave a {object} to",
    "Then, {first} and {second} drove to the {place}. {S2} brought a {object} to",
    "Then, {first} and {second} had a great time at the {place}. {S2} gave a {object} to",
    "Then, {first} and {second} were waiting at the {place}. {S2} decided to give a {object} to",
    "Then, {first} and {second} were planning a trip to the {place}. {S2} wanted to give a {object} to",
    "Then, {first} and {second} had a bitter quarrel, and later {S2} wrote to",
    "Yesterday, {first} and {second} had a long talk. Later {S2} said to",
    "When {first} and {second} found a {object} at the {place}, {S2} decided to give it to",
    "When {first} and {second} bought a {object} at the {place}, {S2} offered the {object} to",
    "After breakfast, {first} and {second} went to the {place}. {S2} lent a {object} to",
    "The {place} that {first} and {second} visited had a {object}. {S2} gave it to",
    "Two friends, {first} and {second}, saw a {object} at the {place}. {S2} sold it to",
)
ORDERS = ("ABBA", "BABA")
SLOTS = {
    "ABBA": {"IO": "first", "S1": "second", "S2": "S2"},
    "BABA": {"IO": "second", "S1": "first", "S2": "S2"},
}
"""The slot of each role, order by order."""
VARIANTS = ("standard", "flipped", "random-names")

# The stream of a cell ends when this many draws in a row bring nothing new.
PATIENCE = 20_000


@dataclass(frozen=True)
class FillIn:
    """The words of one sentence. ``third`` is used by the random-names control only."""

    io: str
    s: str
    third: str
    place: str
    object: str


def fill_in(names: Collection[str], *key: str | int) -> FillIn:
    """The fill-in of a key, with names out of ``names``.

    Every vocabulary draws from the same stream and passes over the names it does not hold, so two models get
    the same words wherever they can.
    """
    draw = Draw("ioi", *key)
    people: list[str] = []
    while len(people) < 3:
        name = draw.pick(NAMES)
        if name in names and name not in people:
            people.append(name)
    io, s, third = people
    return FillIn(io, s, third, draw.pick(PLACES), draw.pick(OBJECTS))


def sentence(
    form: int, order: str, words: FillIn, variant: str = "standard"
) -> tuple[str, dict[str, tuple[int, int]]]:
    """The prompt of one fill-in, without its answer, and where IO, S1 and S2 are.

    >>> sentence(0, "ABBA", FillIn("Mary", "John", "Tom", "store", "drink"))[0]
    'When Mary and John went to the store, John gave a drink to'
    """
    io, s = (words.s, words.io) if variant == "flipped" else (words.io, words.s)
    first, second = (io, s) if order == "ABBA" else (s, io)
    again = words.third if variant == "random-names" else s
    slots = {"first": first, "second": second, "S2": again, "place": words.place, "object": words.object}
    text, spans = fill(FORMS[form], slots)
    return text, {role: spans[slot] for role, slot in SLOTS[order].items()}


def load(
    tokenizer: PreTrainedTokenizerBase,
    n_per_cell: int,
    seed: int,
    variant: str = "standard",
    accept: Callable[[FillIn], bool] | None = None,
) -> TaskSet:
    """``n_per_cell`` prompts of each form and order; ``accept`` keeps only some of the fill-ins."""
    usable, excluded = split_words(tokenizer, NAMES, "name")
    if len(usable) < 3:
        raise InputError(
            f"This vocabulary holds {len(usable)} of the {len(NAMES)} IOI names as single tokens, "
            "but the task needs at least 3. Use another model, or bring your own prompts as JSONL."
        )
    cells = [
        Cell(f"form {form + 1}, {order}", _drafts(form, order, seed, variant, usable, accept))
        for form in range(len(FORMS))
        for order in ORDERS
    ]
    examples, more = take(tokenizer, "ioi", cells, n_per_cell)
    return TaskSet("ioi", tuple(examples), (*excluded, *more), variant, seed)


def other_names(example: Example, draw: Draw) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Three other names, all different, so that nobody is named twice (``abc``)."""
    taken = set(_names(example).values())
    free = [name for name in NAMES if name not in taken]
    for _ in range(TRIES):
        yield _renamed(example, draw.sample(free, 3))


def names_exchanged(example: Example, _: Draw) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The two names exchanged everywhere, so that right and wrong change places (``flip``)."""
    names = _names(example)
    other = {names["IO"]: names["S1"], names["S1"]: names["IO"]}
    yield _renamed(example, [other[names["IO"]], other[names["S1"]], other.get(names["S2"], names["S2"])])


def _names(example: Example) -> dict[str, str]:
    slots = unfill(FORMS[int(example.labels["form"]) - 1], example.text)
    return {role: slots[slot] for role, slot in SLOTS[example.labels["order"]].items()}


def _renamed(example: Example, names: list[str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """The sentence with other names for IO, S1 and S2, and where they are."""
    slot_of = SLOTS[example.labels["order"]]
    changed = dict(zip(slot_of.values(), names, strict=True))
    text, spans = refill(FORMS[int(example.labels["form"]) - 1], example.text, **changed)
    return text, {role: spans[slot] for role, slot in slot_of.items()}


def _drafts(
    form: int,
    order: str,
    seed: int,
    variant: str,
    names: Collection[str],
    accept: Callable[[FillIn], bool] | None,
) -> Iterator[Draft]:
    """Distinct sentences of one cell, until new ones are hard to find."""
    seen: set[str] = set()
    numbers = count()
    misses = 0
    while misses < PATIENCE:
        # The number belongs to the fill-in, not to the place in the set: the variants share it.
        number = next(numbers)
        words = fill_in(names, seed, form, order, number)
        standard, _ = sentence(form, order, words)
        misses += 1
        if standard in seen or (accept is not None and not accept(words)):
            continue
        misses = 0
        seen.add(standard)
        text, spans = sentence(form, order, words, variant)
        right, wrong = (words.s, words.io) if variant == "flipped" else (words.io, words.s)
        yield Draft(
            id=f"ioi/{form + 1:02d}/{order}/{seed}/{number}",
            text=text,
            answers=(f" {right}",),
            wrongs=(f" {wrong}",),
            spans=spans,
            labels={"form": f"{form + 1:02d}", "order": order},
            one_token=frozenset(spans),
        )
