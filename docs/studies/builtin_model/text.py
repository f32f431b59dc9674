"""What the built-in model reads while it is trained, and what is kept from it.

A document is a row of task sentences with their answers, or random words said over and over. Some pairs of
words never stand in one document: a fifth of all (name, object) pairs and a fifth of all pairs of names.
Held-out IOI prompts are made of such pairs only, so a model that does well on them has not learned them by
heart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from headtrace.tasks import facts, greater_than, ioi, pronoun
from headtrace.tasks.words import EVENTS, JOBS, NAMES, OBJECTS, PLACES, Draw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headtrace.tasks.examples import TaskSet

HELD_OUT_ONE_IN = 5
DOCUMENT_LENGTH = 44
# Kinds of documents. Echoes ("Mary pen Mary, cake Tom cake,") and registers ("Mary new Tom new Mary again")
# can be solved by looking at the word before, or at the same word: heads that induction and IOI build upon.
DOCUMENTS = ("echo", "repeat", "repeat", "register", "sentences", "sentences", "sentences", "sentences")
REPEAT_LENGTHS = tuple(range(7, 20))
NEW, AGAIN = "new", "again"
# How often each kind of sentence comes. A name tag asks for the one name of the sentence before.
MIX = ("ioi",) * 8 + ("pronoun",) * 6 + ("name tag",) * 2 + ("greater-than",) * 2 + ("facts",) * 2
NAME_TAG = "We met {name} at the {place}. The name is"
# Loss weights: of an answer, of a word in a repetition, of any other word.
ANSWER, REPEATED, OTHER = 3.0, 0.5, 0.1


@dataclass(frozen=True)
class Document:
    """Words as tokens, and how much it matters to predict each of them."""

    words: tuple[str, ...]
    weights: tuple[float, ...]


@cache
def held_out_partners() -> dict[str, frozenset[str]]:
    """For every name and object, the words that it never meets in training."""
    partners: dict[str, set[str]] = {word: set() for word in (*NAMES, *OBJECTS)}
    pairs = [(name, thing) for name in NAMES for thing in OBJECTS]
    pairs += [(name, other) for number, name in enumerate(NAMES) for other in NAMES[number + 1 :]]
    for first, second in pairs:
        if Draw("held out", first, second).below(HELD_OUT_ONE_IN) == 0:
            partners[first].add(second)
            partners[second].add(first)
    return {word: frozenset(others) for word, others in partners.items()}


def is_held_out(words: ioi.FillIn) -> bool:
    """Whether both names are new to the object, and to each other."""
    partners = held_out_partners()
    return words.object in partners[words.io] & partners[words.s] and words.s in partners[words.io]


def held_out_ioi(tokenizer: PreTrainedTokenizerBase, n_per_cell: int = 20, seed: int = 0) -> TaskSet:
    """IOI prompts whose names and object were never seen together in training."""
    return ioi.load(tokenizer, n_per_cell, seed, accept=is_held_out)


def documents(seed: int, split: Callable[[str], list[str]]) -> Iterator[Document]:
    """An endless stream of training documents; ``split`` is the tokenizer."""
    draw = Draw("documents", seed)
    ordinary = _ordinary_words()
    while True:
        match draw.pick(DOCUMENTS):
            case "echo":
                yield _echo(draw, ordinary)
            case "repeat":
                yield _repeated(draw, ordinary)
            case "register":
                yield _register(draw, ordinary)
            case _:
                yield _sentences(draw, split)


def _sentences(draw: Draw, split: Callable[[str], list[str]]) -> Document:
    words: list[str] = []
    weights: list[float] = []
    present: set[str] = set()
    while len(words) < DOCUMENT_LENGTH:
        prompt, answer = _sentence(draw)
        new = [*split(prompt), answer, "."]
        if _clashes(new, present):
            continue
        present.update(new)
        words += new
        weights += [OTHER] * (len(new) - 2) + [ANSWER, OTHER]
    return Document(tuple(words[:DOCUMENT_LENGTH]), tuple(weights[:DOCUMENT_LENGTH]))


def _sentence(draw: Draw) -> tuple[str, str]:
    """One prompt and its answer."""
    match draw.pick(MIX):
        case "name tag":
            name = draw.pick(NAMES)
            return NAME_TAG.format(name=name, place=draw.pick(PLACES)), name
        case "ioi":
            form, order = draw.below(len(ioi.FORMS)), draw.pick(ioi.ORDERS)
            words = ioi.fill_in(NAMES, "training", draw.below(2**60))
            return ioi.sentence(form, order, words)[0], words.io
        case "greater-than":
            start = draw.pick(greater_than.STARTS)
            later = greater_than.YEARS[int(start) + 1 :]
            form, event = draw.below(len(greater_than.FORMS)), draw.pick(EVENTS)
            return greater_than.sentence(form, event, draw.pick(greater_than.CENTURIES), start)[0], draw.pick(
                later
            )
        case "pronoun":
            gender = draw.pick(tuple(pronoun.NAMES))
            name, form = draw.pick(pronoun.NAMES[gender]), draw.below(len(pronoun.FORMS))
            return pronoun.sentence(form, name, draw.pick(JOBS))[0], pronoun.PRONOUNS[gender].strip()
        case _:
            relation = draw.pick(tuple(facts.RELATIONS))
            subject = draw.pick(tuple(facts.RELATIONS[relation]))
            form = draw.below(len(facts.FORMS[relation]))
            return facts.sentence(relation, form, subject)[0], facts.RELATIONS[relation][subject]


def _random_words(draw: Draw, ordinary: tuple[str, ...], number: int) -> list[str]:
    """Different words that may stand in one document."""
    words: list[str] = []
    while len(words) < number:
        word = draw.pick(ordinary)
        if word not in words and not _clashes([word], set(words)):
            words.append(word)
    return words


def _register(draw: Draw, ordinary: tuple[str, ...]) -> Document:
    """Words, each followed by whether it is new or was there before."""
    some = _random_words(draw, ordinary, DOCUMENT_LENGTH // 3)
    words: list[str] = []
    while len(words) < DOCUMENT_LENGTH:
        word = draw.pick(some)
        words += [word, AGAIN if word in words else NEW]
    weights = [REPEATED if word in (NEW, AGAIN) else OTHER for word in words]
    return Document(tuple(words), tuple(weights))


def _echo(draw: Draw, ordinary: tuple[str, ...]) -> Document:
    """Pairs of words, the first of which is said again."""
    some = iter(_random_words(draw, ordinary, DOCUMENT_LENGTH // 2))
    words = [word for first, second in zip(some, some, strict=True) for word in (first, second, first, ",")]
    weights = [OTHER, OTHER, REPEATED, OTHER] * (len(words) // 4)
    return Document(tuple(words), tuple(weights))


def _repeated(draw: Draw, ordinary: tuple[str, ...]) -> Document:
    """Different random words, said again and again until the document is full."""
    length = draw.pick(REPEAT_LENGTHS)
    once = _random_words(draw, ordinary, length)
    words = (once * (DOCUMENT_LENGTH // length + 1))[:DOCUMENT_LENGTH]
    # The first word that comes again cannot be foreseen; what follows it can.
    weights = [REPEATED if position > length else OTHER for position in range(DOCUMENT_LENGTH)]
    return Document(tuple(words), tuple(weights))


def _clashes(new: list[str], present: set[str]) -> bool:
    """Whether the document would hold a pair of words that must not meet."""
    partners = held_out_partners()
    everything = present | set(new)
    return any(not partners[word].isdisjoint(everything) for word in new if word in partners)


def _ordinary_words() -> tuple[str, ...]:
    from docs.studies.builtin_model.tokenizer import words

    return tuple(word for word in words() if word not in (NEW, AGAIN, ","))
