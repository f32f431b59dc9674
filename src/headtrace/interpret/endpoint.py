"""An explainer and a judge behind an OpenAI-compatible endpoint: vLLM, llama.cpp, Ollama, ``transformers serve``, ...

The key is read from the environment (``OPENAI_API_KEY``) and appears nowhere but in the request; an endpoint on this
machine needs none. Retries, their pauses and timeouts are those of the OpenAI client. Answers are cached by the content
of their question, so an interrupted run only asks for what is missing. Whatever goes wrong is a ``Failure``: it is
counted separately and never taken for a "no".

What is asked is in ``chat_questions.py``. The judge may be asked about fewer pairs at a time (``batch``), which a small
model needs. A run with batch files (``batch_files.py``) sends nothing: it writes the questions that have no answer yet
to a file for the service, and takes the answers from the file that the service returns.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from ipaddress import ip_address
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from headtrace.errors import HeadtraceError, InputError, shown
from headtrace.interpret.answer_files import KeptAnswers
from headtrace.interpret.chat_questions import (
    ALTERNATIVES,
    REMINDER,
    TOKENS_OF_INSTRUCTIONS,
    TOKENS_PER_PAIR,
    ChatQuestion,
    Malformed,
    Messages,
    also_refused,
    ask_for_labels,
    ask_for_odds,
    ask_for_words,
    parameters,
    text_of,
)
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
from headtrace.lazy import require
from headtrace.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

KEY = "OPENAI_API_KEY"
UNREACHABLE, REFUSED = 3, 8
"""After this many questions in a row that found no endpoint, or that it refused, a run stops asking it."""
_SECONDS_PER_REQUEST = 3.0
KNOWN = 10
"""Pairs of a kind that the explainer saw, at most, by which a judge that weighs finds out what counts as a yes."""
CONTRAST = 10
"""Random pairs that an explainer is shown, at most."""


class EndpointError(HeadtraceError):
    """An endpoint gave no answer at all."""


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
    around: int = 8
    """How many tokens of an example to show on each side of the source and of the destination."""
    context: RunContext | None = None
    """Cache, budget and counts; a run provides them."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.retries < 0 or self.around < 0 or not self.timeout > 0:
            raise InputError(
                f"concurrency={self.concurrency}, retries={self.retries}, around={self.around}, "
                f"timeout={self.timeout}: at least one request at a time, no fewer than 0 retries and 0 tokens around, "
                "and a time above 0."
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
        self.check(sends=context.batch is None)
        return replace(self, context=context)

    def check(self, *, sends: bool = True) -> None:
        """Raise ``InputError`` where the endpoint cannot even be asked. A run that ``sends`` nothing needs no key."""
        if not self.model_name:
            raise InputError(
                "The endpoint needs the name of a model: give --model-name (model_name='...'), as the server knows it."
            )
        if not sends:
            return
        _openai()
        try:
            address = urlsplit(self.base_url)
            valid = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:
            address, valid = urlsplit(""), False
        if not valid:
            raise InputError(
                f"{shown(self.base_url)} is not the address of an endpoint, like http://localhost:8000/v1."
            )
        if address.username or address.password:
            raise InputError(
                "The address of the endpoint holds a password, which would be written with the results: set "
                f"{KEY} instead."
            )
        if not os.environ.get(KEY) and not self.on_this_machine:
            raise InputError(
                f"There is no key for {self.base_url}: set {KEY} in the environment. Only an endpoint on this machine "
                "(--base-url http://localhost:8000/v1) needs none."
            )


def _parsed(question: ChatQuestion[T], text: str) -> T | Failure:
    try:
        return question.parse(text)
    except Malformed as error:
        return Failure(f"The answer is not what was asked for: {error}.", unreadable=True)


class _Asker:
    """Asks an endpoint many questions at a time, within the budget, and each only once."""

    def __init__(self, options: EndpointOptions) -> None:
        self.options = options
        self.context = options.context or RunContext()
        options.check(sends=self.context.batch is None)
        self.answers = None if self.context.folder is None else KeptAnswers(self.context.folder)
        self.key = os.environ.get(KEY) or ""
        self.failed_in_a_row = 0
        self.refused = dict.fromkeys(ALTERNATIVES, 0)
        """For each parameter, how many of its alternatives the server has refused."""

    def ask_all(self, questions: Sequence[ChatQuestion[T]], progress: Progress | None) -> list[T | Failure]:
        """Answers in the order of the questions."""
        found = (
            self._send_all(questions, progress) if self.context.batch is None else self._from_file(questions)
        )
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

    def _from_file(self, questions: Sequence[ChatQuestion[T]]) -> list[T | Failure]:
        """The kept answers. If some are missing, their questions are written to the batch file and the run stops."""
        kept: list[T | Failure] = []
        missing: list[ChatQuestion[T]] = []
        for question in questions:
            # A description may be None: an answer that says that there is none.
            text = self.answers.read(question.id_for(self.options.model_name)) if self.answers else None
            if text is None:
                missing.append(question)
            else:
                kept.append(_parsed(question, text))
        if missing and self.context.batch is not None:
            raise self.context.batch.write(missing, self.options.model_name)
        return kept

    def _send_all(self, questions: Sequence[ChatQuestion[T]], progress: Progress | None) -> list[T | Failure]:
        """Ask over the network. Also works inside a notebook's running event loop."""
        from anyio.from_thread import start_blocking_portal

        with start_blocking_portal() as thread:  # an exception in this block cancels the requests under way
            answers = thread.start_task_soon(self._ask_all, questions, progress)
            while not wait([answers], timeout=0.2).done:  # returns now and then, to notice an interrupt
                pass
            return answers.result()

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
        """The kept answer, or a new one; an answer in the wrong format gets one reminder."""
        id = question.id_for(self.options.model_name)
        text = None if self.answers is None else self.answers.read(id)
        if text is not None and not isinstance(kept := _parsed(question, text), Failure):
            return kept
        messages, problem = question.messages, ""
        for _ in range(2 if question.schema else 1):
            text = await self._request(client, messages, question)
            if isinstance(text, Failure):
                return text
            try:
                found = question.parse(text)
            except Malformed as error:
                problem = str(error)
                reminder = [
                    {"role": "assistant", "content": text[:500]},
                    {"role": "user", "content": REMINDER},
                ]
                messages = question.messages + reminder
                continue
            if self.answers is not None:
                self.answers.keep(id, self.options.model_name, text)
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
            text = text_of(response.model_dump(warnings=False)["choices"][0])
        except (AttributeError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            return self._failure(f"The endpoint sent something other than an answer: {shown(response)}")
        self.failed_in_a_row = 0
        return text

    async def _complete(self, client: Any, messages: Messages, question: ChatQuestion[Any]) -> Any:
        """The server's response; parameters that it refuses are replaced, from then on for all questions."""
        openai, refused = _openai(), dict(self.refused)
        while True:
            try:
                response = await client.chat.completions.create(
                    model=self.options.model_name, messages=messages, **parameters(question, refused)
                )
            except openai.APIStatusError as error:
                name = also_refused(refused, error.status_code, error.message)
                if name is None:
                    raise
                refused[name] += 1
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
        questions = [ask_for_words(each.top, each.random[:CONTRAST], self.around) for each in shown]
        return _Asker(self).ask_all(questions, progress)

    def estimate(self, signals: int, pairs: int) -> Estimate:
        tokens = signals * (2 * TOKENS_OF_INSTRUCTIONS + (pairs + CONTRAST) * TOKENS_PER_PAIR + 40)
        return Estimate(signals, tokens, _SECONDS_PER_REQUEST * signals / self.concurrency)


@dataclass(frozen=True)
class EndpointJudge(EndpointOptions, Judge):
    """Asks a language model, some pairs at a time, whether a description is true of them."""

    name: ClassVar[str] = "openai"

    batch: int = 10
    """How many pairs to ask about at a time. A small model gives the right number of labels only for one or two."""
    pairs: int = 20
    """How many pairs of a kind (highest, random, ... of each corpus) to ask about for a signal, at most."""
    weigh: bool = False
    """Ask about one pair at a time how probable "True" is, and say yes above the value that best tells pairs apart that
    the explainer saw. For a small model that says yes to everything. Needs a server with logprobs."""

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
        if self.weigh:
            return self._weighed(questions, progress)
        batches = [
            (place, question.pairs[start : start + self.batch])
            for place, question in enumerate(questions)
            for start in range(0, len(question.pairs), self.batch)
        ]
        asked = [
            ask_for_labels(questions[place].description, pairs, self.batch, self.around)
            for place, pairs in batches
        ]
        labels: list[list[bool | None]] = [[] for _ in questions]
        for (place, pairs), found in zip(batches, _Asker(self).ask_all(asked, progress), strict=True):
            labels[place] += [None] * len(pairs) if isinstance(found, Failure) else found
        return [tuple(each) for each in labels]

    def odds(
        self, asked: Sequence[tuple[Description, Pair]], progress: Progress | None = None
    ) -> list[float | None]:
        """Log-odds of "True" for each description of a pair; None where there was no answer."""
        found = _Asker(self).ask_all([ask_for_odds(*each, self.around) for each in asked], progress)
        return [None if isinstance(each, Failure) else each for each in found]

    def _weighed(self, questions: Sequence[BlindQuestion], progress: Progress | None) -> list[Labels]:
        """Yes where "True" is more probable than what tells the known pairs of a question apart best."""
        known = [[*_some(each.known, True), *_some(each.known, False)] for each in questions]
        asked = [
            (each.description, pair)
            for each, own in zip(questions, known, strict=True)
            for pair in (*(pair for pair, _ in own), *each.pairs)
        ]
        odds = iter(self.odds(asked, progress))
        labels: list[Labels] = []
        for each, own in zip(questions, known, strict=True):
            told = [(high, odd) for (_, high), odd in zip(own, odds, strict=False) if odd is not None]
            least = least_for_yes(told) if own else 0.0
            labels.append(
                tuple(
                    None if odd is None or least is None else odd > least
                    for odd in islice(odds, len(each.pairs))
                )
            )
        return labels

    def estimate(self, questions: int, pairs: int) -> Estimate:
        if self.weigh:
            return replace(self, weigh=False, batch=1).estimate(questions, pairs + 2 * KNOWN)
        requests = questions * -(-pairs // self.batch)
        tokens = requests * (TOKENS_OF_INSTRUCTIONS + 30) + questions * pairs * (TOKENS_PER_PAIR + 3)
        return Estimate(requests, tokens, _SECONDS_PER_REQUEST * requests / self.concurrency)


def _some(known: Sequence[tuple[Pair, bool]], high: bool) -> list[tuple[Pair, bool]]:
    return [each for each in known if each[1] is high][:KNOWN]


def least_for_yes(told: Sequence[tuple[bool, float]]) -> float | None:
    """The log-odds above which a yes best tells high pairs from others; None where one of the two kinds is missing.

    >>> least_for_yes([(True, 2.0), (True, 1.5), (False, 1.0), (False, 0.5)])
    1.25
    """
    high, low = ([odd for is_high, odd in told if is_high is wanted] for wanted in (True, False))
    if not high or not low:
        return None
    values = sorted({odd for _, odd in told})
    between = [(one + next) / 2 for one, next in pairwise(values)] or values

    def separation(least: float) -> float:
        return sum(odd > least for odd in high) / len(high) - sum(odd > least for odd in low) / len(low)

    return max(between, key=separation)


register_explainer(EndpointExplainer.name, EndpointExplainer)
register_judge(EndpointJudge.name, EndpointJudge)
