"""Programs that were written after the methods had their present form, to ask them once before anything is changed.

    /tmp/tracr/bin/python docs/studies/compiled_programs/held_out.py build/held_out

What somebody who meets tracr might write first: copies, counts, sorts, brackets, means, comparisons, and mixtures of
numbers and categories.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tracr.compiler import lib
from tracr.rasp import rasp

sys.path.insert(0, str(Path(__file__).parents[3]))
from docs.studies.compiled_programs.make import (
    EQ,
    GEQ,
    GT,
    Compiled,
    at,
    count,
    fraction_of,
    indices,
    linear,
    tokens,
    width,
)

from tests.truth.make_compiled import histogram, shifted, write_programs


def both(x: Any, y: Any, how: Any) -> Any:
    """Two values joined at every position."""
    return rasp.SequenceMap(how, x, y)


def first() -> Any:
    """The first token."""
    return at(indices, indices, lambda k, q: k == 0)


def depth() -> Any:
    """Open brackets that are not closed yet; negative if too many were closed."""
    return both(count("("), count(")"), lambda x, y: x - y)


def never_negative() -> Any:
    """At how many positions so far more brackets were closed than opened."""
    below = rasp.Map(lambda d: d < 0, depth())
    return width(below, below, lambda k, q: k)


def mean_so_far() -> Any:
    """The mean of all numbers so far, less one: tracr averages yes and no alone, so two fractions are added."""
    return linear(fraction_of(lambda t: t >= 2), fraction_of(lambda t: t >= 3), 1, 1)


def mean_of_equal() -> Any:
    """The fraction of this token's occurrences so far that stand at even places, as a number."""
    even = rasp.numerical(rasp.Map(lambda i: float(i % 2 == 0), indices))
    return rasp.numerical(rasp.Aggregate(rasp.Select(tokens, tokens, EQ), even, default=0))


def above_half() -> Any:
    """Whether more than half of the tokens so far are an "a": a category made of a number."""
    return rasp.Map(lambda x: x > 0.5, fraction_of(lambda t: t == "a"))


def first_repeated() -> Any:
    """The first token that came a second time, and those that came a second time later."""
    again = both(histogram(), shifted(histogram()), lambda n, m: n == 2)
    return at(again, indices, lambda k, q: bool(k))


def frequency_order() -> Any:
    """Tokens at places whose count this position's number gives."""
    return at(histogram(), rasp.Map(lambda i: (i + 1) // 2, indices), EQ)


def marked() -> Any:
    """The tokens that came after a mark."""
    return at(shifted(tokens), indices, lambda k, q: k == "!")


def pointer_twice() -> Any:
    """The token at the place that the token at this token's place names."""
    once = at(indices, tokens, EQ)
    return at(indices, once, EQ)


def exclusive() -> Any:
    """Whether exactly one of this token and the one before is an "a"."""
    return both(tokens, shifted(tokens), lambda x, y: (x == "a") != (y == "a"))


def doubles() -> Any:
    """How many tokens so far equal the one before them."""
    double = both(tokens, shifted(tokens), lambda x, y: x == y)
    return width(double, double, lambda k, q: bool(k))


def length_so_far() -> Any:
    return width(tokens, tokens, rasp.Comparison.TRUE)


def mirrored() -> Any:
    """Whether this token equals the one at the mirrored place."""
    place = both(length_so_far(), indices, lambda n, i: n - 1 - i)
    return both(tokens, at(indices, place, EQ), lambda x, y: x == y)


def largest() -> Any:
    """The largest number so far, and others that were the largest when they came."""
    return at(width(tokens, tokens, GT), tokens, lambda k, q: k == 0)


ABC, ABCD, NUMBERS = tuple("abc"), tuple("abcd"), (0, 1, 2, 3, 4)
PROGRAMS: dict[str, Compiled] = {
    "before the one before": Compiled(lambda: shifted(shifted(shifted(tokens))), ABCD),
    "greater so far": Compiled(lambda: width(tokens, tokens, GEQ), NUMBERS),
    "frequency order": Compiled(frequency_order, ABC),
    "first repeated": Compiled(first_repeated, ABC, 6),
    "depth": Compiled(depth, tuple("()"), 7),
    "never negative": Compiled(never_negative, tuple("()x"), 5),
    "mean so far": Compiled(mean_so_far, (1, 2, 3)),
    "mean of equal": Compiled(mean_of_equal, ABCD),
    "above first": Compiled(lambda: both(tokens, first(), lambda x, y: x > y), NUMBERS),
    "above half": Compiled(above_half, ABC),
    "after a mark": Compiled(marked, tuple("ab!")),
    "pointer twice": Compiled(pointer_twice, (0, 1, 2, 3), 6),
    "exclusive or": Compiled(exclusive, ABC),
    "doubles": Compiled(doubles, ABC, 6),
    "mirrored": Compiled(mirrored, ABC, 6),
    "largest": Compiled(largest, NUMBERS, 6),
    "length": Compiled(length_so_far, ABC),
    "share less place": Compiled(
        lambda: linear(
            fraction_of(lambda t: t == "a"), rasp.numerical(rasp.Map(lambda i: i / 8, indices)), 2, -1
        ),
        ABC,
    ),
    "library balance": Compiled(lambda: lib.make_pair_balance(tokens, "(", ")"), tuple("()")),
}


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(PROGRAMS)
    write_programs({name: PROGRAMS[name] for name in chosen}, Path(sys.argv[1]))
