"""Explainer and judge behind an OpenAI-compatible endpoint: vLLM, llama.cpp, Ollama, ``transformers serve`` and others.

The key is read from the environment (``OPENAI_API_KEY``) and goes nowhere but into the request; an endpoint on this
machine needs none. Answers are kept by the content of their question, so a run that was cut short asks only for what
is missing. What cannot be had, for whatever reason, is a ``Failure``: it is counted apart and never taken for a "no".
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from urllib.parse import urlsplit

from headtrace.errors import HeadtraceError, InputError, shown
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
from headtrace.writing import write_text

T = TypeVar("T")
Messages = list[dict[str, str]]

KEY = "OPENAI_API_KEY"
GIVE_UP = 8
"""After so many failures in a row nothing more is asked: the endpoint is not there."""
BATCH = 10
"""Pairs per question to a judge."""
LONGEST_DESCRIPTION = 400
_SECONDS_PER_REQUEST = 3.0
_TOKENS_PER_PAIR = 50
_INSTRUCTIONS = 220

_TASK = (
    "An attention head of a language model reads text. Each example shows a pair of tokens that it connects: the "
    "source token is in [[double brackets]], the destination token, which looks back at it, in <<angle brackets>>. If "
    "they are one and the same token it is in both."
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


class EndpointError(HeadtraceError):
    """An endpoint gave no answer at all."""


class Malformed(ValueError):
    """An answer that is not what was asked for."""


@dataclass(frozen=True)
class EndpointOptions:
    """Where to ask, and how."""

    base_url: str = "https://api.openai.com/v1"
    """The address of the endpoint, with its version."""
    model_name: str = ""
    """The model to ask there."""
    concurrency: int = 8
    """How many requests are under way at a time."""
    retries: int = 4
    """How often a request that fails is repeated, after longer and longer pauses (or what the endpoint asks for)."""
    timeout: float = 120.0
    """Seconds after which an endpoint that does not answer has failed."""
    setting: Setting | None = None
    """What surrounds it in a run; a run gives it."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.retries < 0 or not self.timeout > 0:
            raise InputError(
                f"concurrency={self.concurrency}, retries={self.retries}, timeout={self.timeout}: at least one request "
                "at a time, no fewer than 0 retries, and a time above 0."
            )

    def check(self) -> None:
        """Raise ``InputError`` where the endpoint cannot even be asked."""
        _require_client()
        address = _address(self.base_url)
        if not self.model_name:
            raise InputError(
                "The endpoint needs the name of a model: give --model-name (model_name='...'), as the server knows it."
            )
        if not os.environ.get(KEY) and not is_loopback(address.hostname or ""):
            raise InputError(
                f"There is no key for {self.base_url}: set {KEY} in the environment. Only an endpoint on this machine "
                "(--base-url http://localhost:8000/v1) needs none."
            )


def _require_client() -> Any:
    try:
        import openai
    except ImportError:
        raise InputError(
            "The package 'openai' is missing: pip install 'headtrace[interpret]'. Without it there are the explainers "
            "lexical and vocabulary, and the judge lexical."
        ) from None
    return openai


def _address(base_url: str) -> Any:
    try:
        address = urlsplit(base_url)
        good = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        good, address = False, urlsplit("")
    if not good:
        raise InputError(f"{shown(base_url)} is no address of an endpoint, like http://localhost:8000/v1.")
    if address.username or address.password:
        raise InputError(
            f"The address of the endpoint holds a password, which would be written with the results: set {KEY} instead."
        )
    return address


