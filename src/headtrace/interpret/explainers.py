"""Explainers describe a signal in words; judges say where a description holds. Both are looked up by name.

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
from headtrace.interpret.scored_signals import Pair, SignalExamples
from headtrace.progress import Progress
from headtrace.registry import Registry, create

if TYPE_CHECKING:
    from typing_extensions import Self

    from headtrace.interpret.answer_files import BatchQuestions
    from headtrace.models import Model


@dataclass(frozen=True)
class Description:
    """What a signal responds to, in words."""

    text: str
    """One short sentence."""
    structure: Mapping[str, Any] | None = field(default=None, hash=False)
    """The same as rules that a program can apply, if there are any (`headtrace.interpret.rules`)."""


@dataclass(frozen=True)
class Failure:
    """No usable answer: an endpoint that refuses, hangs, or sends something unreadable. Never counts as a "no"."""

    reason: str
    unreadable: bool = False
    """There was an answer, but not in the requested format."""


Explanation = Description | Failure | None
"""A description; None if the explainer found none; a failure if it gave no answer."""
Labels = tuple[bool | None, ...]
"""Per pair, whether the description holds; None where there was no answer."""


@dataclass(frozen=True)
class BlindQuestion:
    """A description, and the pairs to be labelled by it, without a hint which of them are the signal's."""

    description: Description
    pairs: tuple[Pair, ...]
    known: tuple[tuple[Pair, bool], ...] = ()
    """Pairs that the explainer saw, and whether they are the signal's: for a judge that must find out what counts as
    a yes. No verdict is on them."""


# -- What a run shares with its explainer and judge --------------------------------------------------------------


@dataclass
class TokenBudget:
    """How many tokens may be spent on language models; the explainer and the judge of a run share one."""

    tokens: int | None = None
    """None for no limit."""
    spent: int = 0
    reserved: int = 0
    """The most that requests under way may cost."""

    def allows(self, tokens: int) -> bool:
        return self.tokens is None or self.spent + self.reserved + tokens <= self.tokens


@dataclass
class QuestionCounts:
    """How many questions a run asked language models, and how many got no usable answer."""

    questions: int = 0
    unanswered: int = 0
    """The endpoint refused, hung, or was not there."""
    unreadable: int = 0
    """The answer was not in the requested format, twice."""

    def __add__(self, other: QuestionCounts) -> QuestionCounts:
        return QuestionCounts(*(getattr(self, name) + value for name, value in vars(other).items()))

    def __sub__(self, other: QuestionCounts) -> QuestionCounts:
        return QuestionCounts(*(getattr(self, name) - value for name, value in vars(other).items()))


@dataclass(frozen=True)
class RunContext:
    """What a run provides to its explainer and judge."""

    model: Model | None = None
    """The model whose signals are explained."""
    folder: Path | None = None
    """Where answers are cached, so that none is requested twice."""
    budget: TokenBudget = field(default_factory=TokenBudget)
    counts: QuestionCounts = field(default_factory=QuestionCounts)
    batch: BatchQuestions | None = None
    """Where questions without an answer are written for a batch service, instead of being sent."""
    given_up: dict[str, str] = field(default_factory=dict[str, str])
    """Endpoints that get no more requests in this run, and why."""


@dataclass(frozen=True)
class Estimate:
    """What some work will cost, roughly."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(getattr(self, name) + value for name, value in vars(other).items()))


# -- Explainers and judges ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Registered(ABC):
    """What explainers and judges have in common."""

    name: ClassVar[str]

    def prepare(self, context: RunContext) -> Self:
        """The same with what it needs of a run; raises ``InputError`` where something is missing."""
        return self

    @property
    def question_counts(self) -> QuestionCounts | None:
        """Where questions to a language model are counted, if it asks one."""
        return None


@dataclass(frozen=True)
class Explainer(_Registered):
    """Reads examples of a signal and describes what it responds to. The fields are the options."""

    states_rules: ClassVar[bool] = True
    """Whether its descriptions may come with rules that a program can apply."""

    @abstractmethod
    def explain(self, shown: SignalExamples) -> Description | None:
        """Describe one signal, or None where nothing tells its examples from others."""

    def explain_all(
        self, shown: Sequence[SignalExamples], progress: Progress | None = None
    ) -> list[Explanation]:
        """Describe many signals, in their order."""
        found: list[Explanation] = []
        for number, examples in enumerate(shown):
            found.append(self.explain(examples))
            if progress is not None:
                progress(number + 1, len(shown))
        return found

    def estimate(self, signals: int, pairs: int) -> Estimate:
        """The cost of describing some signals by some pairs each."""
        return Estimate(seconds=2e-3 * signals * pairs)


@dataclass(frozen=True)
class Judge(_Registered):
    """Labels pairs by a description alone. The fields are the options."""

    needs_rules: ClassVar[bool] = False
    """Whether it can only apply rules, not read text."""

    @property
    def per_group(self) -> int | None:
        """How many pairs of a kind it is asked about at most; None for all that there are."""
        return None

    @abstractmethod
    def judge(self, description: Description, pairs: Sequence[Pair]) -> Labels:
        """Whether the description holds for each pair; None where there was no answer."""

    def judge_all(self, questions: Sequence[BlindQuestion], progress: Progress | None = None) -> list[Labels]:
        """Answer many questions, in their order."""
        found: list[Labels] = []
        for number, question in enumerate(questions):
            found.append(self.judge(question.description, question.pairs))
            if progress is not None:
                progress(number + 1, len(questions))
        return found

    def estimate(self, questions: int, pairs: int) -> Estimate:
        """The cost of labelling some pairs for each of some descriptions."""
        return Estimate(seconds=1e-5 * questions * pairs)


EXPLAINERS: Registry[type[Explainer]] = Registry(
    "explainer",
    "headtrace.explainers",
    {},
    check=lambda found: isinstance(found, type) and issubclass(found, Explainer),
)
JUDGES: Registry[type[Judge]] = Registry(
    "judge", "headtrace.judges", {}, check=lambda found: isinstance(found, type) and issubclass(found, Judge)
)


def register_explainer(name: str, explainer: type[Explainer]) -> None:
    """Register an explainer under a name, for this process."""
    EXPLAINERS.add(name, explainer)


def register_judge(name: str, judge: type[Judge]) -> None:
    """Register a judge under a name, for this process."""
    JUDGES.add(name, judge)


def make_explainer(explainer: str | Explainer, **options: Any) -> Explainer:
    """An explainer by name, with its options; an instance is returned unchanged."""
    return create(EXPLAINERS, explainer, options)


def make_judge(judge: str | Judge, **options: Any) -> Judge:
    """A judge by name, with its options; an instance is returned unchanged."""
    return create(JUDGES, judge, options)


def make_both(explainer: str | Explainer, judge: str | Judge) -> tuple[Explainer, Judge]:
    """An explainer and a judge; ``InputError`` if the judge cannot read what the explainer says."""
    explains, judges = make_explainer(explainer), make_judge(judge)
    if judges.needs_rules and not explains.states_rules:
        raise InputError(
            f"The judge {judges.name!r} applies rules, and the descriptions of the explainer {explains.name!r} have "
            "none. Choose a judge that reads (--judge openai), or an explainer that states rules (lexical, vocabulary)."
        )
    return explains, judges
