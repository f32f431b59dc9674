"""Explainers put a signal into words, judges say where the words hold. Both are known by name.

>>> make_explainer("lexical", most=2)
Lexical(most=2, folds=4)
>>> make_judge("lexical")
LiteralJudge()

A package of your own adds one by subclassing ``Explainer`` or ``Judge`` (a frozen dataclass whose fields are its
options) and calling ``register_explainer("name", Class)`` or ``register_judge("name", Class)``, or through the entry
point groups ``headtrace.explainers`` and ``headtrace.judges``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headtrace.errors import InputError
from headtrace.interpret.examples import Pair, SignalExamples
from headtrace.progress import Progress
from headtrace.registry import Registry, made

if TYPE_CHECKING:
    from headtrace.models import Model


@dataclass(frozen=True)
class Description:
    """What a signal looks for, in words."""

    text: str
    """One short sentence."""
    structure: Mapping[str, Any] | None = field(default=None, hash=False)
    """The same as data, where a program can apply it; see ``rules.py``."""


@dataclass(frozen=True)
class Failure:
    """No answer: an endpoint that refuses, hangs, or sends what cannot be read. Never a negative."""

    reason: str
    unreadable: bool = False
    """There was an answer, and it was not in the form that was asked for."""


@dataclass
class Budget:
    """How many tokens may be spent on language models; explainer and judge of a run share one."""

    tokens: int | None = None
    """None is as many as it takes."""
    spent: int = 0
    reserved: int = 0
    """What requests under way will cost at most."""

    def allows(self, tokens: int) -> bool:
        return self.tokens is None or self.spent + self.reserved + tokens <= self.tokens


@dataclass
class Ledger:
    """What was asked of language models in a run, and what came back."""

    questions: int = 0
    unanswered: int = 0
    """Questions without an answer: the endpoint refused, hung, or was not there."""
    unreadable: int = 0
    """Questions whose answer was not in the form that was asked for, twice."""

    @property
    def answered(self) -> int:
        """Questions with any answer, of whatever form."""
        return self.questions - self.unanswered

    def add(self, questions: int, failed: Sequence[Failure]) -> None:
        unreadable = sum(each.unreadable for each in failed)
        self.questions += questions
        self.unreadable += unreadable
        self.unanswered += len(failed) - unreadable

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, name) + value for name, value in vars(other).items()))

    def __sub__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, name) - value for name, value in vars(other).items()))


@dataclass(frozen=True)
class Setting:
    """What surrounds explainers and judges in a run."""

    model: Model | None = None
    """The model whose signals are explained."""
    folder: Path | None = None
    """Where answers may be kept, so that none is asked for twice."""
    budget: Budget = field(default_factory=Budget)
    ledger: Ledger = field(default_factory=Ledger)
    gone: dict[str, str] = field(default_factory=dict[str, str])
    """Endpoints that are asked nothing more in this run, and why."""


@dataclass(frozen=True)
class Estimate:
    """What some work will cost, roughly."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.requests + other.requests, self.tokens + other.tokens, self.seconds + other.seconds
        )


@dataclass(frozen=True)
class Question:
    """A description, and the pairs to be labelled by it. Nothing says which of them are the signal's."""

    description: Description
    pairs: tuple[Pair, ...]


Explanation = Description | Failure | None
"""Words, or none because nothing was found, or no answer at all."""
Labels = tuple[bool | None, ...]
"""Per pair, whether the words hold; None where there was no answer."""


@dataclass(frozen=True)
class Explainer(ABC):
    """Reads examples of a signal and says in words what it looks for. The fields are the options."""

    name: ClassVar[str]
    states_rules: ClassVar[bool] = True
    """Whether its words may come with rules that a program can apply."""

    def prepare(self, setting: Setting) -> Explainer:
        """The explainer with what it needs of a run; raises ``InputError`` where something is missing."""
        return self

    @property
    def ledger(self) -> Ledger | None:
        """Where questions to a language model are counted, if it asks one."""
        return None

    @abstractmethod
    def explain(self, shown: SignalExamples) -> Description | None:
        """One signal in words, or None where nothing tells its examples from others."""

    def explain_all(
        self, shown: Sequence[SignalExamples], progress: Progress | None = None
    ) -> list[Explanation]:
        """Many signals, in their order."""
        found: list[Explanation] = []
        for number, examples in enumerate(shown):
            found.append(self.explain(examples))
            if progress is not None:
                progress(number + 1, len(shown))
        return found

    def estimate(self, signals: int, pairs: int) -> Estimate:
        """What explaining so many signals by so many pairs each will cost."""
        return Estimate(seconds=2e-3 * signals * pairs)


@dataclass(frozen=True)
class Judge(ABC):
    """Labels pairs by a description alone. The fields are the options."""

    name: ClassVar[str]
    needs_rules: ClassVar[bool] = False
    """Whether it can only apply rules, and not read."""

    def prepare(self, setting: Setting) -> Judge:
        """The judge with what it needs of a run; raises ``InputError`` where something is missing."""
        return self

    @property
    def ledger(self) -> Ledger | None:
        """Where questions to a language model are counted, if it asks one."""
        return None

    @abstractmethod
    def judge(self, description: Description, pairs: Sequence[Pair]) -> Labels:
        """Whether the words hold for each pair; None where there was no answer."""

    def judge_all(self, questions: Sequence[Question], progress: Progress | None = None) -> list[Labels]:
        """Many questions, in their order."""
        found: list[Labels] = []
        for number, question in enumerate(questions):
            found.append(self.judge(question.description, question.pairs))
            if progress is not None:
                progress(number + 1, len(questions))
        return found

    def estimate(self, questions: int, pairs: int) -> Estimate:
        """What labelling so many pairs for each of so many descriptions will cost."""
        return Estimate(seconds=1e-5 * questions * pairs)


def check_together(explainer: Explainer, judge: Judge) -> None:
    """Raise ``InputError`` where a judge cannot read what an explainer says: before anything is paid for."""
    if judge.needs_rules and not explainer.states_rules:
        raise InputError(
            f"The judge {judge.name!r} applies rules, and the words of the explainer {explainer.name!r} have none. "
            "Choose a judge that reads (--judge openai), or an explainer that states rules (lexical, vocabulary)."
        )


def _is_explainer(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Explainer)


def _is_judge(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Judge)


EXPLAINERS: Registry[type[Explainer]] = Registry("explainer", "headtrace.explainers", {}, check=_is_explainer)
JUDGES: Registry[type[Judge]] = Registry("judge", "headtrace.judges", {}, check=_is_judge)


def register_explainer(name: str, explainer: type[Explainer]) -> None:
    """Make an explainer known under a name, for this process."""
    EXPLAINERS.add(name, explainer)


def register_judge(name: str, judge: type[Judge]) -> None:
    """Make a judge known under a name, for this process."""
    JUDGES.add(name, judge)


def make_explainer(explainer: str | Explainer, **options: Any) -> Explainer:
    """An explainer by name, with its options; one that is already made is taken as it is."""
    return made(EXPLAINERS, explainer, options)


def make_judge(judge: str | Judge, **options: Any) -> Judge:
    """A judge by name, with its options; one that is already made is taken as it is."""
    return made(JUDGES, judge, options)
