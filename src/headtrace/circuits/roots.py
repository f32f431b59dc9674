"""Roots: what a circuit explains. Four cases, each a type with its own fields.

A root is made from a question (``LogitDifference(answer=(5,), wrong=(7,))``); a trace fills in what it found: the value
and the place where it is read. Seeds (`headtrace.tracing.roots`), metric (`headtrace.causal.metric`), wording and file
all dispatch on the type.

>>> LogitDifference(answer=(5,), wrong=(7,), answer_tokens=(" Mary",), wrong_tokens=(" John",)).question()
'" Mary" rather than " John"'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from functools import cache, wraps
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError
from typing_extensions import dataclass_transform

from headtrace.circuits.messages import input_error

T = TypeVar("T")


def is_whole(text: str) -> bool:
    """False for text with half a character (a lone surrogate): no file in UTF-8, table or terminal can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole(text: str) -> str:
    """Refuse half a character."""
    if is_whole(text):
        return text
    raise PydanticCustomError("half", "Input should be text without half characters")


LARGEST = 2**63 - 1
"""No integer of a circuit is larger, so each fits into a column of a table."""

Index = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True), AfterValidator(whole)]
Flag = Annotated[bool, Field(strict=True)]
Ids = tuple[Index, ...]
Words = tuple[Text, ...]

ALWAYS = "always written"
Written = Annotated[T, ALWAYS]
"""A field that is in every file, even where it is null. Others are written only where they say something."""

CHECKED = ConfigDict(extra="forbid")
"""Fields are checked when an object is made; a name that is not one of them is refused."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(cls: type[T]) -> type[T]:
    """A frozen dataclass that checks its fields when it is made, and says which is wrong in an ``InputError``."""
    made: Any = dataclass(frozen=True, config=CHECKED)(cls)
    check = made.__init__

    @wraps(check)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            check(self, *args, **kwargs)
        except ValidationError as error:
            raise input_error(error, made, made.__name__) from None

    made.__init__ = __init__
    return made


@cache
def _defaults(cls: type) -> dict[str, Any]:
    return {each.name: each.default for each in fields(cls) if each.default is not MISSING}


def _is_plain(value: Any) -> bool:
    """A finite number, one to count with, several of those, text, or nothing: as Python has them, and nothing like it."""
    kind = type(value)
    if kind is float:
        return isfinite(value)
    if kind is int:
        return 0 <= value <= LARGEST
    if kind is tuple:
        return all(type(each) is int and 0 <= each <= LARGEST for each in value)
    return kind is str or value is None


def quickly(cls: type[T], **given: Any) -> T:
    """The same object as ``cls(**given)`` for what a trace puts together by the thousand: fields of plain values are
    taken as they are. Anything else is for the full check to convert or to refuse: methods may be other people's."""
    if not all(map(_is_plain, given.values())):
        return cls(**given)
    made = object.__new__(cls)
    vars(made).update(_defaults(cls), **given)
    return made


Quote = Callable[[str], str]


def quoted(text: str) -> str:
    """Token text as a terminal shows it: with its outer space, in quotation marks."""
    return f'"{text}"'


def words(ids: Ids, tokens: Words | None, joint: str = " / ") -> str:
    """Token text where it is known, else the ids."""
    return joint.join(tokens or [f"token {i}" for i in ids])


@checked
class LogitDifference:
    """The logit of an answer (the mean over several) less that of a wrong one, or less the vocabulary's mean."""

    answer: Annotated[Ids, Field(min_length=1)]
    """Token ids of the answer."""
    wrong: Written[Ids | None] = None
    """Token ids of the wrong answer; none: the mean over the vocabulary."""
    value: Written[Number | None] = None
    """The model's own logit difference at the last position, biases of the output included."""
    position: Index | None = None
    """Where it is read."""
    answer_tokens: Words | None = None
    """How the answer reads."""
    wrong_tokens: Words | None = None
    """How the wrong answer reads."""
    bias: Number | None = None
    """What the output's own biases give of the value, whatever the prompt."""
    kind: Written[Literal["linear"]] = "linear"
    measure: ClassVar[str] = "logit difference"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: an answer rather than a wrong one."""
        answer = quote(words(self.answer, self.answer_tokens))
        if self.wrong is None:
            return answer
        return f"{answer} rather than {quote(words(self.wrong, self.wrong_tokens))}"


@checked
class Likelihood:
    """The log-likelihood of one or more alternatives for the next token, or of a continuation of several tokens."""

    answer: Written[Ids] = ()
    """Alternatives for the next token (their likelihood is weighted by the model's own probabilities); with
    ``continuation``, tokens that follow one another, each given those before it."""
    continuation: Flag = False
    """Whether the tokens of ``answer`` follow one another."""
    top_k: Annotated[int, Field(strict=True, ge=1, le=LARGEST)] | None = None
    """Ask for the k likeliest next tokens instead of an answer."""
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Ask for the likeliest next tokens up to this probability instead of an answer."""
    value: Written[Number | None] = None
    """The log-likelihood, in nats."""
    position: Index | None = None
    """Where the (first) token is predicted."""
    support: Ids | None = None
    """The alternatives that were asked for, by name or by probability."""
    answer_tokens: Words | None = None
    """How the answer reads."""
    wrong: None = None
    kind: Written[Literal["probability"]] = "probability"
    measure: ClassVar[str] = "log-likelihood"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: an answer, or the likeliest next tokens."""
        if self.answer:
            return quote(words(self.answer, self.answer_tokens, "" if self.continuation else " / "))
        if self.top_k == 1:
            return "the likeliest next token"
        if self.top_k is not None:
            return f"the {self.top_k} likeliest next tokens"
        return "the next token" if self.top_p is None else f"the likeliest next tokens up to {self.top_p:g}"


@checked
class Direction:
    """The residual at the input of a layer (or of the final norm) and one position, along a vector: a probe."""

    layer: Index
    """The layer at whose input it is read."""
    position: Index | None = None
    """Where it is read; none: the last position."""
    vector: tuple[Number, ...] | None = None
    """The vector, d_model numbers; unknown in files of version 1."""
    value: Written[Number | None] = None
    """The projection."""
    label: Text | None = None
    """What the direction stands for, in words."""
    kind: Written[Literal["direction"]] = "direction"
    measure: ClassVar[str] = "projection"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: the label of the direction, or its layer."""
        return self.label or f"a direction at layer {self.layer}"


@checked
class Heads:
    """The attention of given heads at the last position, each on the source that it attends to most."""

    heads: Annotated[Words, Field(min_length=1)]
    """Names such as ``L9H6``."""
    value: Written[Number | None] = None
    """The attention of all of them, added up."""
    position: Index | None = None
    """Where they attend from."""
    kind: Written[Literal["heads"]] = "heads"
    measure: ClassVar[str] = "attention"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: the attention of the named heads."""
        return "the attention of " + ", ".join(self.heads)


Root = LogitDifference | Likelihood | Direction | Heads
"""What is explained: one of the four cases."""
ROOTS: dict[str, type[Root]] = {root.kind: root for root in get_args(Root)}
"""The four cases by the name that files and options use."""
