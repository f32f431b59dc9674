"""Descriptions without a language model: relations, or else tokens, that tell a signal's pairs from random ones.

Relations (`headtrace.interpret.relations`) and distances come first: one, two joined by "and", or one of two. Rules
with lists of tokens are only named if they separate examples that were left out clearly better than the best relation
(``MARGIN``). How many conditions there may be is chosen in the same cross-validation; if the rules fail there, there is
no description.

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
from copy import copy
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar, NamedTuple

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
from headtrace.interpret.relations import RELATIONS, PairView
from headtrace.interpret.rules import TOKENS, PairCondition, Rule, Rules
from headtrace.interpret.scored_signals import Pair, SignalExamples

LEAST_GAIN = 0.05
"""How much the separation (recall minus false-positive rate) must improve to justify another condition."""
CLOSE = 0.03
"""Shorter rules are chosen if they separate the examples left out at most this much worse."""
ALPHA = 0.01
"""Significance that rules must reach on the examples left out: strict, since several lengths are tried."""
MORE_PER_RANDOM = 8
"""How many further pairs are drawn from the context of each random one."""
MARGIN = 0.1
"""How much better than relations a list of tokens must separate the examples left out."""
MOST_RELATIONS = 2
"""How many relations a description may combine if it lists no tokens."""
MOST_BACK = 8
"""The largest distance that is told exactly."""
LONGEST_LIST = 6
"""How many tokens a condition may list at most."""
LONGEST_RULE = 3
"""How many conditions a rule may have."""
DISTANCES = (2, 3, 4, 6, 8, 12, 16, 32, 64)


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
        pairs, folds = list[Pair](top), _folds(top, self.folds)
        for place, pair in enumerate(others):
            near = [pair, *_more_pairs(pair, top)]
            pairs += near
            folds += [place % self.folds] * len(near)
        fold, positive = np.array(folds), np.arange(len(pairs)) < len(top)
        relations = ConditionTable(pairs, relation_conditions())
        related = self._tried(relations, positive, fold, MOST_RELATIONS, lists=False)
        listed = self._tried(relations, positive, fold, self.most, lists=True)
        chosen = listed if listed.separation >= related.separation + MARGIN else related
        if chosen.p_value > ALPHA:
            return None
        lists = chosen is listed
        table = relations.with_lists(positive) if lists else relations
        rules, _ = RuleSearch(table, positive).rules(chosen.limit)
        return Description(str(rules), rules.to_dict()) if rules.either else None

    def _tried(
        self,
        relations: ConditionTable,
        positive: Bool[np.ndarray, " pair"],
        fold: Any,
        most: int,
        *,
        lists: bool,
    ) -> Tried:
        """The shortest rules that separate the examples left out almost as well as any."""
        searches: list[tuple[Any, ConditionTable, RuleSearch]] = []
        for number in range(self.folds):
            kept = fold != number
            table = relations.with_lists(positive & kept, kept) if lists else relations
            searches.append((kept, table, RuleSearch(table, positive, kept)))
        found: list[Tried] = []
        for limit in [*(limit for limit in (1, 2, 3, 4, 6) if limit < most), most]:
            holds = np.zeros(len(positive), dtype=bool)
            for kept, table, search in searches:
                holds[~kept] = _hold(table.holds, search.rules(limit)[1])[~kept]
            separation = float(holds[positive].mean() - holds[~positive].mean())
            counts = Counts.of(holds[positive].tolist(), holds[~positive].tolist())
            found.append(Tried(limit, separation, counts.p_value))
        best = max(each.separation for each in found)
        return next(each for each in found if each.separation >= best - CLOSE)


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
        return tuple(rules.holds(pairs).tolist()) if pairs else ()


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


def _folds(pairs: Sequence[Pair], folds: int) -> list[int]:
    """A fold for each pair; pairs of one text are in one fold."""
    texts = {text: number % folds for number, text in enumerate(dict.fromkeys(pair.text for pair in pairs))}
    return (
        [texts[pair.text] for pair in pairs]
        if len(texts) >= folds
        else [i % folds for i in range(len(pairs))]
    )


# -- Searching for rules -----------------------------------------------------------------------------------------


class Tried(NamedTuple):
    """How well rules of a length separate examples that were left out."""

    limit: int
    separation: float
    """Recall minus false-positive rate."""
    p_value: float


class ConditionTable:
    """Which conditions are true of which pairs."""

    def __init__(self, pairs: Sequence[Pair], conditions: Sequence[PairCondition]) -> None:
        self.pairs, self.view = pairs, PairView(pairs)
        self.conditions = list(conditions)
        self.holds: Bool[np.ndarray, "pair condition"] = self._table(conditions)

    def _table(self, conditions: Sequence[PairCondition]) -> Bool[np.ndarray, "pair condition"]:
        empty = np.zeros((0, len(self.pairs)), dtype=bool)
        return (
            np.array([each.holds(self.view) for each in conditions] or empty, dtype=bool)
            .reshape(-1, len(self.pairs))
            .T
        )

    def with_lists(
        self, positive: Bool[np.ndarray, " pair"], kept: Bool[np.ndarray, " pair"] | None = None
    ) -> ConditionTable:
        """The same with the lists of tokens that may separate ``positive`` from the rest of ``kept``."""
        others = ~positive if kept is None else kept & ~positive
        found = copy(self)
        lists = token_lists(self.pairs, self.view, positive, others)
        found.conditions = [*self.conditions, *lists]
        found.holds = np.concatenate([self.holds, self._table(lists)], axis=1)
        return found


class RuleSearch:
    """Searches greedily for the rules that separate positive pairs from others, among those that are kept."""

    def __init__(
        self,
        table: ConditionTable,
        positive: Bool[np.ndarray, " pair"],
        kept: Bool[np.ndarray, " pair"] | None = None,
    ) -> None:
        self.conditions = table.conditions
        self.table = table.holds if kept is None else table.holds[kept]
        self.positive = positive if kept is None else positive[kept]
        self.costs = np.array([condition.cost for condition in self.conditions])

    def rules(self, limit: int) -> tuple[Rules, list[list[int]]]:
        """Rules of at most ``limit`` conditions and listed tokens, also as columns; none where nothing separates."""
        covered, columns = np.zeros(len(self.positive), dtype=bool), list[list[int]]()
        while limit > 0:
            chosen, holds = self._next_rule(covered, limit)
            if not chosen:
                break
            columns.append(chosen)
            limit -= int(self.costs[chosen].sum())
            covered = covered | holds
        return Rules(tuple(Rule(tuple(self.conditions[i] for i in rule)) for rule in columns)), columns

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


def _hold(table: Bool[np.ndarray, "pair condition"], rules: list[list[int]]) -> Bool[np.ndarray, " pair"]:
    """Whether one of some rules, each a list of columns, is true of a pair."""
    return np.any([np.zeros(len(table), dtype=bool), *(table[:, rule].all(axis=1) for rule in rules)], axis=0)


def relation_conditions() -> list[PairCondition]:
    """All relations, and distances: so many back, at most, at least."""
    back = [PairCondition("distance", low=n, high=n) for n in range(1, MOST_BACK + 1)]
    found = [PairCondition("same_place"), *back]
    found += [PairCondition(name) for name in RELATIONS if name != "same_place"]
    found += [PairCondition("distance", high=n) for n in DISTANCES]
    return found + [PairCondition("distance", low=n) for n in DISTANCES]


def token_lists(
    pairs: Sequence[Pair], view: PairView, top: Bool[np.ndarray, " pair"], others: Bool[np.ndarray, " pair"]
) -> list[PairCondition]:
    """Lists of the tokens most over-represented in ``top`` at a position: the first, the first two, and so on."""
    found = list[PairCondition]()
    labels = {
        pair.token_ids[at]: pair.tokens[at]
        for pair in compress(pairs, top)
        for at in (pair.src, pair.dest, max(0, pair.src - 1), max(0, pair.dest - 1))
    }
    for feature, (side, what, _) in TOKENS.items():
        ids = view.at(side, what)
        here, there = Counter(ids[top].tolist()), Counter(ids[others].tolist())
        excess = {
            token: n / top.sum() - there[token] / max(1, others.sum())
            for token, n in here.items()
            if n > 1 and token >= 0
        }
        ranked = sorted(
            (token for token in excess if excess[token] > 0), key=lambda token: (-excess[token], token)
        )
        found += [
            PairCondition(feature, tuple(ranked[:n]), tuple(labels[token] for token in ranked[:n]))
            for n in range(1, min(len(ranked), LONGEST_LIST) + 1)
        ]
    return found