def is_loopback(host: str) -> bool:
    """Whether a host is this machine.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("localhost.example.org")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


# -- asking --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked(Generic[T]):
    """A question to a language model, and how its answer is read."""

    messages: Messages
    parse: Callable[[str], T]
    """Raises ``Malformed`` for anything but what was asked for."""
    answer_tokens: int


class Asker:
    """Asks an endpoint many questions at a time, within the budget, and each only once."""

    def __init__(self, options: EndpointOptions) -> None:
        options.check()
        self.options = options
        self.setting = options.setting or Setting()
        self._key = os.environ.get(KEY) or ""
        self._in_a_row, self._over = 0, ""

    def ask_all(self, questions: Sequence[Asked[T]], progress: Progress | None = None) -> list[T | Failure]:
        """Answers in the order of the questions. Works from within a notebook's own event loop, too."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self._all(questions, progress))).result()

    async def _all(self, questions: Sequence[Asked[T]], progress: Progress | None) -> list[T | Failure]:
        gate, done = asyncio.Semaphore(self.options.concurrency), 0

        async def one(question: Asked[T]) -> T | Failure:
            nonlocal done
            async with gate:
                found = await self._answer(client, question)
            done += 1
            if progress is not None:
                progress(done, len(questions))
            return found

        async with self._client() as client:
            found = await asyncio.gather(*(one(question) for question in questions))
        if found and all(isinstance(each, Failure) for each in found):
            reasons = {each.reason for each in found if isinstance(each, Failure)}
            raise EndpointError(
                f"None of {len(found)} questions was answered by {self.options.base_url}: {sorted(reasons)[0]} Nothing "
                "is lost: give the same command again to go on."
            )
        return found

    def _client(self) -> Any:
        openai, more = _require_client(), {}
        if is_loopback(_address(self.options.base_url).hostname or ""):
            # A proxy of the environment does not lead to this machine.
            more["http_client"] = openai.DefaultAsyncHttpxClient(
                trust_env=False, timeout=self.options.timeout
            )
        return openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.options.base_url,
            max_retries=self.options.retries,
            timeout=self.options.timeout,
            **more,
        )

    async def _answer(self, client: Any, question: Asked[T]) -> T | Failure:
        kept = self._kept(question)
        if kept is not None:
            return kept
        messages, why = question.messages, ""
        for _ in range(2):
            text = await self._request(client, messages, question.answer_tokens)
            if isinstance(text, Failure):
                return text
            try:
                found = question.parse(text)
            except Malformed as error:
                why = str(error)
                messages = [
                    *question.messages,
                    {"role": "assistant", "content": text[:500]},
                    {"role": "user", "content": _REMINDER},
                ]
                continue
            self._keep(question, text)
            return found
        return Failure(f"The answer is not what was asked for: {why}.")

    async def _request(self, client: Any, messages: Messages, answer_tokens: int) -> str | Failure:
        """One answer; every way in which there is none is a failure with its reason."""
        if self._over:
            return Failure(self._over)
        budget, most = self.setting.budget, _tokens_of(messages) + answer_tokens
        if not budget.allows(most):
            return Failure(f"The budget of {budget.tokens} tokens is spent.")
        budget.reserved += most
        openai = _require_client()
        try:
            response = await client.chat.completions.create(
                model=self.options.model_name, messages=messages, temperature=0, max_tokens=answer_tokens
            )
            text, used = _content(response), getattr(getattr(response, "usage", None), "total_tokens", None)
        except openai.APIStatusError as error:
            return self._failed(
                f"The endpoint refused ({error.status_code}): {error.message}", error.status_code
            )
        except openai.APITimeoutError:
            return self._failed(f"The endpoint did not answer within {self.options.timeout:g} seconds.")
        except (openai.OpenAIError, ValueError) as error:
            return self._failed(f"The endpoint could not be used: {error}")
        finally:
            budget.reserved -= most
        budget.spent += used if isinstance(used, int) and used > 0 else most
        self._in_a_row = 0
        return text if text is not None else Failure("The endpoint sent no text.")

    def _failed(self, reason: str, status: int | None = None) -> Failure:
        """A failure, in words that do not hold the key; after many in a row, or where asking again is vain, the end."""
        reason = " ".join((reason.replace(self._key, "[key]") if self._key else reason).split())[:300]
        self._in_a_row += 1
        if status in (401, 403, 404) or self._in_a_row >= GIVE_UP:
            self._over = self._over or reason
        return Failure(reason)

    # Kept answers

    def _file(self, question: Asked[Any]) -> Path | None:
        if self.setting.folder is None:
            return None
        asked = {"model": self.options.model_name, "messages": question.messages}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self.setting.folder / "answers" / digest[:2] / f"{digest}.json"

    def _kept(self, question: Asked[T]) -> T | None:
        """The answer from an earlier run; one that is damaged is asked for again."""
        file = self._file(question)
        try:
            return None if file is None else question.parse(json.loads(file.read_text("utf-8"))["answer"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _keep(self, question: Asked[T], text: str) -> None:
        file = self._file(question)
        if file is not None:
            write_text(file, json.dumps({"model": self.options.model_name, "answer": text}) + "\n")


def _content(response: Any) -> str | None:
    """The text of an answer; an answer of another form has none."""
    try:
        text = response.choices[0].message.content
    except (AttributeError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _tokens_of(messages: Messages) -> int:
    """Rather too many: some three characters to a token."""
    return sum(len(each["content"]) // 3 + 8 for each in messages)


# -- reading answers -----------------------------------------------------------------------------------------

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


def _object(text: str, key: str) -> Any:
    """What the one key of a JSON object holds; the object may stand in a code fence, and in nothing else."""
    fenced = _FENCED.fullmatch(text.strip())
    try:
        found: Any = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        raise Malformed(f"not JSON: {shown(text)}") from None
    if not isinstance(found, dict) or set(found) != {key}:
        raise Malformed(f"expected an object with the key {key!r} alone, got {shown(text)}")
    return found[key]


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


# -- the explainer and the judge -----------------------------------------------------------------------------


def _numbered(pairs: Sequence[Pair]) -> str:
    return "\n".join(f"{number}. {pair.excerpt()}" for number, pair in enumerate(pairs, start=1))


@dataclass(frozen=True)
class EndpointExplainer(EndpointOptions, Explainer):
    """Asks a language model what a signal's pairs have in common."""

    name: ClassVar[str] = "openai"

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
        messages = [
            {"role": "system", "content": _EXPLAIN},
            {"role": "user", "content": f"Examples:\n{_numbered(shown.top)}"},
        ]
        return Asked(messages, read_description, answer_tokens=150)

    def estimate(self, signals: int, pairs: int) -> Estimate:
        each = _INSTRUCTIONS + pairs * _TOKENS_PER_PAIR + 60
        return Estimate(signals, signals * each, _SECONDS_PER_REQUEST * signals / self.concurrency)


@dataclass(frozen=True)
class EndpointJudge(EndpointOptions, Judge):
    """Asks a language model, some pairs at a time, whether a description is true of them."""

    name: ClassVar[str] = "openai"

    def prepare(self, setting: Setting) -> EndpointJudge:
        self.check()
        return replace(self, setting=setting)

    def judge(self, description: Description, pairs: Sequence[Pair]) -> Labels:
        return self.judge_all([Question(description, tuple(pairs))])[0]

    def judge_all(self, questions: Sequence[Question], progress: Progress | None = None) -> list[Labels]:
        asked = [
            (place, question.pairs[start : start + BATCH])
            for place, question in enumerate(questions)
            for start in range(0, len(question.pairs), BATCH)
        ]
        texts = [self._asked(questions[place].description, pairs) for place, pairs in asked]
        labels: list[list[bool | None]] = [[] for _ in questions]
        for (place, pairs), found in zip(asked, Asker(self).ask_all(texts, progress), strict=True):
            labels[place] += [None] * len(pairs) if isinstance(found, Failure) else found
        return [tuple(each) for each in labels]

    def _asked(self, description: Description, pairs: Sequence[Pair]) -> Asked[tuple[bool, ...]]:
        text = f"Description: {description.text}\n\nExamples:\n{_numbered(pairs)}"
        messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": text}]
        return Asked(
            messages, lambda answer: read_labels(answer, len(pairs)), answer_tokens=20 + 8 * len(pairs)
        )

    def estimate(self, questions: int, pairs: int) -> Estimate:
        requests = questions * -(-pairs // BATCH)
        tokens = requests * _INSTRUCTIONS + questions * pairs * (_TOKENS_PER_PAIR + 3)
        return Estimate(requests, tokens, _SECONDS_PER_REQUEST * requests / self.concurrency)


register_explainer(EndpointExplainer.name, EndpointExplainer)
register_judge(EndpointJudge.name, EndpointJudge)
