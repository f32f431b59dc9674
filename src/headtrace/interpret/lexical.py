"""Signals in words without a language model: the rules that tell a signal's pairs from random ones.

Conditions on tokens, positions and relations (``rules.py``) are put together greedily: the condition that separates
best, then one that makes it stricter, then another rule for what is left. How many there may be is chosen by leaving
out a part of the examples in turn; if the rules then say nothing about what was left out, there are no words.

It is the baseline that a language model has to beat: it knows no meaning, only what can be seen in the tokens.

>>> from headtrace.interpret.examples import ScoredSignal
>>> def pair(src, dest):
...     ids = (3, 5, 9, 7, 5, 8, 9, 6, 3, 4)
...     return Pair("", dest, src, 1.0, ids, tuple(f" t{i}" for i in ids))
>>> signal = ScoredSignal("L0H0:0", 0, 0, "channel", (0,))
>>> top = tuple(pair(i, i + 1) for i in range(9))
>>> others = tuple(pair(i, j) for i in range(5) for j in (i + 2, i + 4))
>>> print(Lexical().explain(SignalExamples(signal, top, others)).text)
The source is the token just before the destination.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool

from headtrace.errors import InputError
from headtrace.interpret.examples import Pair, SignalExamples
from headtrace.interpret.protocols import (
    Description,
    Explainer,
    Judge,
    Labels,
    register_explainer,
    register_judge,
)
from headtrace.interpret.rules import RELATIONS, SHAPES, TOKENS, Condition, Rule, Rules
from headtrace.interpret.statistics import Counts

Truth = Bool[np.ndarray, " pair"]
Table = Bool[np.ndarray, "pair condition"]

LEAST_GAIN = 0.05
"""How much better (recall minus false alarms) the rules must get for another condition to be worth its words."""
CLOSE = 0.03
"""Fewer words are chosen if they are worse by no more than this on examples left out."""
SURE = 0.01
"""Rules are told only if chance does as well on examples left out less often than this: several were tried."""
AROUND = 8
"""How many more pairs are looked at in the text of each random one."""
LONGEST_LIST = 6
"""How many tokens a condition may list at most."""
LONGEST_RULE = 3
"""How many conditions may hold together."""
DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(frozen=True)
class Lexical(Explainer):
    """Finds the rules that separate a signal's highest pairs from random ones."""

    name: ClassVar[str] = "lexical"

    most: int = 8
    """How many conditions and listed tokens a description may have at most; fewer are chosen where they do."""
    folds: int = 4
    """In how many parts the examples are left out in turn."""

    def __post_init__(self) -> None:
        if self.most < 1 or self.folds < 2:
            raise InputError(
                f"most={self.most}, folds={self.folds}: a description has at least one condition, and examples are "
                "left out in at least two parts."
            )

    def explain(self, shown: SignalExamples) -> Description | None:
        top, others = shown.top, shown.random
        if min(len(top), len(others)) < self.folds:
            return None
        around = [_around(pair, top) for pair in others]
        limits = [limit for limit in (1, 2, 3, 4, 6) if limit < self.most] + [self.most]
        limit = self._chosen(top, others, around, limits)
        if limit is None:
            return None
        rules = Search(top, [*others, *chain.from_iterable(around)]).rules(limit)
        return Description(str(rules), rules.to_dict()) if rules.either else None

    def _chosen(
        self,
        top: Sequence[Pair],
        others: Sequence[Pair],
        around: Sequence[Sequence[Pair]],
        limits: Sequence[int],
    ) -> int | None:
        """The fewest words that do almost as well as any on examples left out; None if none says anything there."""
        searches = [self._without(fold, top, others, around) for fold in range(self.folds)]
        best, found = -1.0, list[tuple[int, float, float]]()
        for limit in limits:
            rules = [search.rules(limit) for search in searches]
            labels = [self._labels(rules, group) for group in (top, others)]
            wide = [
                label for k, each in enumerate(around) for label in map(rules[k % self.folds].holds, each)
            ]
            separation = float(np.mean(labels[0]) - np.mean([*labels[1], *wide]))
            found.append((limit, separation, Counts.of(*labels).p_value))
            best = max(best, separation)
        limit, _, p_value = next(each for each in found if each[1] >= best - CLOSE)
        return limit if p_value <= SURE else None

    def _without(
        self, fold: int, top: Sequence[Pair], others: Sequence[Pair], around: Sequence[Sequence[Pair]]
    ) -> Search:
        """A search that does not see a part of the examples."""
        kept = [i for i in range(max(len(top), len(others))) if i % self.folds != fold]
        negatives = [pair for i in kept if i < len(others) for pair in (others[i], *around[i])]
        return Search([top[i] for i in kept if i < len(top)], negatives)

    def _labels(self, rules: Sequence[Rules], pairs: Sequence[Pair]) -> list[bool]:
        """Each pair by the rules that were found without it."""
        return [rules[place % self.folds].holds(pair) for place, pair in enumerate(pairs)]


