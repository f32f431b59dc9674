"""Descriptions without a language model: the rules that separate a signal's pairs from random ones.

Conditions on tokens, positions and relations (``rules.py``) are combined greedily: the condition that separates best,
then one that makes it stricter, then another rule for what is left. How many there may be is chosen by
cross-validation; if the rules fail on the examples left out, there is no description.

This is the baseline that a language model has to beat: it knows no meaning, only what can be seen in the tokens.

>>> from headtrace.interpret.scored_signals import ScoredSignal
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
from headtrace.interpret.explainers import (
    Description,
    Explainer,
    Judge,
    Labels,
    register_explainer,
    register_judge,
)
from headtrace.interpret.judging import Counts
from headtrace.interpret.rules import RELATIONS, SHAPES, TOKENS, PairCondition, Rule, Rules
from headtrace.interpret.scored_signals import Pair, SignalExamples

LEAST_GAIN = 0.05
"""How much the separation (recall minus false-positive rate) must improve to justify another condition."""
CLOSE = 0.03
"""Shorter rules are chosen if they separate the examples left out at most this much worse."""
ALPHA = 0.01
"""Significance that rules must reach on the examples left out: strict, since several lengths are tried."""
MORE_PER_RANDOM = 8
"""How many further pairs are drawn from the context of each random one."""
LONGEST_LIST = 6
"""How many tokens a condition may list at most."""
LONGEST_RULE = 3
"""How many conditions a rule may have."""
DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(frozen=True)
class Lexical(Explainer):
    """Finds rules that separate a signal's highest pairs from random ones."""

    name: ClassVar[str] = "lexical"

    most: int = 8
    """How many conditions and listed tokens a description may have at most; fewer are used where they suffice."""
    folds: int = 4
    """Folds of the cross-validation."""

    def __post_init__(self) -> None:
        if self.most < 1 or self.folds < 2:
            raise InputError(
                f"most={self.most}, folds={self.folds}: a description has at least one condition, and "
                "cross-validation at least two folds."
            )

    def explain(self, shown: SignalExamples) -> Description | None:
        top, others = shown.top, shown.random
        if min(len(top), len(others)) < self.folds:
            return None
        more = [_more_pairs(pair, top) for pair in others]
        searches: list[RuleSearch] = []
        for fold in range(self.folds):
            kept = [i for i in range(len(others)) if i % self.folds != fold]
            negatives = [pair for i in kept for pair in (others[i], *more[i])]
            searches.append(RuleSearch([p for i, p in enumerate(top) if i % self.folds != fold], negatives))
        # The shortest rules that separate the examples left out almost as well as any.
        tried: list[tuple[int, float, float]] = []
        for limit in [*(limit for limit in (1, 2, 3, 4, 6) if limit < self.most), self.most]:
            rules = [search.rules(limit) for search in searches]
            hits, alarms = (
                [rules[i % self.folds].holds(pair) for i, pair in enumerate(pairs)] for pairs in (top, others)
            )
            further = [rules[i % self.folds].holds(pair) for i, pairs in enumerate(more) for pair in pairs]
            separation = float(np.mean(hits) - np.mean([*alarms, *further]))
            tried.append((limit, separation, Counts.of(hits, alarms).p_value))
        best = max(separation for _, separation, _ in tried)
        limit, _, p_value = next(each for each in tried if each[1] >= best - CLOSE)
        if p_value > ALPHA:
            return None
        rules = RuleSearch(top, [*others, *chain.from_iterable(more)]).rules(limit)
        return Description(str(rules), rules.to_dict()) if rules.either else None


@dataclass(frozen=True)
class LiteralJudge(Judge):
    """Applies the rules of a description literally."""

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


def _more_pairs(pair: Pair, top: Sequence[Pair]) -> list[Pair]:
    """Further random pairs from the context of a random pair.

    With the random pairs alone, what holds for one in twenty pairs could not be told from what never holds.
    """
    own = {each.place for each in top} | {pair.place}
    random = np.random.default_rng((pair.dest, pair.src, *pair.token_ids[:8]))
    # Two different numbers up to n, the lower one and the one before the higher: every causal pair is as likely.
    length = len(pair.token_ids)
    drawn = [sorted(random.choice(length + 1, 2, replace=False).tolist()) for _ in range(MORE_PER_RANDOM)]
    places = sorted({(high - 1, low) for low, high in drawn})
    return [replace(pair, dest=d, src=s) for d, s in places if (pair.text, d, s) not in own]


