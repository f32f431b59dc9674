"""Asking an OpenAI-compatible endpoint many questions: vLLM, llama.cpp, Ollama, ``transformers serve`` and others.

The key is read from the environment (``OPENAI_API_KEY``) and goes nowhere but into the request; an endpoint on this
machine needs none. Answers are kept by the content of their question, so a run that was cut short asks only for what
is missing. What cannot be had, for whatever reason, is a ``Failure``: it is counted apart and never taken for a "no".

Servers differ in what they take. A form for the answer (``response_format``) is asked for, since it makes small models
keep to it; where a server refuses that or another parameter, the question is asked in another way or without.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from headtrace.errors import HeadtraceError, InputError, shown
from headtrace.extras import require
from headtrace.interpret.protocols import Failure, Ledger, Setting
from headtrace.progress import Progress
from headtrace.writing import write_text

T = TypeVar("T")
Messages = list[dict[str, str]]
Parameters = dict[str, Any]

KEY = "OPENAI_API_KEY"
GONE = 3
"""After so many questions in a row that no endpoint was there for, each tried several times, nothing more is asked."""
GIVE_UP = 8
"""Nor after so many in a row that it refused."""
_REMINDER = "That was not the JSON that was asked for. Answer with the JSON object and nothing else."

Ways = dict[str, int]
"""Of parameters that some servers refuse: how many of their ways (see ``Asked.parameters``) were refused."""
_LAST_WAYS = {"max_tokens": 1, "temperature": 1, "response_format": 2}


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
    without = "Without it there are the explainers lexical and vocabulary, and the judge lexical."
    require("openai", extra="interpret", what="Asking an endpoint", instead=without)
    import openai

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

    def parameters(self, refused: Ways) -> Parameters:
        """Of a request, besides model and messages: each in the first way that the server did not refuse.

        >>> asked = Asked([], str, 20, form={"type": "object"})
        >>> asked.parameters({"response_format": 1, "max_tokens": 1})["response_format"]
        {'type': 'json_object', 'schema': {'type': 'object'}}
        >>> asked.parameters({"response_format": 2, "max_tokens": 1, "temperature": 1})
        {'max_completion_tokens': 20}
        """
        limit = ("max_tokens", "max_completion_tokens")[refused.get("max_tokens", 0)]
        found: Parameters = {limit: self.answer_tokens}
        if not refused.get("temperature"):
            found["temperature"] = 0
        if self.form is not None and refused.get("response_format", 0) < _LAST_WAYS["response_format"]:
            named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.form}}
            bare = {"type": "json_object", "schema": self.form}
            found["response_format"] = (named, bare)[refused.get("response_format", 0)]
        return found


class Asker:
    """Asks an endpoint many questions at a time, within the budget, and each only once."""

    def __init__(self, options: EndpointOptions) -> None:
        options.check()
        self.options = options
        self.setting = options.setting or Setting()
        self._key = os.environ.get(KEY) or ""
        self._in_a_row = 0
        self._refused: Ways = {}
        self._interrupt: Callable[[], Any] = lambda: None

    def ask_all(self, questions: Sequence[Asked[T]], progress: Progress | None = None) -> list[T | Failure]:
        """Answers in the order of the questions. Works from within a notebook's own event loop, too."""
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(lambda: asyncio.run(self._all(questions, progress)))
            try:
                while not wait([answers], timeout=0.2).done:  # an interrupt may come between any two
                    pass
            except KeyboardInterrupt:
                with suppress(RuntimeError):  # it is over already
                    self._interrupt()
                raise
            return answers.result()

    async def _all(self, questions: Sequence[Asked[T]], progress: Progress | None) -> list[T | Failure]:
        loop, own = asyncio.get_running_loop(), asyncio.current_task()
        assert own is not None
        self._interrupt = lambda: loop.call_soon_threadsafe(own.cancel)
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
        failed, ledger = [each for each in found if isinstance(each, Failure)], self.setting.ledger
        ledger.add(len(found), failed)
        if failed and not ledger.answered:
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
        if self.options.base_url in self.setting.gone:
            return Failure(self.setting.gone[self.options.base_url])
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
            return self._failed(
                f"The endpoint sent something else than the text of an answer: {shown(response)}"
            )
        self._in_a_row = 0
        return text

    async def _completion(self, client: Any, messages: Messages, question: Asked[Any]) -> Any:
        """The response of the server, which is asked in other ways until it takes one; that is kept to from then on."""
        openai, refused = _require_client(), dict(self._refused)
        while True:
            try:
                response = await client.chat.completions.create(
                    model=self.options.model_name, messages=messages, **question.parameters(refused)
                )
            except openai.APIStatusError as error:
                named = _refusal(error.message, error.status_code, refused)
                if named is None:
                    raise
                refused[named] = refused.get(named, 0) + 1
                continue
            self._refused = refused
            return response

    def _failed(self, reason: str, status: int | None = None) -> Failure:
        """A failure, in words that do not hold the key; after many in a row, or where asking again is vain, the end."""
        reason = " ".join((reason.replace(self._key, "[key]") if self._key else reason).split())[:300]
        self._in_a_row += 1
        if status in (401, 403, 404) or self._in_a_row >= (GONE if status is None else GIVE_UP):
            self.setting.gone.setdefault(self.options.base_url, reason)
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


def _refusal(message: str, status: int, refused: Ways) -> str | None:
    """The parameter that a refusal is about and that there is another way for: one that it names, else the form.

    >>> _refusal("'max_tokens' is not supported with this model", 400, {})
    'max_tokens'
    >>> _refusal("bad request", 400, {}), _refusal("too busy", 503, {}), _refusal("bad request", 400, _LAST_WAYS)
    ('response_format', None, None)
    """
    left = [name for name, last in _LAST_WAYS.items() if refused.get(name, 0) < last]
    named = [name for name in left if name in message]
    if named:
        return named[0]
    return "response_format" if status in (400, 422) and "response_format" in left else None


def _tokens_of(messages: Messages) -> int:
    """Rather too many: some three characters to a token."""
    return sum(len(each["content"]) // 3 + 8 for each in messages)