@dataclass(frozen=True)
class LiteralJudge(Judge):
    """Applies rules to the letter."""

    name: ClassVar[str] = "lexical"
    needs_rules: ClassVar[bool] = True

    def judge(self, description: Description, pairs: Sequence[Pair]) -> Labels:
        if description.structure is None:
            raise InputError(
                f"The judge 'lexical' applies rules, and this description has none: {description.text!r}. Choose a "
                "judge that reads (--judge openai), or an explainer that states rules (lexical, vocabulary)."
            )
        rules = Rules.from_dict(description.structure)
        return tuple(rules.holds(pair) for pair in pairs)


register_explainer(Lexical.name, Lexical)
register_judge(LiteralJudge.name, LiteralJudge)


# -- finding rules -------------------------------------------------------------------------------------------


class Search:
    """Looks for the rules that tell some pairs from others."""

    def __init__(self, top: Sequence[Pair], others: Sequence[Pair]) -> None:
        self.conditions = candidates(top, others)
        pairs = [*top, *others]
        self.table: Table = np.array(
            [[each.holds(pair) for each in self.conditions] for pair in pairs], dtype=bool
        )
        self.positive: Truth = np.arange(len(pairs)) < len(top)
        self.costs = np.array([condition.cost for condition in self.conditions])

    def rules(self, limit: int) -> Rules:
        """Greedy rules of at most ``limit`` conditions and listed tokens; none where nothing separates."""
        covered, rules = np.zeros(len(self.positive), dtype=bool), list[Rule]()
        while limit > 0:
            chosen, grown = _grow(self.table, self.costs, self.positive, covered, limit)
            if not chosen:
                break
            rules.append(Rule(tuple(self.conditions[i] for i in chosen)))
            limit -= rules[-1].cost
            covered = covered | grown
        return Rules(tuple(rules))


def _around(pair: Pair, top: Sequence[Pair]) -> list[Pair]:
    """Some more pairs of a random pair's text, at random: as good as random ones, and there are more of them.

    With only the random pairs themselves, what holds for one in twenty of them could not be told from what never does.
    """
    own = {(each.text, each.dest, each.src) for each in top}
    random = np.random.default_rng((pair.dest, pair.src, *pair.token_ids[:8]))
    # Two different numbers up to n, the lower one and the one before the higher: every causal pair alike.
    drawn = [sorted(random.choice(len(pair.token_ids) + 1, 2, replace=False).tolist()) for _ in range(AROUND)]
    places = {(high - 1, low) for low, high in drawn}
    return [
        replace(pair, dest=dest, src=src)
        for dest, src in sorted(places)
        if (pair.text, dest, src) not in own and (dest, src) != (pair.dest, pair.src)
    ]


def _grow(table: Table, costs: Any, positive: Truth, covered: Truth, limit: int) -> tuple[list[int], Truth]:
    """One rule more: condition by condition, each the one that separates best together with what is there."""
    chosen, mask = list[int](), np.ones(len(positive), dtype=bool)
    reached = _separations(covered[:, None], positive)[0]
    while len(chosen) < LONGEST_RULE:
        left = limit - int(costs[chosen].sum())
        gains = _separations((table & mask[:, None]) | covered[:, None], positive) - reached
        gains = np.where(costs <= left, gains, -np.inf)
        # Of equally good ones the shortest, then the first: relations come before listed tokens.
        best = int(np.lexsort((np.arange(len(costs)), costs, -gains.round(9)))[0])
        if gains[best] < LEAST_GAIN:
            break
        chosen.append(best)
        mask, reached = mask & table[:, best], reached + gains[best]
    return chosen, mask


def _separations(labels: Table, positive: Truth) -> Any:
    """Recall minus false alarms, per column of labels."""
    return labels[positive].mean(axis=0) - labels[~positive].mean(axis=0)


def candidates(top: Sequence[Pair], others: Sequence[Pair]) -> list[Condition]:
    """Conditions that may tell these apart: relations, distances, shapes, then tokens that stand out."""
    found = [Condition(name) for name in RELATIONS]
    found += [Condition("distance", low=n, high=n) for n in DISTANCES[:6]]
    found += [Condition("distance", high=n) for n in DISTANCES[1:]]
    found += [Condition("distance", low=n) for n in DISTANCES]
    found += [Condition(f"{side}_{shape}") for side in ("source", "destination") for shape in SHAPES]
    for place in TOKENS:
        found += _token_lists(place, top, others)
    return found


def _token_lists(place: str, top: Sequence[Pair], others: Sequence[Pair]) -> list[Condition]:
    """Lists of the tokens that stand out most at a place: the first, the first two, and so on."""
    here, there = _tokens_at(place, top), _tokens_at(place, others)
    names = {pair.token_ids[at]: pair.tokens[at] for pair in top if (at := TOKENS[place][0](pair)) >= 0}
    excess = {token: n / len(top) - there[token] / max(1, len(others)) for token, n in here.items() if n > 1}
    ids = sorted((token for token in excess if excess[token] > 0), key=lambda token: (-excess[token], token))
    return [
        Condition(place, tuple(ids[:n]), tuple(names[token] for token in ids[:n]))
        for n in range(1, min(len(ids), LONGEST_LIST) + 1)
    ]


def _tokens_at(place: str, pairs: Sequence[Pair]) -> Counter[int]:
    places = [(pair, TOKENS[place][0](pair)) for pair in pairs]
    return Counter(pair.token_ids[at] for pair, at in places if at >= 0)
