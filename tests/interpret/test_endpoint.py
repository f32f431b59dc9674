"""The endpoint against a real HTTP server: right answers are used, every fault is a failure, nothing is asked twice."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from runpy import run_path
from signal import SIGINT, default_int_handler, pthread_kill, signal

import pytest

from headtrace.errors import InputError
from headtrace.interpret import (
    Description,
    EndpointError,
    EndpointExplainer,
    EndpointJudge,
    Failure,
    Pair,
    interpret_examples,
)
from headtrace.interpret.chat_questions import (
    Malformed,
    ask_for_labels,
    ask_for_odds,
    ask_for_words,
    read_description,
    read_labels,
)
from headtrace.interpret.endpoint import KEY, KNOWN
from headtrace.interpret.explainers import BlindQuestion, RunContext, TokenBudget
from tests.interpret.made_up_signals import previous, same_token, signal_by, to_animal, two_corpora
from tests.interpret.serving import Answer, Raw, Server, completion, good, serving

SIGNALS = [signal_by(same_token, f"L0H0:{channel}", seed=channel) for channel in range(4)]
SECOND = [signal_by(same_token, f"L0H0:{channel}", seed=channel + 1000) for channel in range(4)]


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)


def _explainer(url: str, folder=None, budget: int | None = None, **options) -> EndpointExplainer:
    options = {"retries": 0, "timeout": 10.0, "concurrency": 2, **options}
    return EndpointExplainer(url, "m", **options).prepare(RunContext(None, folder, TokenBudget(budget)))


def test_a_run_through_an_endpoint_has_right_statistics(tmp_path):
    with serving(good) as server:
        options = {"base_url": server.url, "model_name": "m", "retries": 0}
        context = RunContext(None, tmp_path)
        explains = EndpointExplainer(**options).prepare(context)
        found = interpret_examples(
            SIGNALS, second=SECOND, explainer=explains, judge=EndpointJudge(**options).prepare(context)
        )
        asked = server.asked
        again = interpret_examples(
            SIGNALS, second=SECOND, explainer=explains, judge=EndpointJudge(**options).prepare(context)
        )
        assert server.asked == asked, "every answer is kept"
    assert found.fraction.value == 1.0
    assert all(each.counts.recall.value == 1.0 for each in found.signals)
    assert found.failures == {"signals": 0, "too few examples": 0, "pairs": 0}
    assert again.to_dict() == found.to_dict()


def test_judges_are_not_told_scores_or_kinds():
    with serving(good) as server:
        EndpointJudge(server.url, "m", retries=0).judge(Description("x"), SIGNALS[0].top[:3])
        text = json.dumps(server.messages)
    assert "score" not in text
    assert "top" not in text.replace("stop", "")


def test_an_endpoint_that_is_not_there_is_told_and_given_up():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EndpointError, match=r"None of 4 questions.*same command again"):
        _explainer(url).explain_all(SIGNALS)


def test_an_endpoint_that_hangs_is_a_failure():
    with serving(lambda n, m: None if n == 1 else good(n, m)) as server:
        found = _explainer(server.url, timeout=2.0, concurrency=1).explain_all(SIGNALS)
    assert isinstance(found[0], Failure)
    assert "within 2 seconds" in found[0].reason
    assert not any(isinstance(each, Failure) for each in found[1:])


def test_malformed_answers_are_asked_for_once_more_and_then_fail():
    answers = {1: "Sure! The pairs ...", 3: '{"description": 3}', 4: "[]"}
    with serving(lambda n, m: answers.get(n) or good(n, m)) as server:
        found = _explainer(server.url, concurrency=1).explain_all(SIGNALS[:2])
        assert server.asked == 4
    assert not isinstance(found[0], Failure)
    assert isinstance(found[1], Failure)
    assert "not what was asked for" in found[1].reason


def test_a_rate_limit_is_waited_for_and_the_question_asked_again():
    with serving(lambda n, m: (429, {"Retry-After": "0.1"}) if n == 1 else good(n, m)) as server:
        found = _explainer(server.url, retries=3, concurrency=1).explain_all(SIGNALS[:1])
        assert server.asked == 2
    assert not isinstance(found[0], Failure)


def _refusing(refused: str, status: int, told: str) -> Callable[[Server], Callable[..., Answer]]:
    """A server that answers only requests without a parameter (or without a part of it)."""
    return lambda server: (
        lambda n, m: Raw(told, status) if refused in json.dumps(server.bodies[n - 1]) else good(n, m)
    )


@pytest.mark.parametrize(
    ("refused", "status", "told", "instead"),
    [
        # llama-cpp-python: a validation error with status 500; it knows the form under another name.
        (
            "json_schema",
            500,
            "{\"error\": {\"message\": \"('body', 'response_format', 'type') should be text\"}}",
            "json_object",
        ),
        # A server that says only that something is wrong, and knows no form at all.
        ("response_format", 400, '{"detail": "Bad Request"}', "temperature"),
        # OpenAI's own newer models.
        (
            "max_tokens",
            400,
            '{"error": {"message": "Unsupported parameter: \'max_tokens\'", "param": "max_tokens"}}',
            "max_completion_tokens",
        ),
        (
            "temperature",
            400,
            '{"error": {"message": "\'temperature\' does not support 0 with this model."}}',
            "max_tokens",
        ),
    ],
)
def test_what_a_server_refuses_is_left_out_from_then_on(refused, status, told, instead):
    with serving(lambda n, m: answer(n, m)) as server:
        answer = _refusing(refused, status, told)(server)
        found = _explainer(server.url, concurrency=1).explain_all(SIGNALS[:3])
        sent = [json.dumps(body) for body in server.bodies]
    assert not any(isinstance(each, Failure) for each in found)
    tried = sum(refused in each for each in sent)
    assert [refused in each for each in sent] == [True] * tried + [False] * 3, "not tried again"
    assert tried <= 2
    assert all(instead in each for each in sent[tried:])


def test_the_form_of_an_answer_is_asked_for():
    with serving(good) as server:
        EndpointJudge(server.url, "m", retries=0).judge(Description("x"), SIGNALS[0].top[:3])
        (body,) = server.bodies
    form = body["response_format"]["json_schema"]["schema"]["properties"]["labels"]
    assert (form["minItems"], form["maxItems"], form["items"]) == (3, 3, {"type": "boolean"})


def test_a_server_that_does_not_say_what_it_used_is_counted_by_the_length_of_questions():
    with serving(lambda n, m: completion(good(n, m))) as server:
        explainer = _explainer(server.url, budget=10**6)
        explainer.explain_all(SIGNALS)
        characters = sum(len(each["content"]) for messages in server.messages for each in messages)
    assert explainer.context is not None
    assert characters / 3 < explainer.context.budget.spent < characters


@pytest.mark.parametrize(
    "strange",
    [
        Raw("{half of it"),
        Raw("[]"),
        Raw("null"),
        Raw('{"choices": []}'),
        Raw('{"choices": [{"message": {"content": [1]}}]}'),
        Raw("<html>a login page</html>", content_type="text/html"),
        Raw('data: {"choices": [{"delta": {"content": "x"}}]}\n\n', content_type="text/event-stream"),
        Raw("<html>Bad Gateway</html>", 502, "text/html"),
        completion(None),
    ],
)
def test_what_is_no_completion_is_a_failure(strange):
    with serving(lambda n, m: strange if n == 1 else good(n, m)) as server:
        found = _explainer(server.url, concurrency=1).explain_all(SIGNALS[:2])
    assert isinstance(found[0], Failure)
    assert not found[0].unreadable
    assert not isinstance(found[1], Failure)


def test_answers_that_cannot_be_read_are_counted_apart():
    """A model that never keeps to the form was there and answered: that is a result, not an error."""
    with serving(lambda *_: "I would say they are nice.") as server:
        explains = _explainer(server.url, concurrency=1)
        found = interpret_examples(
            SIGNALS, explainer=explains, judge=EndpointJudge(server.url, "m", retries=0)
        )
    assert found.failures["signals"] == len(SIGNALS)
    assert (found.fraction.total, found.asked.questions, found.asked.unreadable) == (0, 4, 4)
    assert found.asked.unanswered == 0
    assert "Of 4 questions to a language model 0 have no answer, and 4 one" in found.summary()


def test_every_example_is_one_line_whatever_the_text_has():
    first = SIGNALS[0].top[0]
    (pair,) = (replace(first, tokens=("\n", "a\r\n", "\u2028") * len(first.tokens)),)
    with serving(lambda *_: '{"labels": [true]}') as server:
        EndpointJudge(server.url, "m", retries=0).judge(Description("x"), [pair])
        asked = server.messages[0][-1]["content"]
    assert len(asked.splitlines()) == 4
    assert "⏎" in asked


TOKENS = (" the", " cat", "\n", " a", " cat", " sat")
ASKED = {
    "words": lambda pair, around: ask_for_words([pair], [pair], around),
    "labels": lambda pair, around: ask_for_labels(Description("x"), [pair], 1, around),
    "odds": lambda pair, around: ask_for_odds(Description("x"), pair, around),
}


@pytest.mark.parametrize(
    ("dest", "src", "told", "text"),
    [
        (4, 1, '" cat" to " cat", 3 tokens later', ", in:  the[[ cat]]⏎ a<< cat>> sat"),
        (5, 4, '" cat" to " sat", 1 token later', ", in:  the cat⏎ a[[ cat]]<< sat>>"),
        (2, 2, '"⏎" to itself', ", in:  the cat<<[[⏎]]>> a cat sat"),
    ],
)
@pytest.mark.parametrize("asked", ASKED)
def test_a_question_names_both_tokens_and_their_distance_before_the_marked_text(dest, src, told, text, asked):
    pair = Pair("", dest, src, 1.0, (0, 1, 2, 3, 1, 4), TOKENS)
    for around, line in ((8, told + text), (0, told)):
        question = ASKED[asked](pair, around)
        assert (
            question.messages[-1]["content"].splitlines()[-1].removeprefix("1. ").removeprefix("Pair: ")
            == line
        )
        assert ("[[" in json.dumps(question.messages)) is (around > 0)


@pytest.mark.parametrize("asked", ASKED)
def test_worked_examples_look_like_the_question(asked):
    """The tokens that are named are those that are marked, and the answers have no pattern to go on with."""
    question = ASKED[asked](Pair("", 1, 0, 1.0, (0, 1), (" a", " b")), 8)
    lines = [line for each in question.messages[1:] for line in each["content"].splitlines() if "[[" in line]
    assert len(lines) == {"words": 6 * 4 + 4 + 2, "labels": 7, "odds": 13}[asked]
    for line in lines:
        found = re.search(r'"(.*)" to "(.*)", \d+ tokens? later, in: .*\[\[(.*)\]\].*<<(.*)>>', line)
        assert found is not None, line
        assert (found[1], found[2]) == (found[3], found[4])
    told = [each["content"] for each in question.messages if each["role"] == "assistant"]
    if asked == "words":
        assert len(set(told)) == len(told) == 7
    else:
        yes = ["true" in each.lower() for each in told]
        assert sum(yes) == len(yes) / 2
        assert yes not in ([True, False] * (len(yes) // 2), [False, True] * (len(yes) // 2))


def test_a_judge_that_weighs_compares_with_pairs_that_are_known():
    """A model that says True to everything is read by how probable that is, against pairs that the explainer saw."""
    same, others = (
        SIGNALS[0].top,
        [pair for pair in SIGNALS[0].random if pair.src < pair.dest and not same_token(pair)],
    )
    known = [
        *((pair, True) for pair in same[3 : KNOWN + 3]),
        *((pair, False) for pair in others[4 : KNOWN + 4]),
    ]
    question = BlindQuestion(Description("x"), (*same[:3], *others[:4]), tuple(known))
    with serving(good) as server:
        judge = EndpointJudge(server.url, "m", retries=0, concurrency=1, weigh=True)
        assert judge.judge_all([question]) == [(True,) * 3 + (False,) * 4]
        assert server.asked == 2 * KNOWN + 7
        assert all(body["logprobs"] and body["max_tokens"] == 1 for body in server.bodies)
        assert judge.judge(question.description, same[:3]) == (True,) * 3, (
            "without known pairs: more than even"
        )
    with serving(lambda n, m: "True" if n <= 2 * KNOWN else good(n, m)) as server:
        judge = EndpointJudge(server.url, "m", retries=0, concurrency=1, weigh=True)
        assert judge.judge_all([question]) == [(None,) * 7]


def test_a_run_with_a_judge_that_weighs(tmp_path):
    with serving(good) as server:
        judge = EndpointJudge(server.url, "m", retries=0, weigh=True, pairs=10)
        found = interpret_examples(SIGNALS[:2], second=SECOND[:2], judge=judge)
    for each in found.signals:
        assert (each.counts.recall.value, each.in_second.recall.value) == (1.0, 1.0)
        assert (each.counts.false_positive_rate.value or 0) < 0.2
    assert found.failures["pairs"] == 0


def test_a_server_without_logprobs_cannot_be_weighed():
    with serving(lambda *_: "True") as server:
        labels = EndpointJudge(server.url, "m", retries=0, weigh=True).judge(
            Description("x"), SIGNALS[0].top[:2]
        )
    assert labels == (None, None)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 10])
def test_worked_questions_have_as_many_pairs_as_are_asked_about(batch):
    with serving(good) as server:
        EndpointJudge(server.url, "m", retries=0, concurrency=1, batch=batch).judge(
            Description("x"), SIGNALS[0].top[:10]
        )
        assert server.asked == -(-10 // batch)
        told = [each["content"] for each in server.messages[0] if each["role"] == "assistant"]
    assert {len(json.loads(each)["labels"]) for each in told} == {min(batch, 4)}
    assert {label for each in told for label in json.loads(each)["labels"]} == {True, False}


def _unsure(number: int, messages: list[dict[str, str]]) -> Answer:
    """Labels that are right more often than not, and now and then no answer or one that cannot be read."""
    text = good(number, messages)
    if '{"description"' in messages[0]["content"]:
        return text
    drawn = Random(messages[-1]["content"])
    if (fault := drawn.random()) < 0.08:
        return 500 if fault < 0.05 else "Yes."
    return json.dumps({"labels": [each != (drawn.random() < 0.005) for each in json.loads(text)["labels"]]})


def test_every_number_of_a_result_is_that_of_its_labels(tmp_path):
    """The study computes all numbers again from the raw labels, without headtrace's own statistics."""
    studied = run_path(str(Path(__file__).parents[2] / "docs/studies/words_endpoint.py"))
    rules = (same_token, previous, to_animal, lambda _: True)
    both = [two_corpora(rules[i % 4], f"L0H{i}:0", noise=0.3 * (i % 4 == 1), seed=i) for i in range(12)]
    with serving(_unsure) as server:
        judge = EndpointJudge(server.url, "m", retries=0, batch=5)
        signals, second = ([pair[corpus] for pair in both] for corpus in (0, 1))
        found = interpret_examples(signals, second=second, explainer=_explainer(server.url), judge=judge)
    told = json.loads(found.save(tmp_path).joinpath("interpretation.json").read_text())
    studied["check_statistics"](told)
    letters = {letter for each in told["signals"] for group in each["labels"].values() for letter in group}
    assert letters == {"y", "n", "?"}
    assert 0 < told["interpretable"]["count"] < told["interpretable"]["of"]
    told["signals"][0]["labels"]["top"] = told["signals"][0]["labels"]["top"].swapcase()
    with pytest.raises(AssertionError):
        studied["check_statistics"](told)


