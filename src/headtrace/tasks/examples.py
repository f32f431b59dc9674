"""What a task is made of: examples with known roles, and an account of everything that was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Example:
    """One prompt with a known answer.

    >>> import headtrace
    >>> from headtrace.tasks import load_task
    >>> example = load_task("ioi", headtrace.load("builtin").tokenizer)[0]
    >>> print(example.text, "|", example.answer, "|", example.wrong)
    When Heather and Anna went to the school, Anna gave a picture to |  Heather |  Anna
    >>> example.roles
    {'IO': 2, 'S1': 4, 'S2': 10, 'end': 14}
    """

    id: str
    """Names the fill-in; the same in every variant of a task, so a control pairs up with its original."""
    text: str
    answer: str
    """The right continuation, with its leading space if it has one (the first one, if several are right)."""
    wrong: str
    """The continuation to beat."""
    roles: Mapping[str, int]
    """Token positions; ``end`` is the last one, from which the answer is read."""
    labels: Mapping[str, str]
    """What the example can be grouped by: form, order, relation..."""
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    wrong_ids: tuple[int, ...]


@dataclass(frozen=True)
class Exclusion:
    """One thing that is not in the set, and why."""

    item: str
    reason: str


@dataclass(frozen=True)
class TaskSet:
    """The examples of a task for one tokenizer. Iterates over its examples."""

    task: str
    examples: tuple[Example, ...]
    excluded: tuple[Exclusion, ...] = ()
    variant: str = "standard"
    seed: int | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def spread(self, n: int) -> TaskSet:
        """About this many examples, taken evenly from the whole set; all, if there are fewer.

        >>> import headtrace
        >>> from headtrace.tasks import load_task
        >>> some = load_task("ioi", headtrace.load("builtin").tokenizer).spread(30)
        >>> len(some), len(some.counts("form", "order"))
        (30, 30)
        """
        step = max(1, len(self.examples) // n)
        return replace(self, examples=self.examples[::step][:n])

    def evenly(self, n: int) -> TaskSet:
        """This many examples, one from each cell in turn (all, if there are fewer), in their order in the set.

        >>> import headtrace
        >>> from headtrace.tasks import load_task
        >>> some = load_task("ioi", headtrace.load("builtin").tokenizer, n=40)
        >>> len(some), sorted(set(some.counts("form", "order").values()))
        (40, [1, 2])
        """
        if n >= len(self.examples):
            return self
        step = len(self.examples) / n
        return replace(self, examples=tuple(self.examples[int(i * step)] for i in range(n)))

    def where(self, **labels: str) -> TaskSet:
        """The examples with these labels, e.g. ``task_set.where(order="ABBA")``."""
        kept = tuple(
            example
            for example in self.examples
            if all(example.labels.get(key) == value for key, value in labels.items())
        )
        return replace(self, examples=kept)

    def counts(self, *labels: str) -> dict[tuple[str, ...], int]:
        """How many examples there are for each combination of these labels."""
        return dict(
            Counter(tuple(example.labels.get(key, "") for key in labels) for example in self.examples)
        )

    def excluded_counts(self) -> dict[str, int]:
        """How many things were left out for each reason, most frequent first."""
        return dict(Counter(exclusion.reason for exclusion in self.excluded).most_common())
