"""What matters in a prompt, measured: exchange each word for others of its shape, and see what the answer does.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> matters = importance(model, "When Mary and John went to the store, John gave a drink to")
>>> matters.question
'"Mary" rather than "John"'
>>> matters.top(1)[0].text
'Mary'
>>> matters.flips[0].flips
True

A word is exchanged for words of the prompt itself, for neighbours in the input embedding and for what the model finds
likely in its place (`headtrace.tracing.prompt_words`). Nothing here is an attribution: every number was seen in a run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError
from headtrace.progress import Progress
from headtrace.tables import chart, frame, paragraph
from headtrace.tracing.measured_replacements import BUDGET, Measured, measure
from headtrace.tracing.prompt_words import Replacement, Word, ask
from headtrace.writing import write_text

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from headtrace.models import Model
    from headtrace.roots import Root
    from headtrace.roots.base import Answer
    from headtrace.vocabulary import Prompt

SCHEMA = "headtrace.importance/1"
SHOWN = 8
"""Words, and flips, that a summary lists."""


@dataclass(frozen=True)
class WordImportance:
    """How much of the metric is lost when one word is exchanged, over its replacements."""

    text: str
    positions: tuple[int, ...]
    kind: str
    """``content``, ``function`` (whose exchange mostly breaks the sentence) or ``punctuation``."""
    mean: float
    """The metric's mean loss: below zero where the word speaks against the answer."""
    low: float
    high: float
    """The smallest and the largest loss."""
    flips: int
    """How many of its replacements flip the answer."""
    changes: tuple[Replacement, ...] = field(repr=False)

    @classmethod
    def of(cls, word: Word, changes: tuple[Replacement, ...]) -> WordImportance:
        """What the changes of one word cost: mean, least and most."""
        lost = [change.effect for change in changes]
        flips = sum(change.flips for change in changes)
        return cls(word.text, word.positions, word.kind, fmean(lost), min(lost), max(lost), flips, changes)