def test_an_endpoint_that_dies_loses_nothing_and_the_next_run_goes_on(tmp_path):
    with serving(lambda n, m: good(n, m) if n <= 2 else 500) as server:
        found = _explainer(server.url, tmp_path, concurrency=1).explain_all(SIGNALS)
        assert [isinstance(each, Failure) for each in found] == [False, False, True, True]
    with serving(good) as server:
        again = _explainer(server.url, tmp_path).explain_all(SIGNALS)
        assert server.asked == 2, "only what is missing is asked for"
    assert not any(isinstance(each, Failure) for each in again)
    assert again[:2] == found[:2]


def test_an_interrupt_ends_the_asking_at_once_and_keeps_what_there_is(tmp_path):
    def answer(number: int, messages: list[dict[str, str]]) -> Answer:
        if number == 1:
            return good(number, messages)
        pthread_kill(threading.main_thread().ident or 0, SIGINT)
        return None

    before = signal(SIGINT, default_int_handler)  # a suite that runs in the background ignores it
    try:
        with serving(answer) as server:
            explainer = _explainer(server.url, tmp_path, concurrency=1, timeout=60.0)
            with pytest.raises(KeyboardInterrupt):
                explainer.explain_all(SIGNALS)
            assert server.hanging == 1, "not until the endpoint answers, or fails to"
    finally:
        signal(SIGINT, before)
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_a_damaged_answer_on_disk_is_asked_for_again(tmp_path):
    with serving(good) as server:
        _explainer(server.url, tmp_path).explain_all(SIGNALS[:1])
        (file,) = tmp_path.rglob("*.json")
        file.write_text("{half")
        _explainer(server.url, tmp_path).explain_all(SIGNALS[:1])
        assert server.asked == 2


