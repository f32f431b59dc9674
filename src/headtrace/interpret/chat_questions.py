"""What a language model is asked about signals, and how its answers are read.

Every question begins with worked examples, and asks for a JSON schema where the server supports it: even a small model
then keeps to the format. An answer in any other format is ``Malformed``, and never taken for a "no".

>>> read_labels('Of course: {"labels": [true, false]}', 2)
(True, False)
>>> read_description('{"description": "The source is a name."}').text
'The source is a name.'
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headtrace.errors import shown
from headtrace.interpret.explainers import Description
from headtrace.interpret.scored_signals import Pair

T = TypeVar("T")
Messages = list[dict[str, str]]

LONGEST_DESCRIPTION = 400
TOKENS_PER_PAIR = 70
"""Of an example with eight tokens around source and destination."""
TOKENS_OF_INSTRUCTIONS = 600
"""Of the instructions with their worked examples."""


class Malformed(ValueError):
    """An answer that is not in the requested format."""


# -- Questions -----------------------------------------------------------------------------------------------

_PAIRS = (
    "An attention head of a language model connects pairs of tokens of a text: a source token, and a destination token "
    "that looks back at it. Each pair is given by its source token, its destination token, and how many tokens later "
    "that comes; a space within the quotation marks belongs to the token."
)
_TEXT = (
    " Then comes the text, with the source in [[double brackets]] and the destination in <<angle brackets>>. A line "
    "break is shown as ⏎."
)
_EXPLAIN = (
    "{task} Group A has pairs that the head connects, group B has any pairs. Say in one short sentence what sets group "
    "A apart from group B: which distance, which source tokens, which destination tokens, or which relation of the "
    'two. Do not repeat the pairs. Answer with JSON only: {{"description": "..."}}, or {{"description": null}} if '
    "nothing does."
)
_JUDGE = (
    "{task} You get a description of such pairs, and examples. Decide for each example whether the description is "
    'true of its source token and its destination token. Answer with JSON only: {{"labels": [true, false, ...]}}, one '
    "label per example, in their order."
)
_DECIDE = "{task} Decide whether the description is true of the pair. Answer True or False."
REMINDER = "That was not the JSON that was asked for. Answer with the JSON object and nothing else."

MOST_TOLD = 10
"""The most probable answers, of which the probability is asked."""
LEAST_CHANCE = 1e-6
"""Of an answer that is not among those whose probability is told."""
LABELLED = 4
"""Worked examples for the judge that have one description."""
MOST_WORKED = 6
"""Questions that the judge is shown with their answers, at most."""
_WORKED: tuple[tuple[str, tuple[tuple[str, int, bool], ...]], ...] = (
    (
        "The source is an adjective right before the noun that it describes.",
        (
            (" ... parked the[[ red]]<< car>> behind ...", 1, True),
            (" ...[[ heard]] a dog<< bark>> at ...", 3, False),
            (" ... under[[ the]] old<< bridge>> where ...", 2, False),
            (" ... with a[[ long]]<< letter>> from ...", 1, True),
        ),
    ),
    (
        "The source is at most 2 tokens before the destination.",
        (
            (" ... a[[ pound]] of apples ... some<< pears>> from ...", 19, False),
            (" ... born[[ in]] late<< June>>, ...", 2, True),
            (" she[[ likes]]<< tea>> and ...", 1, True),
            (" it[[ was]] cold ... warm<< in>> the ...", 45, False),
        ),
    ),
    (
        "The destination repeats the source token.",
        (
            (" ... a pound of[[ apples]] and of<< pears>> from ...", 3, False),
            ("[[ Rain]] fell. More<< Rain>> fell", 4, True),
            (" ... sold[[ apples]] and pears ... likes<< apples>> and ...", 9, True),
            (" ... the[[ dog]]<< barked>> at ...", 1, False),
        ),
    ),
    (
        "The source token is punctuation.",
        (
            (" ... of[[ my]] house ... at<< seven>> and ...", 12, False),
            (" ... once it rained[[;]] then it<< was>> gone ...", 3, True),
            (" ... left the[[ room]],<< and>> nobody ...", 2, False),
            (" ... old[[,]]<< tired>> man ...", 1, True),
        ),
    ),
    (
        "The source is at least 32 tokens before the destination.",
        (
            (" Once[[ we]] had ... by the<< door>> of ...", 71, True),
            (" ... sang[[ of]]<< it>> all ...", 1, False),
            (" ... went[[ up]] the hill<< to>> see ...", 3, False),
            (" ... was[[ sold]] to him ... of the<< mill>> and ...", 44, True),
        ),
    ),
    (
        "The destination token is a number.",
        (
            (" ... and[[ in]]<< 1950>> she ...", 1, True),
            (" ... of[[ the]] old<< war>>, which ...", 2, False),
            (" ... all[[ seven]] ships ... the<< harbour>> of ...", 22, False),
            (" The[[ train]] is late ... of<< 12>> hours ...", 17, True),
        ),
    ),
)
"""Pairs of made-up signals with their descriptions: text, tokens from source to destination, whether it holds."""
_NOTHING = (
    ((" ... of[[ my]] house ... at<< seven>> and ...", 12), (" ... old[[,]]<< tired>> man ...", 1)),
    ((" ... the[[ dog]]<< barked>> at ...", 1), (" ...[[;]] ... once more it<< was>> gone ...", 23)),
)
"""Two groups with nothing that sets them apart."""
_MARKED = re.compile(r"\[\[(?P<source>.*?)\]\].*<<(?P<destination>.*?)>>", re.DOTALL)
_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_THINKING = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class ChatQuestion(Generic[T]):
    """A question to a language model, and how its answer is read."""

    messages: Messages
    parse: Callable[[str], T]
    """Raises ``Malformed`` for an answer that is not in the requested format."""
    answer_tokens: int
    schema: dict[str, Any] | None
    """The JSON schema of the answer; None where it is one token, of which the probability is asked."""

    def id_for(self, model_name: str) -> str:
        """A name for the question as put to one model, by its content: 64 hexadecimal digits."""
        content = {"model": model_name, "messages": self.messages}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _question(
    instructions: str,
    worked: Sequence[tuple[str, Any]],
    asked: str,
    parse: Callable[[str], T],
    answer_tokens: int,
    key: str,
    values: dict[str, Any],
) -> ChatQuestion[T]:
    """Instructions, worked examples and the question; the answer is a JSON object with one key."""
    messages = [{"role": "system", "content": instructions}]
    for question, answer in worked:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": json.dumps({key: answer})})
    messages.append({"role": "user", "content": asked})
    schema = {"type": "object", "properties": {key: values}, "required": [key], "additionalProperties": False}
    return ChatQuestion(messages, parse, answer_tokens, schema)


def _one_line(text: str) -> str:
    return _LINE_BREAK.sub("⏎", text)


def _example(source: str, destination: str, later: int, text: str | None) -> str:
    """One pair: both tokens by name, how far apart they are, and the text in which they are marked, if it is shown."""
    if not later:
        tokens = f'"{source}" to itself'
    else:
        tokens = f'"{source}" to "{destination}", {later} token{"s" if later > 1 else ""} later'
    return _one_line(tokens if text is None else f"{tokens}, in: {text}")


def _of_pair(pair: Pair, around: int) -> str:
    text = pair.excerpt(around) if around else None
    return _example(pair.tokens[pair.src], pair.tokens[pair.dest], pair.dest - pair.src, text)


def _made_up(text: str, later: int, around: int) -> str:
    """A worked example, by its marked text."""
    marked = _MARKED.search(text)
    assert marked is not None
    return _example(marked["source"], marked["destination"], later, text if around else None)


def _task(instructions: str, around: int) -> str:
    return instructions.format(task=_PAIRS + (_TEXT if around else ""))


def _groups(one: Sequence[str], other: Sequence[str]) -> str:
    """A line per pair, in two groups."""
    return "\n".join(["Group A:", *one, "Group B:", *other])


def _numbered(examples: Sequence[str]) -> str:
    """One line per example."""
    return "Examples:\n" + "\n".join(f"{number}. {each}" for number, each in enumerate(examples, start=1))


def _stated(description: str, example: str) -> str:
    """The description first: a server keeps what questions have in common at their beginning."""
    return f"Description: {_one_line(description)}\nPair: {example}"


def _described(description: str, examples: Sequence[str]) -> str:
    return f"Description: {_one_line(description)}\n\n{_numbered(examples)}"


# -- Reading answers ---------------------------------------------------------------------------------------------


def _value(text: str, key: str) -> Any:
    """The value in the only JSON object of an answer that has this one key; text around it is ignored."""
    text = _THINKING.sub("", text, count=1)
    decoder, place, found = json.JSONDecoder(), text.find("{"), list[dict[str, Any]]()
    while place >= 0:
        try:
            each, place = decoder.raw_decode(text, place)
            found.append(each)
        except (ValueError, RecursionError):
            place += 1
        place = text.find("{", place)
    matching = [each for each in found if set(each) == {key}]
    if len(matching) != 1:
        raise Malformed(f"expected one JSON object with the key {key!r} alone, got {shown(text)}")
    return matching[0][key]


def read_description(text: str) -> Description | None:
    """The description in an answer; None where it says that there is none."""
    found = _value(text, "description")
    if found is None:
        return None
    if not isinstance(found, str) or not found.strip() or len(found) > LONGEST_DESCRIPTION:
        raise Malformed(f"expected a short description, got {shown(found)}")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise Malformed("the description holds a lone surrogate") from None
    return Description(" ".join(found.split()))


def read_labels(text: str, count: int) -> tuple[bool, ...]:
    """As many labels as there were examples, each true or false."""
    found = _value(text, "labels")
    if not isinstance(found, list) or len(found) != count or not all(type(each) is bool for each in found):
        raise Malformed(f"expected {count} labels, each true or false, got {shown(found)}")
    return tuple(found)


def text_of(choice: Mapping[str, Any]) -> str | None:
    """The text of an answer. For "True" or "False" with probabilities, their log-odds as JSON.

    >>> tokens = [{"token": " True", "logprob": -0.5}, {"token": "False", "logprob": -1.5}]
    >>> text_of({"message": {"content": "True"}, "logprobs": {"content": [{"top_logprobs": tokens}]}})
    '{"log_odds": 1.0}'
    """
    text = choice["message"]["content"]
    if not isinstance(text, str) or text.strip().lower() not in ("true", "false"):
        return text if isinstance(text, str) else None
    told = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or []
    chances = {True: 0.0, False: 0.0}
    for each in told:
        if (word := each["token"].strip().lower()) in ("true", "false"):
            chances[word == "true"] += math.exp(each["logprob"])
    if not any(chances.values()):
        return text
    least = LEAST_CHANCE
    return json.dumps(
        {"log_odds": round(math.log(max(chances[True], least) / max(chances[False], least)), 6)}
    )


def read_odds(text: str) -> float:
    """The log-odds in an answer as it is kept."""
    if text.strip().lower() in ("true", "false"):
        raise Malformed("the server does not say how probable its answers are (logprobs)")
    found = _value(text, "log_odds")
    if not isinstance(found, float) or not math.isfinite(found):
        raise Malformed(f"expected log-odds, got {shown(found)}")
    return found


# -- The questions -----------------------------------------------------------------------------------------------


def ask_for_words(
    pairs: Sequence[Pair], others: Sequence[Pair], around: int
) -> ChatQuestion[Description | None]:
    """What sets these pairs apart from others?"""
    worked: list[tuple[str, str | None]] = []
    for words, made_up in _WORKED:
        groups: dict[bool, list[str]] = {True: [], False: []}
        for text, later, holds in made_up:
            groups[holds].append(_made_up(text, later, around))
        worked.append((_groups(groups[True], groups[False]), words))
    one, other = ([_made_up(*each, around) for each in group] for group in _NOTHING)
    worked.insert(3, (_groups(one, other), None))
    return _question(
        _task(_EXPLAIN, around),
        worked,
        _groups([_of_pair(pair, around) for pair in pairs], [_of_pair(pair, around) for pair in others]),
        read_description,
        answer_tokens=100,
        key="description",
        values={"type": ["string", "null"]},
    )


def ask_for_labels(
    description: Description, pairs: Sequence[Pair], at_once: int, around: int
) -> ChatQuestion[tuple[bool, ...]]:
    """Is the description true of each of these pairs? ``at_once`` is how many pairs most questions of a run have."""
    # The worked examples have as many pairs as will be asked about where there are so many: first a part of each
    # description, then the next parts, so that yes and no take turns.
    size = min(at_once, LABELLED)
    worked: list[tuple[str, Any]] = []
    for start in range(0, LABELLED - size + 1, size):
        for words, made_up in _WORKED:
            part = made_up[start : start + size]
            asked = _described(words, [_made_up(text, later, around) for text, later, _ in part])
            worked.append((asked, [holds for *_, holds in part]))
    n = len(pairs)
    return _question(
        _task(_JUDGE, around),
        worked[:MOST_WORKED],
        _described(description.text, [_of_pair(pair, around) for pair in pairs]),
        lambda answer: read_labels(answer, n),
        answer_tokens=20 + 8 * n,
        key="labels",
        values={"type": "array", "items": {"type": "boolean"}, "minItems": n, "maxItems": n},
    )


def ask_for_odds(description: Description, pair: Pair, around: int) -> ChatQuestion[float]:
    """How likely is the description true of this pair? Log-odds of the answers True and False."""
    messages = [{"role": "system", "content": _task(_DECIDE, around)}]
    # Of each description a pair of which it is true and one of which it is not, in an order without a pattern.
    for turn in (0, 1):
        for place, (words, made_up) in enumerate(_WORKED):
            wanted = (place in (0, 3, 5)) is (turn == 0)
            text, later, holds = [each for each in made_up if each[-1] is wanted][turn]
            messages.append({"role": "user", "content": _stated(words, _made_up(text, later, around))})
            messages.append({"role": "assistant", "content": str(holds)})
    messages.append({"role": "user", "content": _stated(description.text, _of_pair(pair, around))})
    return ChatQuestion(messages, read_odds, answer_tokens=1, schema=None)


# -- Parameters of a request -------------------------------------------------------------------------------------

ALTERNATIVES: dict[str, tuple[Callable[[ChatQuestion[Any]], dict[str, Any]], ...]] = {
    "max_tokens": (
        lambda question: {"max_tokens": question.answer_tokens},
        lambda question: {"max_completion_tokens": question.answer_tokens},
    ),
    "temperature": (lambda question: {"temperature": 0}, lambda question: {}),
    "response_format": (
        lambda question: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": question.schema},
            }
        },
        lambda question: {"response_format": {"type": "json_object", "schema": question.schema}},
        lambda question: {},
    ),
}
"""Parameters that some servers refuse, and what to send instead."""


def parameters(question: ChatQuestion[Any], refused: Mapping[str, int]) -> dict[str, Any]:
    """The parameters of a request, for a server that has refused so many alternatives of each."""
    found: dict[str, Any] = {} if question.schema else {"logprobs": True, "top_logprobs": MOST_TOLD}
    for name, alternatives in ALTERNATIVES.items():
        if name == "response_format" and question.schema is None:
            continue
        found |= alternatives[refused[name]](question)
    return found


def also_refused(refused: Mapping[str, int], status: int | None, message: str) -> str | None:
    """The parameter that a server refuses by this error; None where the error is about something else.

    >>> also_refused(dict.fromkeys(ALTERNATIVES, 0), 400, "Unsupported parameter: 'max_tokens'")
    'max_tokens'
    """
    if status is None:
        return None
    left = [name for name in ALTERNATIVES if refused[name] < len(ALTERNATIVES[name]) - 1]
    named = [name for name in left if name in message]
    if not named and status in (400, 422) and "response_format" in left:
        named = ["response_format"]  # a server that does not say what is wrong
    return named[0] if named else None
