"""The endpoint against a real HTTP server: right answers are used, every fault is a failure, nothing is asked twice."""

from __future__ import annotations

import json
import socket

import pytest

from headtrace.errors import InputError
from headtrace.interpret import EndpointError, EndpointExplainer, EndpointJudge, Failure, interpret_examples
from headtrace.interpret.asking import KEY, Malformed
from headtrace.interpret.endpoint import read_description, read_labels
from headtrace.interpret.protocols import Budget, Setting
from tests.interpret.made_up_signals import same_token, signal_by
from tests.interpret.serving import good, serving

SIGNALS = [signal_by(same_token, f"L0H0:{channel}", seed=channel) for channel in range(4)]


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)


def _explainer(url: str, folder=None, budget: int | None = None, **options) -> EndpointExplainer:
    options = {"retries": 0, "timeout": 10.0, "concurrency": 2, **options}
    return EndpointExplainer(url, "m", **options).prepare(Setting(None, folder, Budget(budget)))


def test_a_run_through_an_endpoint_has_right_statistics(tmp_path):
    with serving(good) as server:
        options = {"base_url": server.url, "model_name": "m", "retries": 0}
        setting = Setting(None, tmp_path)
        explains = EndpointExplainer(**options).prepare(setting)
        found = interpret_examples(
            SIGNALS, explainer=explains, judge=EndpointJudge(**options).prepare(setting)
        )
        asked = server.asked
        again = interpret_examples(
            SIGNALS, explainer=explains, judge=EndpointJudge(**options).prepare(setting)
        )
        assert server.asked == asked, "every answer is kept"
    assert found.fraction.value == 1.0
    assert all(each.counts.recall.value == 1.0 for each in found.signals)
    assert found.failures == {"signals": 0, "too few examples": 0, "pairs": 0}
    assert again.to_dict() == found.to_dict()


def test_judges_are_not_told_scores_or_kinds():
    with serving(good) as server:
        EndpointJudge(server.url, "m", retries=0).judge(
            read_description('{"description": "x"}'),  # type: ignore[arg-type]
            SIGNALS[0].top[:3],
        )
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
        found = _explainer(server.url, timeout=0.5, concurrency=1).explain_all(SIGNALS)
    assert isinstance(found[0], Failure)
    assert "within 0.5 seconds" in found[0].reason
    assert not any(isinstance(each, Failure) for each in found[1:])


def test_malformed_answers_are_asked_for_once_more_and_then_fail():
    answers = {1: "Sure! The pairs ...", 3: '{"description": 3}', 4: "[]"}
    with serving(lambda n, m: answers.get(n) or good(n, m)) as server:
        found = _explainer(server.url, concurrency=1).explain_all(SIGNALS[:2])
        assert server.asked == 4
    assert not isinstance(found[0], Failure)
    assert isinstance(found[1], Failure)
    assert "not what was asked for" in found[1].reason


def test_a_rate_limit_is_waited_for():
    with serving(lambda n, m: (429, {"Retry-After": "0.2"}) if n <= 2 else good(n, m)) as server:
        found = _explainer(server.url, retries=3, concurrency=1).explain_all(SIGNALS[:1])
        assert server.asked == 3
    assert not isinstance(found[0], Failure)


def test_an_endpoint_that_dies_loses_nothing_and_the_next_run_goes_on(tmp_path):
    with serving(lambda n, m: good(n, m) if n <= 2 else 500) as server:
        found = _explainer(server.url, tmp_path, concurrency=1).explain_all(SIGNALS)
        assert [isinstance(each, Failure) for each in found] == [False, False, True, True]
    with serving(good) as server:
        again = _explainer(server.url, tmp_path).explain_all(SIGNALS)
        assert server.asked == 2, "only what is missing is asked for"
    assert not any(isinstance(each, Failure) for each in again)
    assert again[:2] == found[:2]


def test_a_damaged_answer_on_disk_is_asked_for_again(tmp_path):
    with serving(good) as server:
        _explainer(server.url, tmp_path).explain_all(SIGNALS[:1])
        (file,) = tmp_path.rglob("*.json")
        file.write_text("{half")
        _explainer(server.url, tmp_path).explain_all(SIGNALS[:1])
        assert server.asked == 2


def test_failures_of_the_judge_are_never_negatives():
    with serving(lambda n, m: good(n, m) if n % 2 else 500) as server:
        labels = EndpointJudge(
            server.url, "m", retries=0, concurrency=1
        ).judge(
            read_description('{"description": "x"}'),  # type: ignore[arg-type]
            SIGNALS[0].top[:20],
        )
    assert labels[:10] == (True,) * 10
    assert labels[10:] == (None,) * 10


def test_the_budget_is_kept():
    with serving(good) as server:
        explainer = _explainer(server.url, budget=2500, concurrency=1)
        found = explainer.explain_all(SIGNALS * 30)
        assert explainer.setting is not None
        assert explainer.setting.budget.spent == 100 * server.asked <= 2500
    failed = [each for each in found if isinstance(each, Failure)]
    assert failed
    assert all("budget of 2500 tokens" in each.reason for each in failed)


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
        EndpointExplainer("https://models.example.org/v1", "m").prepare(Setting())
    with pytest.raises(InputError, match="--model-name"):
        EndpointExplainer("http://localhost:1/v1").prepare(Setting())


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://localhost/v1", "http://", "http://[::1/v1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InputError, match="no address"):
        EndpointExplainer(url, "m").prepare(Setting())


def test_a_password_in_the_address_is_refused():
    with pytest.raises(InputError, match="password") as told:
        EndpointExplainer("http://me:hunter2@localhost:1/v1", "m").prepare(Setting())
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[true]",
        '{"labels": [true]}',
        '{"labels": [1, 0]}',
        '{"labels": [true, false], "why": ""}',
        "[" * 9999,
    ],
)
def test_labels_are_read_strictly(text):
    with pytest.raises(Malformed):
        read_labels(text, 2)


def test_labels_and_descriptions_as_asked_for_are_read():
    assert read_labels('```json\n{"labels": [true, false]}\n```', 2) == (True, False)
    assert read_description('{"description": null}') == ""
    with pytest.raises(Malformed):
        read_description('{"description": "half \\ud83d"}')
