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
from headtrace.tasks.draws import Draw
from headtrace.tasks.words import EVENTS, JOBS, NAMES, OBJECTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headtrace.tasks.examples import TaskSet

HELD_OUT_ONE_IN = 5
DOCUMENT_LENGTH = 44
REPEATED_ONE_IN = 4
REPEAT_LENGTHS = tuple(range(3, 17))
# How often each kind of sentence comes; IOI needs most heads and so most practice.
MIX = ("ioi",) * 12 + ("greater-than",) * 4 + ("pronoun",) * 2 + ("facts",) * 2


@dataclass(frozen=True)
class Document:
    """Words as tokens, and which of them can be known from what came before."""

    words: tuple[str, ...]
    predictable: tuple[bool, ...]


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
        if draw.below(REPEATED_ONE_IN) == 0:
            yield _repeated(draw, ordinary)
        else:
            yield _sentences(draw, split)


def _sentences(draw: Draw, split: Callable[[str], list[str]]) -> Document:
    words: list[str] = []
    predictable: list[bool] = []
    present: set[str] = set()
    while len(words) < DOCUMENT_LENGTH:
        prompt, answer = _sentence(draw)
        new = [*split(prompt), answer, "."]
        if _clashes(new, present):
            continue
        present.update(new)
        words += new
        predictable += [False] * (len(new) - 2) + [True, False]
    return Document(tuple(words[:DOCUMENT_LENGTH]), tuple(predictable[:DOCUMENT_LENGTH]))


def _sentence(draw: Draw) -> tuple[str, str]:
    """One prompt and its answer."""
    match draw.pick(MIX):
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


def _repeated(draw: Draw, ordinary: tuple[str, ...]) -> Document:
    """Different random words, said again and again until the document is full."""
    length = draw.pick(REPEAT_LENGTHS)
    once: list[str] = []
    while len(once) < length:
        word = draw.pick(ordinary)
        if word not in once and not _clashes([word], set(once)):
            once.append(word)
    words = (once * (DOCUMENT_LENGTH // length + 1))[:DOCUMENT_LENGTH]
    # The first word that comes again cannot be foreseen; what follows it can.
    return Document(tuple(words), tuple(position > length for position in range(DOCUMENT_LENGTH)))


def _clashes(new: list[str], present: set[str]) -> bool:
    """Whether the document would hold a pair of words that must not meet."""
    partners = held_out_partners()
    everything = present | set(new)
    return any(not partners[word].isdisjoint(everything) for word in new if word in partners)


def _ordinary_words() -> tuple[str, ...]:
    from headtrace.builtin.vocabulary import words

    return words()
