"""Steps in words: what one gathers from several tokens, its heads, and the sentence of a mechanism.

The sentence claims what the measurement bears out: first what steps do, one sentence for each token that they write at;
then what works against the answer; last, as such, steps whose removal is no evidence for them. The number behind a step
is what it brings straight into the answer, as in the ledger, or what it carries to it through later heads.

>>> john = Step(1, "finds", "the second *John* finds the first", 1.2, 0.0, heads=(StepHead("L8H1", 8, 1, 9, 3, 1.2),))
>>> copy = Step(2, "copies", "*to* copies *Mary*", 3.0, 2.5, heads=(StepHead("L9H0", 9, 0, 13, 1, 3.0),))
>>> " ".join(clause.text for clause in make_clauses((john, copy), (), "*Mary*"))
'The second *John* finds the first (L8H1; carrying +1.20). *to* copies *Mary* (L9H0; +2.50).'
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from headtrace.mechanism.parts import Clause, Step, StepHead
from headtrace.mechanism.rules import LOOKING, MLPS, RULES, Facts, token_phrase

SUBJECT = re.compile(r"(the \w+ )?\*[^*]+\* ")
VERBS = ("looks at ", "looks away from ", "finds ")
"""Verbs that are said once for all tokens of one step."""
MOST_SOURCES = 3
"""Of tokens that one step looks at, so many are named, those with most flow."""
NAMED_HEADS = 3
"""Of a step with more heads, the sentence names the first."""


def heads_phrase(step: Step, most: int = NAMED_HEADS) -> str:
    """The heads of a step: ``L8H1, L8H0``, or ``6 heads, led by L23H0``.

    >>> heads_phrase(Step(1, "finds", "", 1.0, 0.0, heads=(StepHead("L8H1", 8, 1, 9, 3, 1.0),)))
    'L8H1'
    """
    names = list(dict.fromkeys(head.name for head in step.heads))
    if step.role == MLPS:
        if step.layers is None:
            return "all MLPs"
        first, last = step.layers
        return f"MLP {first}" if first == last else f"MLPs {first} to {last}"
    return ", ".join(names) if len(names) <= most else f"{len(names)} heads, led by {names[0]}"


def looking_text(tokens: Sequence[str], heads: Sequence[StepHead]) -> str:
    """What heads that write at one token look at, the tokens with most flow first: one clause.

    >>> heads = [StepHead(f"L1H{src}", 1, src, 3, src, 3.0 - src) for src in (0, 1)]
    >>> looking_text((" John", " went", ",", " John", " told"), heads)
    'the second *John* finds the first, and looks at *went* (after the first *John*)'
    >>> looking_text((" a", " b", " c", " d"), heads)
    '*d* looks at the first token, and looks at *b*'
    >>> looking_text((" a", " b", " c", " d", " e"), [StepHead("L1H0", 1, 0, 4, src, 1.0) for src in (1, 2)])
    '*e* looks at *b* and *c*'
    >>> looking_text((" a", " b", " a", " c", " a"), [StepHead("L1H0", 1, 0, 4, src, 1.0) for src in (0, 2)])
    'the last *a* finds the first and the second'
    """
    sources: dict[int, list[StepHead]] = defaultdict(list)
    for head in heads:
        sources[head.src].append(head)
    ranked = sorted(sources.values(), key=lambda some: (-sum(abs(head.flow) for head in some), some[0].src))
    clauses = [_looking_clause(tuple(tokens), some) for some in ranked[:MOST_SOURCES]]
    match = SUBJECT.match(clauses[0])
    subject = "" if match is None else match.group()
    if len(clauses) == 1:
        return clauses[0]
    objects: dict[str, list[str]] = {}  # by verb; what has no object is a verb of its own
    for said in (
        clause.removeprefix(subject).replace(", the token after ", " (after ") for clause in clauses
    ):
        said += ")" if " (after " in said else ""
        verb = next((verb for verb in VERBS if said.startswith(verb) and "first token" not in said), said)
        objects.setdefault(verb, []).append(said.removeprefix(verb))
    parts = [
        verb + (_listed(those, clauses=False) if verb in VERBS else "") for verb, those in objects.items()
    ]
    return subject + _listed([*parts, *(["more"] if len(ranked) > MOST_SOURCES else [])])


def _looking_clause(tokens: tuple[str, ...], heads: Sequence[StepHead]) -> str:
    """What heads do that look at one token, by the first rule for such heads that holds."""
    head = max(heads, key=lambda head: abs(head.flow))
    facts = Facts(
        tokens, head.dest, head.src, 1.0, 1.0, attention=head.attention, other_attention=head.other_attention
    )
    rules = sorted((RULES[name] for name in LOOKING), key=lambda rule: rule.order)
    return next(rule for rule in rules if rule.holds(facts)).words(facts)


def _listed(parts: Sequence[str], clauses: bool = True) -> str:
    """Parts as a list: ``a``, ``a and b``, ``a, b, and c``. Two clauses have a comma between them, too.

    >>> _listed(["*a*", "*b*"], clauses=False), _listed(["looks at *a*", "finds the first"])
    ('*a* and *b*', 'looks at *a*, and finds the first')
    """
    if len(parts) < 2:
        return "".join(parts)
    comma = "," if clauses or len(parts) > 2 else ""
    return f"{', '.join(parts[:-1])}{comma} and {parts[-1]}"


def make_clauses(steps: Sequence[Step], tokens: Sequence[str], favoured: str) -> tuple[Clause, ...]:
    """The sentence, step by step: what feeds others first, then what works against the answer, last what removing it
    does not bear out. ``favoured`` is what the whole change is for, in words."""
    shown = [step for step in steps if not step.hidden]
    told = [step for step in shown if step.doubt is None]
    clauses: list[Clause] = []
    for _, group in groupby((step for step in told if not works_against(step)), _subject):
        clauses += _one_subject(list(group))
    against = [step for step in told if works_against(step)]
    if against:
        clauses.append(Clause(f"Against {favoured}:"))
        clauses += _punctuated((_opposing(step, tokens), step) for step in against)
    doubted = [step for step in shown if step.doubt is not None]
    if doubted:
        clauses.append(Clause("Not confirmed:"))
        clauses += _punctuated((_doubted(step, tokens, favoured), step) for step in doubted)
    return tuple(clauses)


def works_against(step: Step) -> bool:
    """Whether a step works against what the whole change is for."""
    return step.role == "against" or (step.role == MLPS and "against" in step.text)


def _subject(step: Step) -> str:
    """What a step's clause begins with, where it can share that with its neighbours: the token that is written at."""
    match = None if step.name is not None else SUBJECT.match(step.text)
    return f"step {step.id}" if match is None else match.group()