def test_failures_of_the_judge_are_never_negatives():
    with serving(lambda n, m: good(n, m) if n % 2 else 500) as server:
        labels = EndpointJudge(server.url, "m", retries=0, concurrency=1).judge(
            Description("x"), SIGNALS[0].top[:20]
        )
    assert labels[:10] == (True,) * 10
    assert labels[10:] == (None,) * 10


def test_the_budget_is_kept():
    with serving(good) as server:
        explainer = _explainer(server.url, budget=10000, concurrency=1)
        found = explainer.explain_all(SIGNALS * 30)
        assert explainer.context is not None
        assert explainer.context.budget.spent == 100 * server.asked <= 10000
    failed = [each for each in found if isinstance(each, Failure)]
    assert failed
    assert all("budget of 10000 tokens" in each.reason for each in failed)


def test_the_key_is_sent_and_written_nowhere(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(KEY, "sk-secret-words")
    caplog.set_level("DEBUG")
    with serving(lambda n, m: good(n, m) if n == 1 else 500) as server:
        found = _explainer(server.url, tmp_path, concurrency=1).explain_all(SIGNALS[:2])
        assert server.headers[0]["authorization"] == "Bearer sk-secret-words"
    assert isinstance(found[1], Failure)
    assert "[key]" in found[1].reason
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"sk-secret" not in kept
    assert "sk-secret" not in caplog.text + repr(found) + repr(_explainer(server.url))


def test_a_refused_key_ends_the_run_at_once():
    with serving(lambda *_: 401) as server:
        with pytest.raises(EndpointError, match="401"):
            _explainer(server.url, concurrency=1).explain_all(SIGNALS)
        assert server.asked == 1


def test_a_missing_key_is_told_before_anything_is_asked():
    with pytest.raises(InputError, match=f"set {KEY}"):
        EndpointExplainer("https://models.example.org/v1", "m").prepare(RunContext())
    with pytest.raises(InputError, match="--model-name"):
        EndpointExplainer("http://localhost:1/v1").prepare(RunContext())


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://localhost/v1", "http://", "http://[::1/v1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InputError, match="is not the address of an endpoint"):
        EndpointExplainer(url, "m").prepare(RunContext())


def test_a_password_in_the_address_is_refused():
    with pytest.raises(InputError, match="password") as told:
        EndpointExplainer("http://me:hunter2@localhost:1/v1", "m").prepare(RunContext())
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[true]",
        '{"labels": [true]}',
        '{"labels": [1, 0]}',
        '{"labels": [true, false], "why": ""}',
        'Either {"labels": [true, false]} or {"labels": [true, true]}',
        "[" * 9999,
    ],
)
def test_labels_are_read_strictly(text):
    with pytest.raises(Malformed):
        read_labels(text, 2)


def test_labels_and_descriptions_as_asked_for_are_read():
    assert read_labels('```json\n{"labels": [true, false]}\n```', 2) == (True, False)
    assert read_labels('<think>{"labels": [false]} or so?</think>\n{"labels": [true]}', 1) == (True,)
    assert read_labels('So: {"labels": [true]}, as I said', 1) == (True,)
    assert read_description('{"description": null}') is None
    with pytest.raises(Malformed):
        read_description('{"description": "half \\ud83d"}')
