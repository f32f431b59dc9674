"""Explainer and judge behind an OpenAI-compatible endpoint: what is asked, and how answers are read.

How it is asked is in ``asking.py``. Each question begins with one that is answered already: even a small model then
keeps to the form. The judge may be asked about fewer pairs at a time (``batch``), which a small model needs.

>>> read_labels('Of course: {"labels": [true, false]}', 2)
(True, False)
>>> read_description('{"description": "The source is a name."}').text
'The source is a name.'
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from headtrace.errors import InputError, shown
from headtrace.interpret.asking import Asked, Asker, EndpointError, EndpointOptions, Malformed, Messages
from headtrace.interpret.examples import Pair, SignalExamples
from headtrace.interpret.protocols import (
    Description,
    Estimate,
    Explainer,
    Explanation,
    Failure,
    Judge,
    Labels,
    Question,
    Setting,
    register_explainer,
    register_judge,
)
from headtrace.progress import Progress

LONGEST_DESCRIPTION = 400
_SECONDS_PER_REQUEST = 3.0
_TOKENS_PER_PAIR = 45
_INSTRUCTIONS = 270

_TASK = (
    "An attention head of a language model reads text. Each example shows a pair of tokens that it connects: the "
    "source token is in [[double brackets]], the destination token, which looks back at it, in <<angle brackets>>. If "
    "they are one and the same token it is in both. A line break is shown as ⏎."
)
_EXPLAIN = (
    f"{_TASK} Say in one short sentence what the pairs have in common: which tokens, which positions, which relation "
    "between source and destination. Do not repeat the examples. Answer with JSON only: "
    '{"description": "..."}, or {"description": null} if they have nothing in common.'
)
_JUDGE = (
    f"{_TASK} You get a description of such pairs, and examples. Decide for each example whether the description is "
    'true of it. Answer with JSON only: {"labels": [true, false, ...]}, one label per example, in their order.'
)

_WORKED = (
    (" ... parked the[[ red]]<< car>> behind ...", True),
    (" ...[[ heard]] a dog<< bark>> at ...", False),
    (" ... under[[ the]] old<< bridge>> where ...", False),
    (" ... with a[[ long]]<< letter>> from ...", True),
)
_WORKED_WORDS = "The source is an adjective right before the noun that it describes."
"""Examples of a made-up signal, and whether its words hold there: they show the form of an answer."""
_ANSWERED = (
    ([excerpt for excerpt, holds in _WORKED if holds], _WORKED_WORDS),
    (
        [" ... sold[[ apples]] and pears ... likes<< apples>> and ...", "[[ Rain]] fell. More<< Rain>> fell"],
        "The destination repeats the source token.",
    ),
    ([" ... of[[ my]] house ... at<< seven>> and ...", " ...[[;]] then it<< was>> gone ..."], None),
)
"""Pairs of made-up signals, and what they have in common. Of several kinds, so as to lean towards none."""


_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _conversation(instructions: str, worked: Sequence[tuple[str, Any]], asked: str) -> Messages:
    """Instructions, questions that are answered already, and the question."""
    messages = [{"role": "system", "content": instructions}]
    for question, answer in worked:
        messages += [_user(question), {"role": "assistant", "content": json.dumps(answer)}]
    return [*messages, _user(asked)]


def _numbered(excerpts: Sequence[str]) -> str:
    """One line per example, whatever line breaks the text has."""
    lines = (_LINE_BREAK.sub("⏎", each) for each in excerpts)
    return "Examples:\n" + "\n".join(f"{number}. {each}" for number, each in enumerate(lines, start=1))


def _described(words: str, excerpts: Sequence[str]) -> str:
    return f"Description: {words}\n\n{_numbered(excerpts)}"


# -- reading answers -----------------------------------------------------------------------------------------

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


def _object(text: str, key: str) -> Any:
    """What the one key of a JSON object holds: the answer itself, or the only such object that stands in it."""
    bare = _THOUGHT.sub("", text, count=1).strip()
    fenced = _FENCED.fullmatch(bare)
    try:
        every: list[Any] = [json.loads(fenced[1] if fenced else bare)]
    except (ValueError, RecursionError):
        every = [each for each in _objects(bare) if set(each) == {key}]
        if len(every) != 1:
            raise Malformed(f"not JSON: {shown(text)}") from None
    if not isinstance(every[0], dict) or set(every[0]) != {key}:
        raise Malformed(f"expected an object with the key {key!r} alone, got {shown(text)}")
    return every[0][key]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that stand in a text, one after the other."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            found, place = decoder.raw_decode(text, place)
            yield found
        except (ValueError, RecursionError):
            place += 1
        place = text.find("{", place)


def read_description(text: str) -> Description | str:
    """The words of an answer; empty where it says that there are none."""
    found = _object(text, "description")
    if found is None:
        return ""
    if not isinstance(found, str) or not found.strip() or len(found) > LONGEST_DESCRIPTION:
        raise Malformed(f"expected a short description, got {shown(found)}")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise Malformed("the description holds half a character") from None
    return Description(" ".join(found.split()))


def read_labels(text: str, count: int) -> tuple[bool, ...]:
    """As many labels as there were examples, each true or false."""
    found = _object(text, "labels")
    if not isinstance(found, list) or len(found) != count or not all(type(each) is bool for each in found):
        raise Malformed(f"expected {count} labels, each true or false, got {shown(found)}")
    return tuple(found)


def _form(key: str, of: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with one key."""
    return {"type": "object", "properties": {key: of}, "required": [key], "additionalProperties": False}


