"""Models with known circuits of which the methods, by their own definitions, tell only a part.

Each is one of the models of `known.py` with one thing changed.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch

from headtrace.vocabulary import ROOT, Site
from tests.truth.blueprint import MLP, Blueprint, Features, Head, as_gpt2, as_llama
from tests.truth.known import (
    ASIDES,
    END,
    FIRST,
    KINDS,
    KNOWN,
    NAMES,
    QUESTIONS,
    Case,
    Known,
    at_the_end,
    blueprint,
    either,
    layer_0,
    name_features,
    name_heads,
)
from tests.truth.scoring import TrueEdge, embedding, head, mlp


def _two_writers() -> Blueprint:
    """Induction with a second previous-token head; each writes half of the key."""
    plan = KNOWN["induction"].plan()
    half = replace(plan.heads[0, 1], write=plan.heads[0, 1].write / 2)
    return replace(plan, heads={**plan.heads, (0, 1): half, (0, 2): half})


def _draw_two_writers(random: Random) -> Case:
    case = KNOWN["induction"].draw(random)
    others = [edge._replace(source=_second(edge.source), target=_second(edge.target)) for edge in case.truth]
    return replace(case, truth=tuple(dict.fromkeys((*case.truth, *others))))


def _second(site: Site) -> Site:
    return replace(site, head=2) if (site.layer, site.head) == (0, 1) else site


def _two_needs() -> Blueprint:
    """The mover looks for names because it is at the end, and shuns the one that is inhibited: it needs to do both."""
    f = name_features(name=1)
    token, names = f["token"], f["token"][NAMES.start : NAMES.stop]
    token[NAMES.start : NAMES.stop] += f["name"]
    query = torch.cat((f["token"][[END]], -2 * f["inhibited"]))
    return blueprint(f, 3, name_heads(f, query, torch.cat((f["name"], names))), token=token)


def _draw_two_needs(random: Random) -> Case:
    case = KNOWN["indirect object"].draw(random)
    last, mover = len(case.ids) - 1, case.truth[0].source
    return replace(case, truth=(*case.truth, TrueEdge(embedding(last), mover, "query", 1)))


def _gate() -> Blueprint:
    """A head brings the question to the end; it opens gates of an MLP, and what passes through is a constant."""
    f = Features(token=ASIDES.stop, question=len(KINDS), wanted=len(KINDS), answer=ASIDES.stop)
    words = slice(KINDS[0].start, KINDS[-1].stop)
    members = torch.cat([either(f["token"][kind.start : kind.stop]) for kind in KINDS])
    questions = f["token"][QUESTIONS.start : QUESTIONS.stop]
    heads = {
        (0, 0): at_the_end(f, either(questions), questions, f["question"]),
        (1, 1): Head(f["wanted"], members, f["token"][words], f["answer"][words]),
    }
    mlps = {0: MLP(f["question"], f["wanted"], times=f.constant.expand(len(KINDS), -1))}
    return blueprint(f, 2, heads, mlps=mlps)


def _draw_gate(random: Random) -> Case:
    words = [random.choice(kind) for kind in KINDS]
    asked = random.randrange(len(KINDS))
    some = [*words, QUESTIONS[asked], *random.sample(ASIDES, 4)]
    ids = [FIRST, *random.sample(some, len(some)), END]
    at, place, last = ids.index(words[asked]), ids.index(QUESTIONS[asked]), len(ids) - 1
    mover, want, brings = head("L1H1", last, at), mlp(0, last), head("L0H0", last, place)
    truth = (
        TrueEdge(mover, ROOT, "root"),
        TrueEdge(want, mover, "query", 1),
        TrueEdge(embedding(at), mover, "key", 1),
        TrueEdge(embedding(at), mover, "value"),
        TrueEdge(brings, want, "input"),
        *layer_0(brings),
    )
    return Case(tuple(ids), words[asked], words[asked - 1], truth)


TWO_WRITERS = Known(
    "two writers", "two heads write one signal", _two_writers, as_gpt2, _draw_two_writers, "L1H0"
)
TWO_NEEDS = Known("two needs", "a query needs two signals", _two_needs, as_gpt2, _draw_two_needs, "L2H1")
GATE = Known("gate", "what matters opens a gate", _gate, as_llama, _draw_gate, "L1H1")
