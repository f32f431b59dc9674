"""An explainer and a judge behind an OpenAI-compatible endpoint: vLLM, llama.cpp, Ollama, ``transformers serve``, ...

The key is read from the environment (``OPENAI_API_KEY``) and appears nowhere but in the request; an endpoint on this
machine needs none. Retries, their pauses and timeouts are those of the OpenAI client. Answers are cached by the content
of their question, so an interrupted run only asks for what is missing. Whatever goes wrong is a ``Failure``: it is
counted separately and never taken for a "no".

Every question begins with worked examples, and asks for a JSON schema where the server supports it: even a small model
then keeps to the format. The judge may be asked about fewer pairs at a time (``batch``), which a small model needs.

>>> read_labels('Of course: {"labels": [true, false]}', 2)
(True, False)
>>> read_description('{"description": "The source is a name."}').text
'The source is a name.'
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from urllib.parse import urlsplit

from headtrace.errors import HeadtraceError, InputError, shown
from headtrace.extras import require
from headtrace.interpret.explainers import (
    BlindQuestion,
    Description,
    Estimate,
    Explainer,
    Explanation,
    Failure,
    Judge,
    Labels,
    QuestionCounts,
    RunContext,
    register_explainer,
    register_judge,
)
from headtrace.interpret.scored_signals import Pair, SignalExamples
from headtrace.progress import Progress
from headtrace.writing import write_text

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
Messages = list[dict[str, str]]

KEY = "OPENAI_API_KEY"
UNREACHABLE, REFUSED = 3, 8
"""After this many questions in a row that found no endpoint, or that it refused, a run stops asking it."""
LONGEST_DESCRIPTION = 400
_SECONDS_PER_REQUEST = 3.0
_TOKENS_PER_PAIR = 45
_TOKENS_OF_INSTRUCTIONS = 270


class EndpointError(HeadtraceError):
    """An endpoint gave no answer at all."""


class Malformed(ValueError):
    """An answer that is not in the requested format."""


# -- Questions -----------------------------------------------------------------------------------------------

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
_REMINDER = "That was not the JSON that was asked for. Answer with the JSON object and nothing else."

_JUDGE_EXAMPLES = (
    (" ... parked the[[ red]]<< car>> behind ...", True),
    (" ...[[ heard]] a dog<< bark>> at ...", False),
    (" ... under[[ the]] old<< bridge>> where ...", False),
    (" ... with a[[ long]]<< letter>> from ...", True),
)
_JUDGE_DESCRIPTION = "The source is an adjective right before the noun that it describes."
"""Pairs of a made-up signal with its description, and whether it holds: worked examples for the judge."""
_EXPLAIN_EXAMPLES = (
    ([excerpt for excerpt, holds in _JUDGE_EXAMPLES if holds], _JUDGE_DESCRIPTION),
    (
        [" ... sold[[ apples]] and pears ... likes<< apples>> and ...", "[[ Rain]] fell. More<< Rain>> fell"],
        "The destination repeats the source token.",
    ),
    ([" ... of[[ my]] house ... at<< seven>> and ...", " ...[[;]] then it<< was>> gone ..."], None),
)
"""Pairs of made-up signals, and what they have in common: of several kinds, so as not to suggest one."""
_LINE_BREAK = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_THINKING = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class ChatQuestion(Generic[T]):
    """A question to a language model, and how its answer is read."""

    messages: Messages
    parse: Callable[[str], T]
    """Raises ``Malformed`` for an answer that is not in the requested format."""
    answer_tokens: int
    schema: dict[str, Any]
    """The JSON schema of the answer."""


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


def _numbered(excerpts: Sequence[str]) -> str:
    """One line per example, whatever line breaks the text has."""
    lines = (_LINE_BREAK.sub("⏎", each) for each in excerpts)
    return "Examples:\n" + "\n".join(f"{number}. {each}" for number, each in enumerate(lines, start=1))


def _described(description: str, excerpts: Sequence[str]) -> str:
    return f"Description: {description}\n\n{_numbered(excerpts)}"


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


# -- Asking ------------------------------------------------------------------------------------------------------


def _openai() -> Any:
    without = "Without it there are the explainers lexical and vocabulary, and the judge lexical."
    require("openai", extra="interpret", what="Asking an endpoint", instead=without)
    import openai

    return openai


@dataclass(frozen=True)
class EndpointOptions:
    """Which endpoint to ask, and how."""

    base_url: str = "https://api.openai.com/v1"
    """The address of the endpoint, with its version."""
    model_name: str = ""
    """The model to ask there."""
    concurrency: int = 8
    """How many requests are under way at a time."""
    retries: int = 4
    """How often a failed request is repeated, after increasing pauses (or as long as the endpoint asks for)."""
    timeout: float = 120.0
    """Seconds after which a request that is not answered has failed."""
    context: RunContext | None = None
    """Cache, budget and counts; a run provides them."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.retries < 0 or not self.timeout > 0:
            raise InputError(
                f"concurrency={self.concurrency}, retries={self.retries}, timeout={self.timeout}: at least one request "
                "at a time, no fewer than 0 retries, and a time above 0."
            )

    @property
    def question_counts(self) -> QuestionCounts | None:
        return None if self.context is None else self.context.counts

    @property
    def on_this_machine(self) -> bool:
        """Whether the endpoint is on this machine.

        >>> hosts = ("localhost", "127.0.0.2", "[::1]:80", "localhost.example.org")
        >>> [EndpointOptions(f"http://{host}/v1").on_this_machine for host in hosts]
        [True, True, True, False]
        """
        host = urlsplit(self.base_url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    def prepare(self, context: RunContext) -> Self:
        """The same with the cache, budget and counts of a run."""
        self.check()
        return replace(self, context=context)

    def check(self) -> None:
        """Raise ``InputError`` where the endpoint cannot even be asked."""
        _openai()
        try:
            address = urlsplit(self.base_url)
            valid = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:
            address, valid = urlsplit(""), False
        if not valid:
            raise InputError(
                f"{shown(self.base_url)} is no address of an endpoint, like http://localhost:8000/v1."
            )
        if address.username or address.password:
            raise InputError(
                "The address of the endpoint holds a password, which would be written with the results: set "
                f"{KEY} instead."
            )
        if not self.model_name:
            raise InputError(
                "The endpoint needs the name of a model: give --model-name (model_name='...'), as the server knows it."
            )
        if not os.environ.get(KEY) and not self.on_this_machine:
            raise InputError(
                f"There is no key for {self.base_url}: set {KEY} in the environment. Only an endpoint on this machine "
                "(--base-url http://localhost:8000/v1) needs none."
            )


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


class _Asker:
    """Asks an endpoint many questions at a time, within the budget, and each only once."""

    def __init__(self, options: EndpointOptions) -> None:
        options.check()
        self.options = options
        self.context = options.context or RunContext()
        self.key = os.environ.get(KEY) or ""
        self.failed_in_a_row = 0
        self.refused = dict.fromkeys(ALTERNATIVES, 0)
        """For each parameter, how many of its alternatives the server has refused."""

    def ask_all(self, questions: Sequence[ChatQuestion[T]], progress: Progress | None) -> list[T | Failure]:
        """Answers in the order of the questions. Also works inside a notebook's running event loop."""
        from anyio.from_thread import start_blocking_portal

        with start_blocking_portal() as thread:  # an exception in this block cancels the requests under way
            answers = thread.start_task_soon(self._ask_all, questions, progress)
            while not wait([answers], timeout=0.2).done:  # returns now and then, to notice an interrupt
                pass
            found = answers.result()
        failed = [each for each in found if isinstance(each, Failure)]
        counts, unreadable = self.context.counts, sum(each.unreadable for each in failed)
        counts.questions += len(found)
        counts.unreadable += unreadable
        counts.unanswered += len(failed) - unreadable
        if failed and counts.unanswered == counts.questions:
            raise EndpointError(
                f"None of {len(found)} questions was answered by {self.options.base_url}: "
                f"{min(each.reason for each in failed)} Nothing is lost: give the same command again to resume."
            )
        return found

    async def _ask_all(
        self, questions: Sequence[ChatQuestion[T]], progress: Progress | None
    ) -> list[T | Failure]:
        openai = _openai()
        # The environment's proxy is not for this machine.
        http = openai.DefaultAsyncHttpxClient(trust_env=False) if self.options.on_this_machine else None
        gate, done = asyncio.Semaphore(self.options.concurrency), 0

        async def ask(question: ChatQuestion[T]) -> T | Failure:
            nonlocal done
            async with gate:
                found = await self._ask(client, question)
            done += 1
            if progress is not None:
                progress(done, len(questions))
            return found

        async with openai.AsyncOpenAI(
            api_key=self.key or "none",
            base_url=self.options.base_url,
            max_retries=self.options.retries,
            timeout=self.options.timeout,
            http_client=http,
        ) as client:
            return await asyncio.gather(*(ask(question) for question in questions))

    async def _ask(self, client: Any, question: ChatQuestion[T]) -> T | Failure:
        """The cached answer, or a new one; an answer in the wrong format gets one reminder."""
        file: Path | None = None
        if self.context.folder is not None:
            content = {"model": self.options.model_name, "messages": question.messages}
            digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
            file = self.context.folder / "answers" / digest[:2] / f"{digest}.json"
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or damaged
                return question.parse(json.loads(file.read_text("utf-8"))["answer"])
        messages, problem = question.messages, ""
        for _ in range(2):
            text = await self._request(client, messages, question)
            if isinstance(text, Failure):
                return text
            try:
                found = question.parse(text)
            except Malformed as error:
                problem = str(error)
                reminder = [
                    {"role": "assistant", "content": text[:500]},
                    {"role": "user", "content": _REMINDER},
                ]
                messages = question.messages + reminder
                continue
            if file is not None:
                write_text(file, json.dumps({"model": self.options.model_name, "answer": text}) + "\n")
            return found
        return Failure(f"The answer is not what was asked for: {problem}.", unreadable=True)

    async def _request(self, client: Any, messages: Messages, question: ChatQuestion[Any]) -> str | Failure:
        """The text of one answer; whatever prevents it is a failure with its reason."""
        if self.options.base_url in self.context.given_up:
            return Failure(self.context.given_up[self.options.base_url])
        # At most: about three characters to a token.
        most = sum(len(each["content"]) // 3 + 8 for each in messages) + question.answer_tokens
        budget, openai = self.context.budget, _openai()
        if not budget.allows(most):
            return Failure(f"The budget of {budget.tokens} tokens is spent.")
        budget.reserved += most
        try:
            response = await self._complete(client, messages, question)
        except openai.APIStatusError as error:
            reason = f"The endpoint refused ({error.status_code}): {error.message}"
            return self._failure(reason, error.status_code)
        except openai.APITimeoutError:
            return self._failure(f"The endpoint did not answer within {self.options.timeout:g} seconds.")
        except (openai.OpenAIError, ValueError) as error:
            return self._failure(f"The endpoint could not be used: {error}")
        finally:
            budget.reserved -= most
        used = getattr(getattr(response, "usage", None), "total_tokens", None)
        budget.spent += used if isinstance(used, int) and used > 0 else most
        try:
            text = response.choices[0].message.content
        except (AttributeError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            return self._failure(f"The endpoint sent something other than an answer: {shown(response)}")
        self.failed_in_a_row = 0
        return text

    async def _complete(self, client: Any, messages: Messages, question: ChatQuestion[Any]) -> Any:
        """The server's response; parameters that it refuses are replaced, from then on for all questions."""
        openai, refused = _openai(), dict(self.refused)
        while True:
            parameters: dict[str, Any] = {}
            for name, alternatives in ALTERNATIVES.items():
                parameters |= alternatives[refused[name]](question)
            try:
                response = await client.chat.completions.create(
                    model=self.options.model_name, messages=messages, **parameters
                )
            except openai.APIStatusError as error:
                left = [name for name in ALTERNATIVES if refused[name] < len(ALTERNATIVES[name]) - 1]
                named = [name for name in left if name in error.message]
                if not named and error.status_code in (400, 422) and "response_format" in left:
                    named = ["response_format"]  # a server that does not say what is wrong
                if not named:
                    raise
                refused[named[0]] += 1
                continue
            self.refused = refused
            return response

    def _failure(self, reason: str, status: int | None = None) -> Failure:
        """A failure, without the key in its reason. After several in a row, or a fatal one, no more are sent."""
        reason = " ".join((reason.replace(self.key, "[key]") if self.key else reason).split())[:300]
        self.failed_in_a_row += 1
        if status in (401, 403, 404) or self.failed_in_a_row >= (UNREACHABLE if status is None else REFUSED):
            self.context.given_up.setdefault(self.options.base_url, reason)
        return Failure(reason)


# -- The explainer and the judge ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class EndpointExplainer(EndpointOptions, Explainer):
    """Asks a language model what a signal's pairs have in common."""

    name: ClassVar[str] = "openai"
    states_rules: ClassVar[bool] = False

    def explain(self, shown: SignalExamples) -> Description | None:
        (found,) = self.explain_all([shown])
        if isinstance(found, Failure):
            raise EndpointError(found.reason)
        return found

    def explain_all(
        self, shown: Sequence[SignalExamples], progress: Progress | None = None
    ) -> list[Explanation]:
        worked = [(_numbered(excerpts), description) for excerpts, description in _EXPLAIN_EXAMPLES]
        questions = [
            _question(
                _EXPLAIN,
                worked,
                _numbered([pair.excerpt() for pair in each.top]),
                read_description,
                answer_tokens=100,
                key="description",
                values={"type": ["string", "null"]},
            )
            for each in shown
        ]
        return _Asker(self).ask_all(questions, progress)

    def estimate(self, signals: int, pairs: int) -> Estimate:
        tokens = signals * (_TOKENS_OF_INSTRUCTIONS + pairs * _TOKENS_PER_PAIR + 40)
        return Estimate(signals, tokens, _SECONDS_PER_REQUEST * signals / self.concurrency)


@dataclass(frozen=True)
class EndpointJudge(EndpointOptions, Judge):
    """Asks a language model, some pairs at a time, whether a description is true of them."""

    name: ClassVar[str] = "openai"

    batch: int = 10
    """How many pairs to ask about at a time. A small model gives the right number of labels only for one or two."""
    pairs: int = 20
    """How many pairs of a kind (highest, random, ... of each corpus) to ask about for a signal, at most."""

    @property
    def per_group(self) -> int | None:
        return self.pairs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch < 1:
            raise InputError(f"batch={self.batch}: a question is about at least one pair.")

    def judge(self, description: Description, pairs: Sequence[Pair]) -> Labels:
        return self.judge_all([BlindQuestion(description, tuple(pairs))])[0]

    def judge_all(self, questions: Sequence[BlindQuestion], progress: Progress | None = None) -> list[Labels]:
        # Up to two worked examples, with as many pairs as will be asked about where there are so many.
        size = min(self.batch, len(_JUDGE_EXAMPLES))
        starts = range(0, len(_JUDGE_EXAMPLES) - size + 1, size)
        worked: list[tuple[str, Any]] = []
        for part in [_JUDGE_EXAMPLES[start : start + size] for start in starts][:2]:
            question = _described(_JUDGE_DESCRIPTION, [excerpt for excerpt, _ in part])
            worked.append((question, [holds for _, holds in part]))

        def about(description: Description, pairs: Sequence[Pair]) -> ChatQuestion[tuple[bool, ...]]:
            n = len(pairs)
            return _question(
                _JUDGE,
                worked,
                _described(description.text, [pair.excerpt() for pair in pairs]),
                lambda answer: read_labels(answer, n),
                answer_tokens=20 + 8 * n,
                key="labels",
                values={"type": "array", "items": {"type": "boolean"}, "minItems": n, "maxItems": n},
            )

        batches = [
            (place, question.pairs[start : start + self.batch])
            for place, question in enumerate(questions)
            for start in range(0, len(question.pairs), self.batch)
        ]
        asked = [about(questions[place].description, pairs) for place, pairs in batches]
        labels: list[list[bool | None]] = [[] for _ in questions]
        for (place, pairs), found in zip(batches, _Asker(self).ask_all(asked, progress), strict=True):
            labels[place] += [None] * len(pairs) if isinstance(found, Failure) else found
        return [tuple(each) for each in labels]

    def estimate(self, questions: int, pairs: int) -> Estimate:
        requests = questions * -(-pairs // self.batch)
        tokens = requests * (_TOKENS_OF_INSTRUCTIONS + 30) + questions * pairs * (_TOKENS_PER_PAIR + 3)
        return Estimate(requests, tokens, _SECONDS_PER_REQUEST * requests / self.concurrency)


register_explainer(EndpointExplainer.name, EndpointExplainer)
register_judge(EndpointJudge.name, EndpointJudge)