# -- the explainer and the judge -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EndpointExplainer(EndpointOptions, Explainer):
    """Asks a language model what a signal's pairs have in common."""

    name: ClassVar[str] = "openai"
    states_rules: ClassVar[bool] = False

    def prepare(self, setting: Setting) -> EndpointExplainer:
        self.check()
        return replace(self, setting=setting)

    def explain(self, shown: SignalExamples) -> Description | None:
        (found,) = self.explain_all([shown])
        if isinstance(found, Failure):
            raise EndpointError(found.reason)
        return found

    def explain_all(
        self, shown: Sequence[SignalExamples], progress: Progress | None = None
    ) -> list[Explanation]:
        found = Asker(self).ask_all([self._asked(each) for each in shown], progress)
        return [None if isinstance(each, str) else each for each in found]

    def _asked(self, shown: SignalExamples) -> Asked[Description | str]:
        worked = [(_numbered(excerpts), {"description": words}) for excerpts, words in _ANSWERED]
        asked = _numbered([pair.excerpt() for pair in shown.top])
        form = _form("description", {"type": ["string", "null"]})
        return Asked(_conversation(_EXPLAIN, worked, asked), read_description, answer_tokens=100, form=form)

    def estimate(self, signals: int, pairs: int) -> Estimate:
        each = _INSTRUCTIONS + pairs * _TOKENS_PER_PAIR + 40
        return Estimate(signals, signals * each, _SECONDS_PER_REQUEST * signals / self.concurrency)


@dataclass(frozen=True)
class EndpointJudge(EndpointOptions, Judge):
    """Asks a language model, some pairs at a time, whether a description is true of them."""

    name: ClassVar[str] = "openai"

    batch: int = 10
    """How many pairs to ask about at a time. A small model gives the right number of labels only for one or two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch < 1:
            raise InputError(f"batch={self.batch}: a question is about at least one pair.")

    def prepare(self, setting: Setting) -> EndpointJudge:
        self.check()
        return replace(self, setting=setting)

    def judge(self, description: Description, pairs: Sequence[Pair]) -> Labels:
        return self.judge_all([Question(description, tuple(pairs))])[0]

    def judge_all(self, questions: Sequence[Question], progress: Progress | None = None) -> list[Labels]:
        asked = [
            (place, question.pairs[start : start + self.batch])
            for place, question in enumerate(questions)
            for start in range(0, len(question.pairs), self.batch)
        ]
        texts = [self._asked(questions[place].description, pairs) for place, pairs in asked]
        labels: list[list[bool | None]] = [[] for _ in questions]
        for (place, pairs), found in zip(asked, Asker(self).ask_all(texts, progress), strict=True):
            labels[place] += [None] * len(pairs) if isinstance(found, Failure) else found
        return [tuple(each) for each in labels]

    def _asked(self, description: Description, pairs: Sequence[Pair]) -> Asked[tuple[bool, ...]]:
        asked = _described(description.text, [pair.excerpt() for pair in pairs])
        of = {"type": "array", "items": {"type": "boolean"}, "minItems": len(pairs), "maxItems": len(pairs)}
        return Asked(
            _conversation(_JUDGE, self._worked(), asked),
            lambda answer: read_labels(answer, len(pairs)),
            answer_tokens=20 + 8 * len(pairs),
            form=_form("labels", of),
        )

    def _worked(self) -> list[tuple[str, Any]]:
        """Two questions with as many pairs as will be asked about, as far as there are so many; at least one."""
        size = min(self.batch, len(_WORKED))
        parts = [_WORKED[start : start + size] for start in range(0, len(_WORKED) - size + 1, size)][:2]
        return [
            (
                _described(_WORKED_WORDS, [excerpt for excerpt, _ in part]),
                {"labels": [holds for _, holds in part]},
            )
            for part in parts
        ]

    def estimate(self, questions: int, pairs: int) -> Estimate:
        requests = questions * -(-pairs // self.batch)
        tokens = requests * (_INSTRUCTIONS + 30) + questions * pairs * (_TOKENS_PER_PAIR + 3)
        return Estimate(requests, tokens, _SECONDS_PER_REQUEST * requests / self.concurrency)


register_explainer(EndpointExplainer.name, EndpointExplainer)
register_judge(EndpointJudge.name, EndpointJudge)
