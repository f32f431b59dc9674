"""What every root has: its wording, its directions in the residual stream, its seeds, its metric and its checks.

A root is one class in one file of this package. Its fields are its form in circuit files; its methods are everything
that tracing, verification and the command line ask of it. These modules load without PyTorch, so that commands which
only read circuits start quickly: methods import what they compute with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from headtrace.errors import InputError
from headtrace.validation import Ids, Words, fail

if TYPE_CHECKING:
    from typing_extensions import Self

    from headtrace.causal.checks import Checking
    from headtrace.causal.metric import Metric
    from headtrace.circuits import Edge
    from headtrace.models import Model, Recording
    from headtrace.prompts import Chat
    from headtrace.roots import Root
    from headtrace.tracing.attribute_root import RootAttribution, RootReading, Seeds
    from headtrace.vocabulary import Prompt

Quote = Callable[[str], str]
Answer = str | int | Sequence[str | int]
"""Text, a token id, or several alternatives of either."""


def quoted(text: str) -> str:
    """Token text as a terminal shows it: with its outer space, in quotation marks."""
    return f'"{text}"'


def words(ids: Ids, tokens: Words | None, joint: str = " / ") -> str:
    """Token text where it is known, else the ids."""
    return joint.join(tokens or [f"token {i}" for i in ids])


@dataclass(frozen=True)
class RootOption:
    """What a request may say about a root."""

    help: str
    type: Any
    """What it is: ``ANSWERS``, int, float, ``list[str]`` (names) or ``list[float]`` (a vector)."""


ANSWERS = list[str | int]
"""The type of options that are texts or token ids."""


class BaseRoot(ABC):
    """What a circuit explains: a number that the model computes from a prompt."""

    kind: Any
    """The word that files and options use."""
    measure: ClassVar[str]
    """The name of its number."""
    options: ClassVar[Mapping[str, RootOption]]
    """What a request for this root may say."""
    value: Any
    """The number in the traced run; None before tracing."""
    position: Any
    """The position at which it is read; None before tracing."""

    has_directions: ClassVar[bool] = True
    """Whether the number is read along directions of the residual stream, so that components have contributions."""
    integrates_gradients: ClassVar[bool] = False
    """Whether contributions are integrated gradients over the output logits."""
    adds_up: ClassVar[bool] = False
    """Whether the value is the sum of all contributions (and of the output's biases)."""

    # Words

    @abstractmethod
    def question(self, quote: Quote = quoted) -> str:
        """What is explained, in words: ``"Mary" rather than "John"``."""

    @abstractmethod
    def advice(self) -> list[str]:
        """What to try when there is no circuit."""

    # From a request

    @classmethod
    @abstractmethod
    def from_options(
        cls, model: Model, prompt: Prompt | Chat, length: int, given: Mapping[str, Any]
    ) -> BaseRoot:
        """The root of a request, with answers as token ids; ``length`` is the number of tokens of the prompt."""

    def with_words(self, model: Model) -> Self:
        """The same root with the text of its answer tokens."""
        return self

    @property
    def answer_prefix(self) -> Ids:
        """Tokens of the answer that the model is given after the prompt: all but the last one of a continuation."""
        return ()

    def measured(self, model: Model, ids: Sequence[int]) -> Self:
        """The same root with what other runs than that of the prompt (``ids``) say about it, where it needs any."""
        return self

    # Tracing

    @abstractmethod
    def readings(self, recording: Recording, prompt: int, ig_steps: int) -> Sequence[RootReading]:
        """The positions at which the number is read, each with its direction in the residual stream."""

    @abstractmethod
    def attribute(
        self, recording: Recording, readings: Sequence[RootReading], written: Sequence[Any]
    ) -> RootAttribution:
        """Every component's contribution, given what each writes along the directions; checks that they sum up."""

    @abstractmethod
    def seeds(self, recording: Recording, prompt: int, attribution: RootAttribution | None) -> Seeds:
        """The components from which tracing starts, or the reason why there are none."""

    # Measuring and verifying

    @abstractmethod
    def metric(self, recording: Recording) -> Metric | None:
        """How to read the number from a running model; None if the file does not say what was read."""

    @abstractmethod
    def require_in(self, model: Model, length: int) -> None:
        """Raise an error that names the field if the model has no such token, layer, head or vector."""

    def verifiable(self) -> Root | None:
        """The root as it is attributed again when a circuit is verified; None if that is not possible."""
        return cast("Root", self)

    def path_width(self, model: Model, length: int) -> int:
        """How many numbers one step of the integrated gradients holds."""
        return model.d_output if self.integrates_gradients else length

    @abstractmethod
    def check(self, check: Checking, found: RootAttribution | None) -> None:
        """Compare the fields of the root in a circuit file with the model."""

    def check_seeds(self, check: Checking, found: RootAttribution | None, edges: Mapping[str, Edge]) -> None:
        """Compare the weights of the edges into the root, by name, with the contributions of their sources."""
        if found is None:
            return
        largest = max(float(part.contributions.abs().max()) for part in found.parts)
        allowed = check.tolerance.number(max(found.size, largest))
        for where, edge in edges.items():
            source = check.circuit.node(edge.source)
            check.ledger.require("channels", where, in_file=edge.channels, measured=None)
            weight = found.weight(source.site)
            if weight is None:
                place = [part.point.position for part in found.parts]
                check.ledger.require("position of the source", where, in_file=source.dest, measured=place)
            else:
                check.ledger.compare("weight", where, in_file=edge.weight, measured=weight, allowed=allowed)


# -- shared by several roots ---------------------------------------------------------------------------------


def several(answer: Answer) -> list[str | int]:
    """One answer or a list of alternatives, as a list."""
    many = [answer] if isinstance(answer, (str, int)) else list(answer)
    if not many:
        raise InputError("The list of answers is empty: give at least one.")
    return many


def single_tokens(model: Model, prompt: Prompt | Chat, answer: Answer, what: str) -> tuple[int, ...]:
    """Token ids of alternatives, each of which must be one token."""
    return tuple(dict.fromkeys(model.token_id(one, what, prompt) for one in several(answer)))


def require_tokens(path: str, ids: Iterable[int], model: Model) -> None:
    """Token ids that the model has."""
    for i, token in enumerate(ids):
        if not 0 <= token < model.d_output:
            fail(f"{path}[{i}]", f"0 to {model.d_output - 1} (token ids of {model.name!r})", token)
