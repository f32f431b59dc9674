"""Asking an OpenAI-compatible endpoint many questions: vLLM, llama.cpp, Ollama, ``transformers serve`` and others.

The key is read from the environment (``OPENAI_API_KEY``) and goes nowhere but into the request; an endpoint on this
machine needs none. Answers are kept by the content of their question, so a run that was cut short asks only for what
is missing. What cannot be had, for whatever reason, is a ``Failure``: it is counted apart and never taken for a "no".

Servers differ in what they take. A form for the answer (``response_format``) is asked for, since it makes small models
answer in it; where a server refuses that, or another parameter that is not needed, the question is asked without.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from headtrace.errors import HeadtraceError, InputError, shown
from headtrace.interpret.protocols import Failure, Ledger, Setting
from headtrace.progress import Progress
from headtrace.writing import write_text

T = TypeVar("T")
Messages = list[dict[str, str]]
Parameters = dict[str, Any]

KEY = "OPENAI_API_KEY"
GIVE_UP = 8
"""After so many failures in a row nothing more is asked: the endpoint is not there."""
_REMINDER = "That was not the JSON that was asked for. Answer with the JSON object and nothing else."
_NOT_NEEDED = {"max_tokens": "max_completion_tokens", "temperature": None, "response_format": None}
"""Parameters that some servers refuse, and the name that they know them by, if any."""


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

    @property
    def ledger(self) -> Ledger | None:
        return None if self.setting is None else self.setting.ledger

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


@dataclass(frozen=True)
class Asked(Generic[T]):
    """A question to a language model, and how its answer is read."""

    messages: Messages
    parse: Callable[[str], T]
    """Raises ``Malformed`` for anything but what was asked for."""
    answer_tokens: int
    form: Mapping[str, Any] | None = None
    """The JSON schema of the answer, for servers that hold a model to it."""

    def parameters(self, without: frozenset[str]) -> Parameters:
        """Of a request, besides model and messages; ``without`` those that the server refuses."""
        every: Parameters = {"temperature": 0, "max_tokens": self.answer_tokens}
        if self.form is not None:
            form = {"name": "answer", "schema": dict(self.form)}
            every["response_format"] = {"type": "json_schema", "json_schema": form}
        for name in without:
            _refused(every, name)
        return every


def _refused(parameters: Parameters, name: str) -> None:
    """Take a parameter that a server refuses out of a request, or give it the name that it knows."""
    value, other = parameters.pop(name, None), _NOT_NEEDED[name]
    if other is not None:
        parameters[other] = value


class Asker:
    """Asks an endpoint many questions at a time, within the budget, and each only once."""

    def __init__(self, options: EndpointOptions) -> None:
        options.check()
        self.options = options
        self.setting = options.setting or Setting()
        self._key = os.environ.get(KEY) or ""
        self._in_a_row, self._over = 0, ""
        self._refused: frozenset[str] = frozenset()

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
        failed = [each for each in found if isinstance(each, Failure)]
        self.setting.ledger.add(len(found), failed)
        if failed and len(failed) == len(found) and not any(each.unreadable for each in failed):
            raise EndpointError(
                f"None of {len(found)} questions was answered by {self.options.base_url}: "
                f"{min(each.reason for each in failed)} Nothing is lost: give the same command again to go on."
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
            text = await self._request(client, messages, question)
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
        return Failure(f"The answer is not what was asked for: {why}.", unreadable=True)

    async def _request(self, client: Any, messages: Messages, question: Asked[Any]) -> str | Failure:
        """One answer; every way in which there is none is a failure with its reason."""
        if self._over:
            return Failure(self._over)
        budget, most = self.setting.budget, _tokens_of(messages) + question.answer_tokens
        if not budget.allows(most):
            return Failure(f"The budget of {budget.tokens} tokens is spent.")
        budget.reserved += most
        openai = _require_client()
        try:
            response = await self._completion(client, messages, question)
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
        if text is None:
            return self._failed(f"The endpoint sent something else than the text of an answer: {shown(response)}")
        self._in_a_row = 0
        return text

    async def _completion(self, client: Any, messages: Messages, question: Asked[Any]) -> Any:
        """The response of the server; parameters that it refuses and that are not needed are left out from then on."""
        openai, without = _require_client(), self._refused
        while True:
            parameters = question.parameters(without)
            try:
                response = await client.chat.completions.create(
                    model=self.options.model_name, messages=messages, **parameters
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                named = _named(parameters, error.message)
                if named is None:
                    raise
                without |= {named}
                continue
            self._refused |= without
            return response

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


def _named(parameters: Parameters, message: str) -> str | None:
    """The parameter that a refusal is about: one that it names, else the form of the answer, if there is one.

    >>> _named({"temperature": 0, "max_tokens": 9}, "Unsupported parameter: 'max_tokens' is not supported")
    'max_tokens'
    >>> _named({"response_format": {}}, "bad request"), _named({"temperature": 0}, "The text is too long")
    ('response_format', None)
    """
    there = [name for name in _NOT_NEEDED if name in parameters]
    named = [name for name in there if name in message]
    return named[0] if named else ("response_format" if "response_format" in there else None)


def _tokens_of(messages: Messages) -> int:
    """Rather too many: some three characters to a token."""
    return sum(len(each["content"]) // 3 + 8 for each in messages)