# -- Searching for rules -----------------------------------------------------------------------------------------


class RuleSearch:
    """Searches greedily for the rules that separate some pairs from others."""

    def __init__(self, top: Sequence[Pair], others: Sequence[Pair]) -> None:
        self.conditions = candidates(top, others)
        pairs = [*top, *others]
        self.table: Bool[np.ndarray, "pair condition"] = np.array(
            [[each.holds(pair) for each in self.conditions] for pair in pairs], dtype=bool
        )
        self.positive: Bool[np.ndarray, " pair"] = np.arange(len(pairs)) < len(top)
        self.costs = np.array([condition.cost for condition in self.conditions])

    def rules(self, limit: int) -> Rules:
        """Rules of at most ``limit`` conditions and listed tokens; none where nothing separates."""
        covered, rules = np.zeros(len(self.positive), dtype=bool), list[Rule]()
        while limit > 0:
            chosen, holds = self._next_rule(covered, limit)
            if not chosen:
                break
            rules.append(Rule(tuple(self.conditions[i] for i in chosen)))
            limit -= rules[-1].cost
            covered = covered | holds
        return Rules(tuple(rules))

    def _next_rule(
        self, covered: Bool[np.ndarray, " pair"], limit: int
    ) -> tuple[list[int], Bool[np.ndarray, " pair"]]:
        """One more rule, condition by condition: each is the one that separates best together with those before."""
        chosen, holds = list[int](), np.ones(len(self.positive), dtype=bool)
        reached = self._separations(covered[:, None])[0]
        while len(chosen) < LONGEST_RULE:
            left = limit - int(self.costs[chosen].sum())
            gains = self._separations((self.table & holds[:, None]) | covered[:, None]) - reached
            gains = np.where(self.costs <= left, gains, -np.inf)
            # Of equally good conditions the shortest, then the first: relations come before listed tokens.
            best = int(np.lexsort((np.arange(len(gains)), self.costs, -gains.round(9)))[0])
            if gains[best] < LEAST_GAIN:
                break
            chosen.append(best)
            holds, reached = holds & self.table[:, best], reached + gains[best]
        return chosen, holds

    def _separations(self, labels: Bool[np.ndarray, "pair column"]) -> Any:
        """Recall minus false-positive rate, per column of labels."""
        return labels[self.positive].mean(axis=0) - labels[~self.positive].mean(axis=0)


def candidates(top: Sequence[Pair], others: Sequence[Pair]) -> list[PairCondition]:
    """Conditions that may separate these pairs: relations, distances, shapes, then lists of tokens.

    The lists have the tokens most over-represented in ``top`` at a position: the first, the first two, and so on.
    """
    found = [PairCondition(name) for name in RELATIONS]
    found += [PairCondition("distance", low=n, high=n) for n in DISTANCES[:6]]
    found += [PairCondition("distance", high=n) for n in DISTANCES[1:]]
    found += [PairCondition("distance", low=n) for n in DISTANCES]
    found += [PairCondition(f"{side}_{shape}") for side in ("source", "destination") for shape in SHAPES]
    for feature, (position_of, _) in TOKENS.items():
        here, there = (
            Counter(pair.token_ids[at] for pair in pairs if (at := position_of(pair)) >= 0)
            for pairs in (top, others)
        )
        names = {pair.token_ids[at]: pair.tokens[at] for pair in top if (at := position_of(pair)) >= 0}
        excess = {
            token: n / len(top) - there[token] / max(1, len(others)) for token, n in here.items() if n > 1
        }
        ids = sorted(
            (token for token in excess if excess[token] > 0), key=lambda token: (-excess[token], token)
        )
        found += [
            PairCondition(feature, tuple(ids[:n]), tuple(names[token] for token in ids[:n]))
            for n in range(1, min(len(ids), LONGEST_LIST) + 1)
        ]
    return found
