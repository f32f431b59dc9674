"""The explorer's memory stays within its setting, whatever is recorded: dropped recordings are freed at once."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tests.tiny import tiny_model

ROOT = Path(__file__).parent.parent.parent
PROMPTS, TOKENS, CACHED, SLACK = 200, 200, 64_000_000, 300_000_000

CODE = f"""
import json, gc, psutil
from headtrace.explorer.panels import Settings
from headtrace.explorer.panels.session import Session
from headtrace.explorer.panels.requests import PromptRequest
from tests.tiny import tiny_model

model = tiny_model("llama", num_hidden_layers=8, max_position_embeddings=256)
session = Session([model], Settings(cached_bytes={CACHED}))
process, seen = psutil.Process(), []
def record(number):
    tokens = [(number * 7 + place * place) % 60 for place in range({TOKENS})]
    recorded = session.record(PromptRequest(tokens=tokens))
    recorded.recording.attention.row(0, 0, 0, {TOKENS} - 1)
    seen.append(process.memory_info().rss)
record(0)
for number in range(1, {PROMPTS}):
    record(number)
print(json.dumps({{"first": seen[0], "most": max(seen), "held": session.recordings.n_bytes,
                   "one": session.recordings.n_bytes // len(session.recordings)}}))
"""


def test_memory_stays_within_the_setting_over_many_prompts() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    assert PROMPTS * found["one"] > 3 * (CACHED + SLACK), "all of them together would be far more"
    assert found["held"] <= CACHED
    assert found["most"] - found["first"] <= CACHED + SLACK, found


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