def _one_subject(steps: Sequence[Step]) -> list[Clause]:
    """One sentence: the subject once, and what each step does there."""
    subject = _subject(steps[0])
    clauses: list[Clause] = []
    for place, step in enumerate(steps):
        does = step.title if place == 0 else step.title.removeprefix(subject)
        text = f"{does} ({_inside(_heads_said(step), _looking_away(step), _number(step))})"
        text = text[:1].upper() + text[1:] if place == 0 else text
        after = {len(steps) - 1: ".", len(steps) - 2: ", and"}.get(place, ",")
        clauses.append(Clause(text + after, step.id))
    return clauses


def _punctuated(parts: Iterable[tuple[str, Step]]) -> list[Clause]:
    """Parts of a list, each with its step, separated by semicolons."""
    found = list(parts)
    return [
        Clause(text + (";" if place + 1 < len(found) else "."), step.id)
        for place, (text, step) in enumerate(found)
    ]


def _opposing(step: Step, tokens: Sequence[str]) -> str:
    """A step that works against the answer: who, where, and how much."""
    if step.name is not None:
        return f"{step.title} ({_inside(heads_phrase(step), _number(step))})"
    return f"{_heads_at(step, tokens)} ({_number(step)})"


def _doubted(step: Step, tokens: Sequence[str], favoured: str) -> str:
    """A step that was traced, and what removing it does instead of bearing it out."""
    if works_against(step) and step.name is None:
        inside = _inside(_number(step), step.doubt_text)
        return f"{_heads_at(step, tokens, f' against {favoured}')} ({inside})"
    inside = _inside(_heads_said(step), _looking_away(step), _number(step), step.doubt_text)
    return f"{step.title} ({inside})"


def _heads_at(step: Step, tokens: Sequence[str], does: str = "") -> str:
    """Heads and where they write: ``L29H0, L24H4 at the last *to*``, ``4 heads against *and* at *to*, led by L9H1``."""
    who, comma, rest = heads_phrase(step).partition(", led by")
    return f"{who or 'the MLPs'}{does} at {token_phrase(tuple(tokens), step.dest or 0)}{comma}{rest}"


def _heads_said(step: Step) -> str:
    """The heads behind a clause; the clause of MLPs says already what they are."""
    return heads_phrase(step).replace("MLPs", "layers").replace("MLP", "layer")


def _number(step: Step) -> str:
    """What a step brings straight into the answer; where that is not what it is for, all that it carries."""
    speaks = step.role not in LOOKING
    if step.role == "against":
        speaks = step.root * step.flow > 0 and abs(step.root) >= abs(step.flow) / 2
    return f"{step.root:+.2f}" if speaks else f"carrying {step.flow:+.2f}"


def _looking_away(step: Step) -> str:
    """Which of the named heads take part by not looking at the token, where the step says that it is looked at."""
    names = list(dict.fromkeys(head.name for head in step.heads))
    if step.name is not None or step.role == "copies" or len(names) > NAMED_HEADS:
        return ""
    if not step.heads or step.heads[0].looks_away:
        return ""
    if step.role in LOOKING and len({head.src for head in step.heads}) > 1:
        return ""  # of several tokens, the clause itself says which is not looked at
    away = list(dict.fromkeys(head.name for head in step.heads if head.looks_away))
    return f"{' and '.join(away)} by looking away" if away else ""


def _inside(*parts: str) -> str:
    """What stands in brackets behind a step."""
    return "; ".join(filter(None, parts))
