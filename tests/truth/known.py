"""Six models with known circuits, prompts for them, and the edges that are in them.

The tokens of every vocabulary begin with a first token, 0, where a head rests that has nothing to look for, and an end
token, 1, at which the answer is asked for. Words are what comes after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch

import headtrace
from headtrace.vocabulary import ROOT, Site
from tests.truth.blueprint import ANSWER, MLP, Blueprint, Features, Head, Rows, as_gpt2, as_llama
from tests.truth.scoring import TrueEdge, embedding, head, mlp, position

FIRST, END = 0, 1
VOCABULARY = 12
WORDS = range(2, VOCABULARY)
POSITIONS = 12


@dataclass(frozen=True)
class Case:
    """A prompt, its question, and its whole circuit."""

    ids: tuple[int, ...]
    answer: int
    wrong: int
    truth: tuple[TrueEdge, ...]
    beside: tuple[TrueEdge, ...] = ()
    """What keeps heads from attending elsewhere: read, but not needed for the attention that there is."""

    @property
    def as_prompt(self) -> dict[str, Any]:
        return {"tokens": list(self.ids), "answer": self.answer, "wrong": self.wrong}


@dataclass(frozen=True)
class Known:
    """A model whose circuit is known, and prompts for it."""

    name: str
    shows: str
    plan: Callable[[], Blueprint]
    build: Callable[[Blueprint], Any]
    draw: Callable[[Random], Case]
    head: str
    """The head that attends last; the circuit can be traced from it as well."""

    @property
    def attends_for_the_answer(self) -> bool:
        """Whether a head writes the answer; without one, attention has nothing to begin with."""
        return self.name != "fact"

    @property
    def model(self) -> headtrace.Model:
        return _model(self)

    def __str__(self) -> str:
        return self.name

    def cases(self, n: int, seed: int = 0) -> list[Case]:
        random = Random(f"{self.name} {seed}")
        return [self.draw(random) for _ in range(n)]


@cache
def _model(known: Known) -> headtrace.Model:
    return headtrace.load(known.build(known.plan()))


# -- parts that several models share -------------------------------------------------------------------------


def previous_token(f: Features) -> Head:
    """Attends to the token before, by position, and says which it was."""
    return Head(f["position"][1:], f["position"][:-1], f["token"], f["previous"])


def duplicate_token(f: Features, value: Rows, write: Rows) -> Head:
    """Attends to an earlier occurrence of the same token, never to its own position, else rests on the first token."""
    rest = f.constant / 2
    query = torch.cat((f["token"], -2 * f["position"], rest))
    return Head(query, torch.cat((f["token"], f["position"], f["token"][[FIRST]])), value, write)


def at_the_end(f: Features, looks_for: Rows, value: Rows, write: Rows) -> Head:
    """Attends from the end token to whatever has one feature."""
    return Head(f["token"][[END]], looks_for, value, write)


def off_itself(firing: Site) -> tuple[TrueEdge, ...]:
    """What keeps a duplicate-token head from attending to its own position: positions, on both sides."""
    here, there = position(firing.dest or 0), position(firing.src or 0)
    return TrueEdge(here, firing, "query"), TrueEdge(there, firing, "key")


def blueprint(f: Features, n_layers: int, heads: dict[tuple[int, int], Head], **more: Any) -> Blueprint:
    """A model that says the answer which its heads or MLPs write, with positions if there are features for them."""
    position = f["position"] if "position" in f.slices else None
    parts = {"token": f["token"], "unembed": ANSWER * f["answer"], "position": position}
    return Blueprint(f, n_layers=n_layers, heads=heads, **{**parts, **more})


def either(rows: Rows) -> Rows:
    """What reads 1 where one of some features is on."""
    return rows.sum(dim=0, keepdim=True)


def _prompt(random: Random, n_words: int) -> list[int]:
    return [FIRST, *random.sample(WORDS, n_words), END]


def _other(random: Random, ids: list[int], *than: int) -> int:
    """A word of the prompt that is a plausible wrong answer."""
    return random.choice([word for word in ids if word in WORDS and word not in than])


def layer_0(firing: Site, by: Callable[[int], Site] = embedding) -> tuple[TrueEdge, ...]:
    """What a head depends on that reads nothing but embeddings: those of the two tokens, or of their positions."""
    return (
        TrueEdge(by(firing.dest or 0), firing, "query", 1),
        TrueEdge(by(firing.src or 0), firing, "key", 1),
        TrueEdge(embedding(firing.src or 0), firing, "value"),
    )


# -- induction -----------------------------------------------------------------------------------------------


def _induction() -> Blueprint:
    f = Features(token=VOCABULARY, position=POSITIONS, previous=VOCABULARY, answer=VOCABULARY)
    again = Head(f["token"], f["previous"], f["token"], f["answer"])
    return blueprint(f, 2, {(0, 1): previous_token(f), (1, 0): again})


def _draw_induction(random: Random) -> Case:
    """... A B ... A: what comes next?"""
    ids = [FIRST, *random.sample(WORDS, 8)]
    at = random.randrange(2, len(ids))  # B
    ids.append(ids[at - 1])
    last = len(ids) - 1
    mover, before = head("L1H0", last, at), head("L0H1", at, at - 1)
    truth = (
        TrueEdge(mover, ROOT, "root"),
        TrueEdge(embedding(last), mover, "query", 1),
        TrueEdge(before, mover, "key", 1),
        TrueEdge(embedding(at), mover, "value"),
        *layer_0(before, position),
    )
    return Case(tuple(ids), ids[at], _other(random, ids, ids[at]), truth)


# -- indirect object -----------------------------------------------------------------------------------------

NAMES = range(2, 6)
FILLERS = range(6, VOCABULARY)


def name_features(**more: int) -> Features:
    n = len(NAMES)
    return Features(token=VOCABULARY, position=POSITIONS, repeated=n, inhibited=n, answer=VOCABULARY, **more)


def name_heads(f: Features, query: Rows, key: Rows) -> dict[tuple[int, int], Head]:
    """Heads that find the repeated name and say so at the end, and a mover that attends by this query and key."""
    names, answers = (f[group][NAMES.start : NAMES.stop] for group in ("token", "answer"))
    return {
        (0, 2): duplicate_token(f, names, f["repeated"]),
        (1, 0): at_the_end(f, either(f["repeated"]), f["repeated"], f["inhibited"]),
        (2, 1): Head(query, key, names, answers),
    }


def _indirect_object() -> Blueprint:
    """Four names: the directions "a name, but not this one" are then at right angles to each other."""
    f, n = name_features(), len(NAMES)
    not_this = torch.ones(n, n, dtype=torch.float64) - 2 * torch.eye(n, dtype=torch.float64)
    return blueprint(f, 3, name_heads(f, f["inhibited"], not_this @ f["token"][NAMES.start : NAMES.stop]))


def _draw_indirect_object(random: Random) -> Case:
    """Mary and John went to the store, John gave a drink to: whom?"""
    giver, receiver = random.sample(NAMES, 2)
    words = random.sample(FILLERS, 5)
    pair = random.sample([giver, receiver], 2)
    ids = [FIRST, words[0], pair[0], words[1], pair[1], *words[2:4], giver, words[4], END]
    last, first, second, other = len(ids) - 1, ids.index(giver), 7, ids.index(receiver)
    mover, inhibits = head("L2H1", last, other), head("L1H0", last, second)
    repeats = head("L0H2", second, first)
    truth = (
        TrueEdge(mover, ROOT, "root"),
        TrueEdge(inhibits, mover, "query", 1),
        TrueEdge(embedding(other), mover, "key", 1),
        TrueEdge(embedding(other), mover, "value"),
        TrueEdge(embedding(last), inhibits, "query", 1),
        TrueEdge(repeats, inhibits, "key", 1),
        TrueEdge(repeats, inhibits, "value"),
        *layer_0(repeats),
    )
    return Case(tuple(ids), receiver, giver, truth, off_itself(repeats))


# -- an MLP writes what a head looks for ---------------------------------------------------------------------

MARKER = 2


def _marked() -> Blueprint:
    f = Features(token=VOCABULARY, position=POSITIONS, previous=VOCABULARY, marked=1, answer=VOCABULARY)
    heads = {(1, 0): previous_token(f), (2, 2): at_the_end(f, f["marked"], f["token"], f["answer"])}
    return blueprint(f, 3, heads, mlps={1: MLP(f["previous"][[MARKER]], f["marked"])})


def _draw_marked(random: Random) -> Case:
    """Which word comes after the marker? An MLP makes a flag of what the previous-token head brought."""
    ids = [FIRST, *random.sample(WORDS[1:], 7), END]
    at = random.randrange(2, len(ids) - 1)
    ids.insert(at - 1, MARKER)
    last = len(ids) - 1
    mover, flag, before = head("L2H2", last, at), mlp(1, at), head("L1H0", at, at - 1)
    truth = (
        TrueEdge(mover, ROOT, "root"),
        TrueEdge(embedding(last), mover, "query", 1),
        TrueEdge(flag, mover, "key", 1),
        TrueEdge(embedding(at), mover, "value"),
        TrueEdge(before, flag, "input"),
        *layer_0(before, position),
    )
    return Case(tuple(ids), ids[at], _other(random, ids, ids[at], MARKER), truth)


KINDS = (range(2, 5), range(5, 8), range(8, 11))
QUESTIONS = range(11, 14)
ASIDES = range(14, 20)


def _asked() -> Blueprint:
    f = Features(token=ASIDES.stop, wanted=len(KINDS), answer=ASIDES.stop)
    members = torch.cat([either(f["token"][kind.start : kind.stop]) for kind in KINDS])
    questions = f["token"][QUESTIONS.start : QUESTIONS.stop]
    words = slice(KINDS[0].start, KINDS[-1].stop)
    heads = {(1, 1): Head(f["wanted"], members, f["token"][words], f["answer"][words])}
    mlps = {0: MLP(questions, f["wanted"])}
    return blueprint(f, 2, heads, mlps=mlps)


def _draw_asked(random: Random) -> Case:
    """Which colour was there? A gated MLP makes of the last token what the head looks for."""
    words = [random.choice(kind) for kind in KINDS]
    asked = random.randrange(len(KINDS))
    ids = [FIRST, *random.sample([*words, *random.sample(ASIDES, 5)], 8), QUESTIONS[asked]]
    at, last = ids.index(words[asked]), len(ids) - 1
    mover, want = head("L1H1", last, at), mlp(0, last)
    truth = (
        TrueEdge(mover, ROOT, "root"),
        TrueEdge(want, mover, "query", 1),
        TrueEdge(embedding(at), mover, "key", 1),
        TrueEdge(embedding(at), mover, "value"),
        TrueEdge(embedding(last), want, "input"),
    )
    return Case(tuple(ids), words[asked], words[asked - 1], truth)


# -- content and attention come from different heads ---------------------------------------------------------


def _before_repeat() -> Blueprint:
    f = Features(token=VOCABULARY, position=POSITIONS, previous=VOCABULARY, repeated=1, answer=VOCABULARY)
    word = either(f["token"][WORDS.start :])
    heads = {
        (0, 0): previous_token(f),
        (0, 1): duplicate_token(f, word, f["repeated"]),
        (1, 0): at_the_end(f, f["repeated"], f["previous"], f["answer"]),
    }
    return blueprint(f, 2, heads)


def _draw_before_repeat(random: Random) -> Case:
    """Which word comes before the repeated one? One head marks the place, another has brought the word there."""
    ids = _prompt(random, 8)
    first = random.randrange(1, 5)
    at = random.randrange(first + 3, len(ids))
    ids.insert(at, ids[first])
    last = len(ids) - 1
    mover, place, before = head("L1H0", last, at), head("L0H1", at, first), head("L0H0", at, at - 1)
    truth = (
        TrueEdge(mover, ROOT, "root"),
        TrueEdge(embedding(last), mover, "query", 1),
        TrueEdge(place, mover, "key", 1),
        *layer_0(place),
        TrueEdge(before, mover, "value"),
        *layer_0(before, position),
    )
    return Case(tuple(ids), ids[at - 1], ids[first], truth, off_itself(place))


# -- an MLP makes the answer ---------------------------------------------------------------------------------

SUBJECTS = range(2, 6)
OBJECTS = range(6, 10)


def _fact() -> Blueprint:
    f = Features(token=VOCABULARY, position=POSITIONS, subject=len(SUBJECTS), answer=VOCABULARY)
    subjects = f["token"][SUBJECTS.start : SUBJECTS.stop]
    heads = {(1, 2): at_the_end(f, either(subjects), subjects, f["subject"])}
    return blueprint(f, 2, heads, mlps={1: MLP(f["subject"], f["answer"][OBJECTS.start : OBJECTS.stop])})


def _draw_fact(random: Random) -> Case:
    """What belongs to the subject? A head brings the subject to the end, an MLP knows."""
    number = random.randrange(len(SUBJECTS))
    others = [word for word in WORDS if word not in SUBJECTS and word != OBJECTS[number]]
    ids = [FIRST, *random.sample([SUBJECTS[number], *random.sample(others, 5)], 6), END]
    at, last = ids.index(SUBJECTS[number]), len(ids) - 1
    mover, knows = head("L1H2", last, at), mlp(1, last)
    truth = (
        TrueEdge(knows, ROOT, "root"),
        TrueEdge(mover, knows, "input"),
        TrueEdge(embedding(last), mover, "query", 1),
        TrueEdge(embedding(at), mover, "key", 1),
        TrueEdge(embedding(at), mover, "value"),
    )
    return Case(tuple(ids), OBJECTS[number], OBJECTS[number - 1], truth)


KNOWN: dict[str, Known] = {
    known.name: known
    for known in (
        Known(
            "induction",
            "a previous-token head feeds an induction head's key",
            _induction,
            as_gpt2,
            _draw_induction,
            "L1H0",
        ),
        Known(
            "indirect object",
            "a duplicate-token head feeds an inhibiting head, which feeds a mover's query",
            _indirect_object,
            as_gpt2,
            _draw_indirect_object,
            "L2H1",
        ),
        Known(
            "marked",
            "an MLP that reads a head writes what another head's key is found by",
            _marked,
            as_gpt2,
            _draw_marked,
            "L2H2",
        ),
        Known(
            "asked",
            "a gated MLP that reads the embedding writes what a head's query looks for",
            _asked,
            as_llama,
            _draw_asked,
            "L1H1",
        ),
        Known(
            "before repeat",
            "one head decides the attention, another carries the content",
            _before_repeat,
            as_gpt2,
            _draw_before_repeat,
            "L1H0",
        ),
        Known(
            "fact",
            "a head brings the subject, an MLP makes the answer of it",
            _fact,
            as_gpt2,
            _draw_fact,
            "L1H2",
        ),
    )
}
