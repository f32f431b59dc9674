"""What the compiled programs compute, in plain Python, and prompts for them.

>>> OUTPUT["induction"](list("abcab"))
'c'
>>> OUTPUT["pair balance"](list("aab"))
0.3333333333333333
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.truth.compiled import ABOUT

BOS = "BOS"
SHORTEST, LONGEST = 4, 7


def _most_common(values: Sequence[Any]) -> Any:
    """What a head that averages says first; None where nothing is first."""
    first = Counter(values).most_common(2)
    return None if not first or (len(first) == 2 and first[0][1] == first[1][1]) else first[0][0]


def _induction(t: list[Any]) -> Any:
    return _most_common([t[k] for k in range(1, len(t)) if t[k - 1] == t[-1]])


def _sort(t: list[Any]) -> Any:
    ranks = [sum(earlier < token for earlier in t[:k]) for k, token in enumerate(t)]
    return _most_common([token for token, rank in zip(t, ranks, strict=True) if rank == len(t) - 3])


def _token_at_count(t: list[Any]) -> Any:
    count = t.count(t[-1])
    return t[count] if count < len(t) else None


def _after_pair(t: list[Any]) -> Any:
    return _most_common([t[k] for k in range(2, len(t)) if t[k - 2 : k] == t[-2:]])


def _times_behind(t: list[Any]) -> int:
    return sum(t[: k + 1].count("b") > t[: k + 1].count("a") for k in range(len(t)))


OUTPUT: dict[str, Callable[[list[Any]], Any]] = {
    "previous token": lambda t: t[-2],
    "shift by two": lambda t: t[-3],
    "induction": _induction,
    "fraction of previous": lambda t: t.count("a") / len(t),
    "pair balance": lambda t: (t.count("a") - t.count("b")) / len(t),
    "histogram": lambda t: t.count(t[-1]),
    "duplicate": lambda t: t.count(t[-1]) > 1,
    "token at count": _token_at_count,
    "sort": _sort,
    "detect abc": lambda t: t[-3:] == ["a", "b", "c"],
    "equal two before": lambda t: t[-1] == t[-3],
    "after pair": _after_pair,
    "from length": lambda t: t[1],
    "times behind": _times_behind,
    "count of previous": lambda t: t.count(t[-2]),
    "token at half": lambda t: t[(len(t) - 1) // 2],
    "ahead": lambda t: t.count("a") > t.count("b"),
}
"""The output at the last of these tokens; None where the program leaves it open."""


class Question(NamedTuple):
    """A prompt, and the outputs whose logits are compared: a number is the logit of output 0, and output 1 is zero."""

    ids: list[int]
    answer: int
    wrong: int
    expected: Any


def questions(program: str, n: int, seed: int = 0) -> list[Question]:
    """Random prompts whose answer is not open (nor zero); yes and no in turn."""
    random, found = Random(f"{program} {seed}"), list[Question]()
    tokens, outputs = ABOUT[program]["tokens"], ABOUT[program]["outputs"]
    vocabulary = [token for token in tokens if token not in (BOS, "compiler_pad")]
    while len(found) < n:
        prompt = random.choices(vocabulary, k=random.randint(SHORTEST, LONGEST))
        expected = OUTPUT[program](prompt)
        ids = [tokens.index(token) for token in (BOS, *prompt)]
        if expected is None or (outputs is None and expected == 0):
            continue
        if outputs == [False, True] and expected != len(found) % 2:
            continue
        if outputs is None:
            answer, wrong = (0, 1) if expected > 0 else (1, 0)
        else:
            answer = outputs.index(expected)
            wrong = random.choice([other for other in range(len(outputs)) if other != answer])
        found.append(Question(ids, answer, wrong, expected))
    return found