@dataclass(frozen=True)
class Importance:
    """What matters in a prompt for its answer. Made by ``headtrace.importance``."""

    model: str
    text: str | None
    tokens: tuple[str, ...]
    measured: Measured = field(repr=False)
    budget: int
    seed: int

    @property
    def root(self) -> Root:
        """What was measured: a logit difference, or the log-likelihood of an answer of several tokens."""
        return self.measured.asked.root

    @property
    def question(self) -> str:
        """The answer and its rival in words."""
        return self.root.question()

    @property
    def value(self) -> float:
        """The metric on the prompt itself."""
        return self.measured.value

    @property
    def words(self) -> tuple[WordImportance, ...]:
        """All words that were exchanged, in the order of the prompt."""
        found = ((word, self.measured.of(word)) for word in self.measured.words)
        return tuple(WordImportance.of(word, changes) for word, changes in found if changes)

    @property
    def flips(self) -> tuple[Replacement, ...]:
        """The smallest changes that flip the answer, the most natural first."""
        return self.measured.flips

    @property
    def counterfactuals(self) -> tuple[Replacement, ...]:
        """What ``counterfactual="auto"`` compares with: flips, or what comes closest if nothing flips."""
        return self.measured.counterfactuals()

    def top(self, n: int | None = None) -> tuple[WordImportance, ...]:
        """The words that matter most, content words before others, what speaks against the answer last."""
        return tuple(sorted(self.words, key=lambda word: (word.kind != "content", -word.mean)))[:n]

    def by_token(self) -> tuple[float | None, ...]:
        """The mean loss of each token's word; None where nothing was exchanged."""
        return self.measured.by_token(len(self.tokens))

    def frame(self, of: str = "words") -> pl.DataFrame:
        """A row per word, or (``of="changes"``) per changed prompt."""
        import polars as pl

        if of == "changes":
            return pl.DataFrame([_plain(change) for change in self.measured.changes])
        if of != "words":
            raise InputError(f"frame({of!r}): there are words and changes.")
        return pl.DataFrame(
            [
                {
                    "word": word.text,
                    "position": word.positions[0],
                    "kind": word.kind,
                    "mean": word.mean,
                    "low": word.low,
                    "high": word.high,
                    "replacements": len(word.changes),
                    "flips": word.flips,
                }
                for word in self.words
            ]
        )

    def summary(self) -> str:
        """A few lines for people."""
        shown = self.text if self.text is not None else " ".join(self.tokens)
        lines = [
            shown,
            f"What matters for {self.question}? ({self.root.measure} {self.value:.3g}; mean loss and range over "
            f"replacements of each word, {len(self.measured.changes)} changed prompts)",
        ]
        for word in self.top(SHOWN):
            best = max(word.changes, key=lambda change: change.effect)
            lines.append(
                f"  {word.mean:+7.2f}  [{word.low:+.2f}, {word.high:+.2f}]  {word.text!r} {word.positions[0]} "
                f"(most: {best.after!r} {best.effect:+.2f})"
            )
        if self.flips:
            lines += [f"Smallest changes that flip it, most natural first ({self.root.measure} then):"]
            lines += [f"  {change}  ({change.value:+.2f})" for change in self.flips[:SHOWN]]
        else:
            how = "What comes closest" if self.measured.weakens else "The strongest"
            lines += [f"No change that was tried flips it. {how} ({self.root.measure} then):"]
            lines += [f"  {change}  ({change.value:+.2f})" for change in self.counterfactuals]
        return "\n".join(lines)

    def __repr__(self) -> str:
        best = ", ".join(f"{word.text!r} {word.mean:+.2f}" for word in self.top(3))
        return f"Importance({self.question}: {best}; {len(self.flips)} flips)"

    def _repr_html_(self) -> str:
        first, *rest = self.summary().splitlines()
        return paragraph(rest[0], bold=first) + chart(self.plot()) + frame(self.frame())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        words = [
            asdict(word) | {"changes": [_plain(change) for change in word.changes]} for word in self.top()
        ]
        return {
            "schema": SCHEMA,
            "model": self.model,
            "prompt": self.text,
            "tokens": list(self.tokens),
            "question": self.question,
            "measure": self.root.measure,
            "value": self.value,
            "budget": self.budget,
            "seed": self.seed,
            "words": words,
            "flips": [_plain(change) for change in self.flips],
            "counterfactuals": [_plain(change) for change in self.counterfactuals],
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``importance.json`` and ``importance.png`` into a folder."""
        path = Path(folder)
        write_text(path / "importance.json", json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")
        self.plot(path / "importance.png")
        return path

    def plot(self, path: str | Path | None = None) -> Figure:
        """A bar per word: its mean loss, with the range over its replacements."""
        from headtrace.figures.causal import importance_bars

        return importance_bars(self, path)


def _plain(change: Replacement) -> dict[str, Any]:
    found = asdict(change)
    return found | {"positions": list(change.positions), "ids": list(change.ids)}


def importance(
    model: Model,
    prompt: Prompt,
    answer: Answer | None = None,
    wrong: Answer | None = None,
    *,
    budget: int = BUDGET,
    seed: int = 0,
    bos: bool | None = None,
    progress: Progress | None = None,
) -> Importance:
    """Measure which words of a prompt matter: the metric after each is replaced by natural others of the same shape.

    Without an ``answer``, the model's own; without a ``wrong`` one, its strongest rival (a word of the prompt if one is
    among the ten likeliest tokens). ``budget`` is the number of changed prompts that are run; ``seed`` draws the likely
    replacements, so that the same seed gives the same result.
    """
    asked = ask(model, prompt, answer, wrong, bos=bos)
    measured = measure(model, asked, budget=budget, seed=seed, progress=progress)
    return Importance(model.name, asked.text, model.token_labels(asked.ids), measured, budget, seed)
