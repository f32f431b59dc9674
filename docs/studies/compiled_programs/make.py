"""Compile many small programs with tracr, to ask complete circuits for every edge that their weights have.

    python -m venv /tmp/tracr && /tmp/tracr/bin/pip install tracr-pypi safetensors
    /tmp/tracr/bin/python docs/studies/compiled_programs/make.py build/compiled

The first sixteen carry the names of programs that were tried once before and not kept; the others are new. `measure.py`
asks the questions. A program's outputs are numbers, or tokens of a vocabulary of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tracr.compiler import lib
from tracr.rasp import rasp

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.truth.make_compiled import histogram, induction, shifted, write_programs

EQ, LT, GT, LEQ, GEQ = (getattr(rasp.Comparison, name) for name in ("EQ", "LT", "GT", "LEQ", "GEQ"))
NEQ, TRUE = rasp.Comparison.NEQ, rasp.Comparison.TRUE
tokens, indices = rasp.tokens, rasp.indices


class Compiled(NamedTuple):
    """A program, its tokens, and the longest prompt beside BOS."""

    program: Callable[[], Any]
    vocabulary: tuple[Any, ...]
    longest: int = 7


def width(keys: Any, queries: Any, how: Any) -> Any:
    return rasp.SelectorWidth(rasp.Select(keys, queries, how))


def at(keys: Any, queries: Any, how: Any, values: Any = tokens) -> Any:
    return rasp.Aggregate(rasp.Select(keys, queries, how), values)


def count(token: Any) -> Any:
    """How often a token has occurred so far."""
    return width(tokens, tokens, lambda k, q: k == token)


def fraction_of(test: Callable[[Any], bool], values: Any = tokens) -> Any:
    """The fraction of positions so far whose value passes a test."""
    passes = rasp.numerical(rasp.Map(lambda v: float(test(v)), values))
    return rasp.numerical(rasp.Aggregate(rasp.Select(indices, indices, LEQ), passes, default=0))


def most_frequent() -> Any:
    """Tokens that had occurred most often when they came: those whose count none exceeds."""
    return at(width(histogram(), histogram(), GT), indices, lambda k, q: k == 0)


def after_second() -> Any:
    """The tokens that came after those with a count of two."""
    return at(shifted(histogram()), indices, lambda k, q: k == 2)


def place_of_maximum() -> Any:
    """Places of the numbers that no number before or at them exceeds."""
    return at(width(tokens, tokens, GT), indices, lambda k, q: k == 0, indices)


def two_brackets() -> Any:
    """Whether two kinds of brackets are both balanced."""
    round_ = rasp.SequenceMap(lambda x, y: x == y, count("("), count(")"))
    square = rasp.SequenceMap(lambda x, y: x == y, count("["), count("]"))
    return rasp.SequenceMap(lambda x, y: x and y, round_, square)


def after_last() -> Any:
    """What came after earlier occurrences of the token before this one."""
    return at(shifted(tokens), shifted(tokens), EQ)


def conditional() -> Any:
    """The token before if this one is "a", else this one."""
    return rasp.SequenceMap(lambda x, y: y if x == "a" else x, tokens, shifted(tokens))


def hop_twice() -> Any:
    """Induction, twice in a row: what came after the token that came after this one."""
    return at(shifted(tokens), induction(), EQ)


def fraction_repeated() -> Any:
    """The fraction of positions so far whose token had occurred before."""
    return fraction_of(lambda n: n > 1, histogram())


def choose() -> Any:
    """The token one or two before, by what this token is."""
    one = rasp.SequenceMap(lambda x, y: y if x in "ab" else "-", tokens, shifted(tokens))
    return rasp.SequenceMap(lambda x, y: y if x == "-" else x, one, shifted(tokens, 2))


def window() -> Any:
    """How many of the last three tokens are an "a", as a fraction."""
    is_a = rasp.numerical(rasp.Map(lambda t: float(t == "a"), tokens))
    near = rasp.Select(indices, indices, lambda k, q: q - 3 < k <= q)
    return rasp.numerical(rasp.Aggregate(near, is_a, default=0))


def two_counts() -> Any:
    """The count of this token, with that of the token before."""
    before = rasp.SelectorWidth(rasp.Select(tokens, shifted(tokens), EQ))
    return rasp.SequenceMap(lambda n, m: f"{n} {m}", histogram(), before)


def balanced(pairs: list[str]) -> Callable[[], Any]:
    return lambda: lib.make_shuffle_dyck(pairs)


def joined(*programs: Any) -> Any:
    """Several programs as one output."""
    found = programs[0]
    for other in programs[1:]:
        found = rasp.SequenceMap(lambda x, y: f"{x}{y}", found, other)
    return found


def linear(x: Any, y: Any, a: float, b: float) -> Any:
    return rasp.numerical(rasp.LinearSequenceMap(x, y, a, b))


ABC, ABCD, NUMBERS = tuple("abc"), tuple("abcd"), (0, 1, 2, 3, 4)
PROGRAMS: dict[str, Compiled] = {
    "reverse": Compiled(lambda: lib.make_reverse(tokens), ABCD),
    "most frequent": Compiled(most_frequent, ABCD),
    "parity": Compiled(lambda: rasp.Map(lambda n: n % 2, count("a")), ABC),
    "after second": Compiled(after_second, ABCD),
    "place of maximum": Compiled(place_of_maximum, NUMBERS),
    "two brackets": Compiled(two_brackets, tuple("()[]")),
    "after last": Compiled(after_last, ABCD),
    "window": Compiled(window, ABCD),
    "conditional": Compiled(conditional, ABCD),
    "hop twice": Compiled(hop_twice, ABCD),
    "equal counts": Compiled(lambda: rasp.SequenceMap(lambda x, y: x == y, count("a"), count("b")), ABC),
    "fraction repeated": Compiled(fraction_repeated, ABCD),
    "equal first": Compiled(
        lambda: rasp.SequenceMap(lambda x, y: x == y, tokens, at(indices, indices, lambda k, q: k == 0)), ABCD
    ),
    "distinct": Compiled(
        lambda: width(rasp.Map(lambda n: n == 1, histogram()), tokens, lambda k, q: k), ABCD
    ),
    "choose": Compiled(choose, ABC),
    "two counts": Compiled(two_counts, ABC),
    # New.
    "shift by three": Compiled(lambda: lib.shift_by(3, tokens), tuple("uvwxyz"), 9),
    "shift of next letter": Compiled(
        lambda: shifted(rasp.Map(lambda t: chr(ord("a") + (ord(t) - ord("a") + 1) % 4), tokens)), ABCD
    ),
    "sort unique": Compiled(lambda: lib.make_sort_unique(tokens, tokens), (1, 2, 3, 4, 5, 6), 6),
    "sort with repeats": Compiled(
        lambda: lib.make_sort(tokens, tokens, max_seq_len=5, min_key=1), (1, 2, 3), 5
    ),
    "fraction of two": Compiled(lambda: fraction_of(lambda t: t in "xy"), tuple("wxyz"), 9),
    "one bracket": Compiled(balanced(["()"]), tuple("()"), 6),
    "shuffle dyck": Compiled(balanced(["()", "{}"]), tuple("(){}"), 5),
    "different so far": Compiled(lambda: width(tokens, tokens, NEQ), ABC),
    "smaller so far": Compiled(lambda: width(tokens, tokens, LT), NUMBERS, 6),
    "fraction of large": Compiled(lambda: fraction_of(lambda t: t > 2), (1, 2, 3, 5)),
    "induction of two": Compiled(lambda: at(shifted(tokens, 2), tokens, EQ), ABCD, 9),
    "same count": Compiled(lambda: width(histogram(), histogram(), EQ), ABC, 6),
    "weighted balance": Compiled(
        lambda: linear(fraction_of(lambda t: t == "a"), fraction_of(lambda t: t == "c"), 2, -3), ABC, 8
    ),
    "seen a before b": Compiled(
        lambda: rasp.SequenceMap(lambda t, n: t == "b" and n > 0, tokens, count("a")),
        ABC,
        6,
    ),
    "same or a": Compiled(lambda: width(tokens, tokens, lambda k, q: k in (q, "a")), ABC, 6),
    "first token": Compiled(lambda: at(indices, indices, lambda k, q: k == 0), tuple("pqrst"), 5),
    "even places": Compiled(
        lambda: fraction_of(bool, rasp.SequenceMap(lambda t, i: t == "a" and i % 2 == 0, tokens, indices)),
        ABC,
    ),
    "both before": Compiled(lambda: joined(shifted(tokens), shifted(tokens, 2)), ABC, 6),
    "rare tokens": Compiled(lambda: lib.make_count_less_freq(1), ABC, 6),
    "count modulo": Compiled(lambda: at(indices, rasp.Map(lambda n: n % 3, histogram()), EQ), ABCD, 6),
    "token of rank": Compiled(
        lambda: at(width(tokens, tokens, GT), rasp.Map(lambda n: n - 1, histogram()), EQ), NUMBERS, 6
    ),
    "three hops": Compiled(lambda: at(shifted(tokens), shifted(shifted(tokens)), EQ), ABCD, 8),
    "detect pattern": Compiled(lambda: lib.detect_pattern(tokens, "aba"), tuple("ab"), 6),
    "majority": Compiled(
        lambda: rasp.SequenceMap(
            lambda x, y: "a" if x > y else ("b" if y > x else "="), count("a"), count("b")
        ),
        ABC,
        6,
    ),
    "sum of two": Compiled(
        lambda: rasp.SequenceMap(lambda x, y: x + y, tokens, shifted(tokens)), (1, 2, 3), 6
    ),
    "last letter": Compiled(
        lambda: rasp.Aggregate(
            rasp.Select(
                rasp.SequenceMap(lambda t, i: i if t == "." else -1, tokens, indices),
                indices,
                lambda k, q: k >= 0 and k == q - 1,
            ),
            shifted(tokens),
        ),
        ("x", "y", "."),
        6,
    ),
}


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(PROGRAMS)
    write_programs({name: PROGRAMS[name] for name in chosen}, Path(sys.argv[1]))
