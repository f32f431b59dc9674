"""The explorer's memory stays within its setting, whatever is recorded: dropped recordings are freed at once."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import headtrace
from headtrace.explorer.panels import Session, Settings
from headtrace.explorer.panels.mechanisms import QuestionRequest, explain
from headtrace.explorer.panels.requests import PromptRequest
from headtrace.explorer.server.jobs import Compute
from headtrace.models import Recording
from headtrace.tracing.component_flow import DifferenceFlow
from tests.conftest import IOI
from tests.starting import Started
from tests.tiny import tiny_model

PROMPTS, TOKENS, CACHED, SLACK = 200, 200, 64_000_000, 300_000_000


def record_many() -> None:
    """In a process of its own: prompts without end, and how large it is after each."""
    model = tiny_model("llama", num_hidden_layers=8, max_position_embeddings=256)
    session = Session([model], Settings(cached_bytes=CACHED))
    process, seen = psutil.Process(), []
    for number in range(PROMPTS):
        tokens = [(number * 7 + place * place) % 60 for place in range(TOKENS)]
        recorded = session.record(PromptRequest(tokens=tokens))
        recorded.recording.attention.row(0, 0, 0, TOKENS - 1)
        seen.append(process.memory_info().rss)
    held = session.recordings.n_bytes
    found = {"first": seen[0], "most": max(seen), "held": held, "one": held // len(session.recordings)}
    print(json.dumps(found), flush=True)


def told(target: Callable[[], None]) -> dict[str, Any]:
    """What a process that calls this function prints."""
    process = Started(target)
    try:
        line = process.stdout.readline()
        return json.loads(line) if line else pytest.fail(process.told())
    finally:
        process.close()


def test_memory_stays_within_the_setting_over_many_prompts() -> None:
    found = told(record_many)
    assert PROMPTS * found["one"] > 3 * (CACHED + SLACK), "all of them together would be far more"
    assert found["held"] <= CACHED
    assert found["most"] - found["first"] <= CACHED + SLACK, found


def keep_little() -> None:
    """In a process of its own: a job that needs much memory, and keeps little of it."""
    rss = psutil.Process().memory_info
    before, most = rss().rss, []
    compute = Compute(max_waiting=4)
    compute.start()

    def work(job: Any) -> list[bytes]:
        blocks = [b"x" * 60_000 for _ in range(6_000)]  # too small to be given back one by one
        most.append(rss().rss)
        return blocks[::200]  # what is kept lies between what is not

    job = compute.submit(work, keep=True)
    job.wait()
    compute.stop()
    found = {"state": job.state, "grown": most[0] - before, "kept": rss().rss - before}
    print(json.dumps(found), flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="how memory is given back is the C library's own affair")
def test_memory_of_a_trace_is_given_back_when_it_ends() -> None:
    found = told(keep_little)
    assert found["state"] == "done"
    assert found["grown"] > 300_000_000
    assert found["kept"] < 100_000_000, found


def test_after_an_explanation_only_the_recordings_of_the_session_are_held() -> None:
    """Without the garbage collector: flows, changed prompts and what was measured are freed as soon as it is told."""
    session = Session([headtrace.load("builtin")])

    def explained(text: str) -> object:
        recorded = session.record(PromptRequest(text=text))
        return explain(session, QuestionRequest(recording=recorded.id))

    def held() -> int:
        return sum(type(each) in (Recording, DifferenceFlow) for each in gc.get_objects())

    explained(IOI.replace("John gave", "Mary gave"))  # what is made once for a model
    gc.collect()
    others = held() - 1  # of other tests
    gc.disable()
    try:
        _, found = explained(IOI)
        assert found.steps
        assert held() - others == len(session.recordings) == 2
    finally:
        gc.enable()


@pytest.mark.parametrize("patterns", ["keep", "recompute"])
def test_a_recording_is_freed_when_nothing_holds_it(patterns: str) -> None:
    """Without the garbage collector: what is read from a recording must not hold it in a circle."""
    model = tiny_model("llama")
    gc.disable()
    try:
        recording = model.record([[1, 2, 3, 4]], patterns=patterns)
        recording.attention.row(0, 0, 0, 3)
        recording.attention.at(0, 0, 0, 3, 1)
        gone = weakref.ref(recording)
        del recording
        assert gone() is None
    finally:
        gc.enable()
